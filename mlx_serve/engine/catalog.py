"""Which models a request may name, and where they lie. Touches the file system, never MLX.

A client can only reach what the operator named: the models of the command line, the directories below the model
directories, or, when neither was given, what the operator has already downloaded into the Hugging Face cache. Nothing
is downloaded because a client asked for it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.errors import CacheNotFound, HFValidationError, LocalEntryNotFoundError

from mlx_serve.core import ApiError

# mlx_lm.server's name for "the model of the command line".
DEFAULT_NAME = "default_model"
# What one part of a model's name may hold: no separator, no leading dot, so no way out of a directory.
_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@ -]{0,127}")
# Model directories are laid out as NAME or as OWNER/NAME.
_MAX_PARTS = 2
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served. ``created``: seconds since the epoch. None: its config.json does not say."""

    name: str
    path: Path
    created: int
    context_tokens: int | None
    vocab_size: int | None
    adapter_path: Path | None = None


class NotAModelError(Exception):
    """A directory that holds no model; the text is one line that says what is missing."""


def read_entry(name: str, path: Path, adapter_path: Path | None = None) -> ModelEntry:
    """Look into a model directory. Raises NotAModelError when something is missing or unreadable."""
    if not path.is_dir():
        raise NotAModelError(f"{path} is not a directory")
    config = _read_config(path)
    if not any(path.glob("model*.safetensors")):
        raise NotAModelError(f"{path} is not a model directory: it has no model*.safetensors")
    text_config = config.get("text_config")
    settings = config | text_config if isinstance(text_config, dict) else config
    context = _first_int(settings, _CONTEXT_KEYS)
    return ModelEntry(
        name, path, int(path.stat().st_mtime), context, _first_int(settings, ("vocab_size",)), adapter_path
    )


def _first_int(settings: dict[str, Any], keys: Sequence[str]) -> int | None:
    values = (settings.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotAModelError(f"{path} is not a model directory: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise NotAModelError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise NotAModelError(f"{path / 'config.json'} is not a JSON object")
    return config


class Catalog:
    """``default`` is the command line's model, which answers to ``names``; ``roots`` are the model directories."""

    def __init__(
        self,
        default: ModelEntry | None = None,
        names: Sequence[str] = (),
        roots: Sequence[Path] = (),
        *,
        use_hub_cache: bool = False,
    ) -> None:
        self.default = default
        self._names = frozenset([*names, DEFAULT_NAME]) if default is not None else frozenset()
        self._roots = tuple(roots)
        self._use_hub_cache = use_hub_cache

    def find(self, name: str | None) -> ModelEntry:
        """The model that a request names; None is the default one. Raises ApiError 404 ``model_not_found``."""
        if self.default is not None and (name is None or name in self._names):
            return self.default
        entry = self._find_below_roots(name) if name else None
        if entry is None and name and self._use_hub_cache:
            entry = _find_in_hub_cache(name)
        if entry is None:
            raise _not_found(name)
        return entry

    def entries(self) -> list[ModelEntry]:
        """All that could be served, the default first, each name once."""
        found = [self.default] if self.default is not None else []
        found += [entry for root in self._roots for entry in _entries_below(root)]
        found += list(_hub_entries()) if self._use_hub_cache else []
        return list({entry.name: entry for entry in reversed(found)}.values())[::-1]

    def _find_below_roots(self, name: str) -> ModelEntry | None:
        parts = name.split("/")
        if len(parts) > _MAX_PARTS or not all(_NAME_PART.fullmatch(part) for part in parts):
            return None
        for root in self._roots:
            path = root.joinpath(*parts)
            if _is_inside(path, root) and (path / "config.json").is_file():
                return _entry_or_refuse(name, path)
        return None


def _is_inside(path: Path, root: Path) -> bool:
    # Symbolic links may point about inside the root, not out of it.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _entry_or_refuse(name: str, path: Path) -> ModelEntry:
    try:
        return read_entry(name, path)
    except NotAModelError:
        # Its text names the operator's paths: not for clients. Starting with --model on it tells the operator.
        raise ApiError(
            500, "The model's directory is incomplete or damaged.", type="server_error", param="model"
        ) from None


def _entries_below(root: Path) -> Iterator[ModelEntry]:
    for config in sorted([*root.glob("*/config.json"), *root.glob("*/*/config.json")]):
        path = config.parent
        name = path.relative_to(root).as_posix()
        if _is_inside(path, root) and all(_NAME_PART.fullmatch(part) for part in name.split("/")):
            yield from _readable(name, path)


def _find_in_hub_cache(name: str) -> ModelEntry | None:
    # Not by scanning the cache: that looks at every file of every repository, and this is asked for each request.
    parts = name.split("/")
    if len(parts) != _MAX_PARTS or not all(_NAME_PART.fullmatch(part) for part in parts):
        return None
    try:
        path = snapshot_download(name, local_files_only=True, allow_patterns=["config.json"])
    except (LocalEntryNotFoundError, HFValidationError, CacheNotFound):
        return None
    return _entry_or_refuse(name, Path(path))


def _hub_entries() -> Iterator[ModelEntry]:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        main = repo.refs.get("main")
        if repo.repo_type == "model" and main is not None:
            yield from _readable(repo.repo_id, main.snapshot_path)


def _readable(name: str, path: Path) -> Iterator[ModelEntry]:
    # A listing leaves out what is no language model; asking for it by name says why.
    try:
        yield read_entry(name, path)
    except NotAModelError:
        return


def _not_found(name: str | None) -> ApiError:
    text = "This server has no default model; name one in 'model'." if name is None else _unknown(name)
    return ApiError(404, text, param="model", code="model_not_found")


def _unknown(name: str) -> str:
    # Echoed only when it is harmless: routers act on some words in error messages.
    shown = f" '{name}'" if len(name) <= 128 and re.fullmatch(r"[\w./:+@-]+", name, re.ASCII) else ""
    return f"The model{shown} does not exist on this server; GET /v1/models lists those that do."
