"""The state of a model directory, from its files alone: whether they are complete, and what they say of the model.

Reads JSON and the heads of safetensors files, never a weight; must not know MLX. The layout of a safetensors file is
its specification's: 8 bytes with the header's length, the header (JSON), the data.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_serve.engine.architectures import architecture_fault
from mlx_serve.engine.catalog import NotAModelError, read_entry
from mlx_serve.engine.model_directory import MAX_TOKENIZER_BYTES, check_files, open_regular, parse_json, read_object

# The specification's own bound on a header.
_MAX_HEADER_BYTES = 100_000_000
_LFS = b"version https://git-lfs"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# File names in a message.
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem in a model directory, and what to do. ``fatal``: the model cannot be served."""

    text: str
    advice: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model directory. ``weight_bytes``: the size of all safetensors files. None: the files do not say."""

    path: Path
    model_type: str | None
    quantization: str | None
    context_tokens: int | None
    weight_bytes: int
    has_chat_template: bool
    faults: tuple[Fault, ...]

    @property
    def servable(self) -> bool:
        return not any(fault.fatal for fault in self.faults)


def look_into(path: Path) -> ModelFiles:
    """Read a model directory. Problems in it are listed in ``faults`` and never raised."""
    if closed := _closed(path):
        text = f"this user may not read {', '.join(closed[:_MOST_NAMED])}" + (
            "" if len(closed) <= _MOST_NAMED else ", ..."
        )
        fault = Fault(text, f"let the server's user read them: chmod -R a+rX {path}")
        return ModelFiles(path, None, None, None, _weight_bytes(path), has_chat_template=False, faults=(fault,))
    faults: list[Fault] = []
    config, context = _config(path, faults)
    model_type = config.get("model_type")
    if not faults and not isinstance(model_type, str):
        faults.append(Fault("config.json has no model_type", "download the model again, in mlx-lm's format"))
    if unknown := architecture_fault(config):
        faults.append(Fault(unknown, "update mlx-lm within the range that mlx-serve allows, or use another model"))
    faults += _strange_files(path)
    faults += _weight_faults(path)
    faults += _tokenizer_faults(path)
    template = has_chat_template(path)
    if not template:
        text = "it has no chat template: messages are joined as plain lines"
        faults.append(Fault(text, "give one with --chat-template, or use /v1/completions", fatal=False))
    return ModelFiles(
        path=path,
        model_type=model_type if isinstance(model_type, str) else None,
        quantization=quantization(config) or _stored_type(path),
        context_tokens=context,
        weight_bytes=_weight_bytes(path),
        has_chat_template=template,
        faults=tuple(faults),
    )


def quantization(config: dict[str, Any]) -> str | None:
    """ "4-bit", "mxfp4", or the type of plain weights, from config.json."""
    found = config.get("quantization") or config.get("quantization_config")
    if isinstance(found, dict):
        mode = found.get("mode") or found.get("quant_method")
        bits = found.get("bits")
        if isinstance(mode, str) and mode != "affine":
            return mode
        if type(bits) is int:
            mixed = any(isinstance(part, dict) for part in found.values())
            return f"{bits}-bit, mixed" if mixed else f"{bits}-bit"
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    for name in ("torch_dtype", "dtype"):
        kind = config.get(name) or inner.get(name)
        if isinstance(kind, str):
            return kind
    return None


def _stored_type(path: Path) -> str | None:
    """The type of most of the first file's tensors, by its name in the format, such as F32."""
    for file in sorted(path.glob("model*.safetensors"))[:1]:
        if not shard_fault(file):
            found = [tensor.get("dtype") for name, tensor in _header(file).items() if name != "__metadata__"]
            types = [name for name in found if isinstance(name, str)]
            return max(set(types), key=types.count, default=None)
    return None


def has_chat_template(path: Path) -> bool:
    """Whether there is a template, in its own file or in tokenizer_config.json."""
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    try:
        config = read_object(path / "tokenizer_config.json")
    except (OSError, ValueError):
        return False
    return bool(config.get("chat_template") or config.get("chat_template_type"))


def _config(path: Path, faults: list[Fault]) -> tuple[dict[str, Any], int | None]:
    try:
        entry = read_entry(path.name, path)
    except NotAModelError as error:
        faults.append(Fault(str(error), "name a directory that holds a model in mlx-lm's format"))
        return {}, None
    return read_object(path / "config.json"), entry.context_tokens


def _strange_files(path: Path) -> Iterator[Fault]:
    try:
        check_files(path)
    except NotADirectoryError:  # not a directory: reported already
        return
    except OSError as error:
        yield Fault(f"{error.filename}: {error.strerror}", "take out what does not belong to the model")


def _weight_faults(path: Path) -> Iterator[Fault]:
    again = "download the model again: `hf download REPO` goes on where it ended"
    for name in _missing_shards(path):
        yield Fault(f"{name} is named in model.safetensors.index.json and is not there", again)
    for file in sorted(path.glob("model*.safetensors")):
        if text := shard_fault(file):
            yield Fault(f"{file.name} {text}", again)
    for leftover in sorted(path.glob("*.incomplete")):
        yield Fault(f"{leftover.name} is a download that did not end", again, fatal=False)


def _missing_shards(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        shards = read_object(index).get("weight_map")
    except (OSError, ValueError):
        # mlx-lm does not read the index, so a damaged one is no reason to refuse.
        return []
    if not isinstance(shards, dict):
        return []
    names = {name for name in shards.values() if isinstance(name, str) and "/" not in name}
    return sorted(name for name in names if not (path / name).exists())


def shard_fault(file: Path) -> str:
    """What is wrong with a safetensors file, or ""; by its header and its length."""
    try:
        size = file.stat().st_size
        if _is_lfs_pointer(file):
            return "is a Git LFS pointer, not the file itself"
        header = _header(file)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        wanted = _data_start(file) + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return "is cut short, or is no safetensors file"
    return f"is cut short: it has {size} of {wanted} bytes" if size < wanted else ""


def _is_lfs_pointer(file: Path) -> bool:
    with open_regular(file) as raw:
        return raw.read(len(_LFS)) == _LFS


def _data_start(file: Path) -> int:
    """Where a safetensors file's data begins. Raises OSError, and ValueError when that is beyond its end."""
    size = file.stat().st_size
    with open_regular(file) as raw:
        start = raw.read(8)
    n_header = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if n_header > min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError("the header does not end in the file")
    return 8 + int(n_header)


def _header(file: Path) -> dict[str, Any]:
    """A safetensors file's header. Raises OSError and ValueError."""
    n_bytes = _data_start(file) - 8
    with open_regular(file) as raw:
        raw.seek(8)
        header = parse_json(raw.read(n_bytes))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header


def _tokenizer_faults(path: Path) -> Iterator[Fault]:
    if not any((path / name).is_file() for name in _TOKENIZERS):
        # tiktoken files have other names.
        if not any(path.glob("*.tiktoken")):
            yield Fault("it has no tokenizer (tokenizer.json, tokenizer.model)", "download the whole model")
        return
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            read_object(path / name, MAX_TOKENIZER_BYTES)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            yield Fault(f"{name} cannot be read: {reason}", "download the model again")


def _closed(path: Path) -> list[str]:
    """The files of a model directory that exist and that this user may not read."""
    try:
        return sorted(file.name for file in path.iterdir() if os.path.exists(file) and not os.access(file, os.R_OK))
    except OSError:  # not a directory, or a closed one: reported elsewhere
        return []


def _weight_bytes(path: Path) -> int:
    return sum(_size(file) for file in path.glob("*.safetensors"))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # a link into the hub's cache whose file was deleted; ``faults`` reports it
        return 0
