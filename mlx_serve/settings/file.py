"""The file of ``--config``: TOML with flags by their names, and a table for each model. Knows no single flag.

An error is a StartError of one line that names the file, the key, and the allowed values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mlx_serve.settings.flags import Flag, did_you_mean, file_path, flag, flags_of, penalty, template_arguments
from mlx_serve.values import StartError

_MODEL, _SAMPLING = "model", "sampling defaults"


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The keys of ``[models.defaults]`` that have no flag; those of the sampling flags are keys there too."""

    repetition_penalty: float | None = flag(_SAMPLING, None, "0: off", parse=penalty)
    presence_penalty: float | None = flag(_SAMPLING, None, "0: off", parse=float, low=-2, high=2)
    frequency_penalty: float | None = flag(_SAMPLING, None, "0: off", parse=float, low=-2, high=2)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model that the operator names: a ``[[models]]`` table, or a ``--model``. ``defaults`` has only given keys."""

    name: str | None = flag(_MODEL, None, "name that requests use; else the directory's, or the repository's id")
    path: str | None = flag(_MODEL, None, "model directory", parse=file_path)
    repo: str | None = flag(_MODEL, None, "Hugging Face repo id, instead of path")
    adapter_path: str | None = flag(_MODEL, None, "trained adapter weights on top of it", parse=file_path)
    aliases: tuple[str, ...] = flag(_MODEL, (), "additional names, or patterns with *", many=True)
    draft_model: str | None = flag(_MODEL, None, "draft model; the first model's only", parse=file_path)
    chat_template: str = flag(_MODEL, "", "chat template (Jinja text)")
    chat_template_args: Mapping[str, Any] = flag(
        _MODEL, {}, "arguments for the chat template", parse=template_arguments
    )
    max_model_len: int | None = flag(_MODEL, None, "limit of prompt plus output tokens", parse=int, low=2)
    defaults: Mapping[str, float] = field(default_factory=dict)


def sampling_flags(flags: Mapping[str, Flag]) -> dict[str, str]:
    """The flags for sampling, by the names of ``values.Sampling``."""
    # A flag has mlx_lm.server's name, a request's field OpenAI's.
    return {"temperature" if name == "temp" else name: name for name, it in flags.items() if it.group == _SAMPLING}


def model_defaults(flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """The keys of ``[models.defaults]``: what a request for the model gets when it does not say."""
    return {name: flags[of_flag] for name, of_flag in sampling_flags(flags).items()} | flags_of(ModelDefaults)


def read(path: Path, flags: Mapping[str, Flag]) -> tuple[dict[str, Any], tuple[ModelSpec, ...]]:
    """The file's values for ``flags``, by name, and its models. Raises StartError."""
    document = _load(path)
    tables = document.pop("models", [])
    values = _values(document, flags, str(path))
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise StartError(f"{path}: models: must be tables, each under a line [[models]]")
    if tables and "model" in values:
        raise StartError(f"{path}: model and [[models]] exclude each other")
    models = tuple(_model(table, flags, str(path), i) for i, table in enumerate(tables))
    return values, models


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise StartError(f"{path} is not valid TOML: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and bytes that are not UTF-8
        raise StartError(f"{path} is not valid TOML: {error}") from error


def _model(table: dict[str, Any], flags: Mapping[str, Flag], file: str, i: int) -> ModelSpec:
    where = f"{file}: models[{i}]"
    table = dict(table)
    defaults = table.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise StartError(f"{where}.defaults: must be a table, under a line [models.defaults]")
    values = _values(table, flags_of(ModelSpec), f"{where}.", above=flags)
    if ("path" in values) == ("repo" in values):
        raise StartError(f"{where}: must have one of path and repo")
    if i > 0 and "draft_model" in values:
        raise StartError(f"{where}.draft_model: only the first model can have a draft model")
    return ModelSpec(**values, defaults=_values(defaults, model_defaults(flags), f"{where}.defaults."))


def _values(
    table: Mapping[str, Any], known: Mapping[str, Flag], prefix: str, above: Mapping[str, Flag] | None = None
) -> dict[str, Any]:
    """A table's values by field name; a key may have dashes. ``above``: keys that must stand before the first table."""
    prefix = prefix if prefix.endswith(".") else f"{prefix}: "
    out: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in out:
            raise StartError(f"{prefix}{key}: given twice, with a dash and with an underscore")
        if name not in known:
            _refuse_key(prefix, key, known, above or {})
        try:
            out[name] = known[name].from_toml(value)
        except ValueError as error:
            raise StartError(f"{prefix}{key}: {error}") from None
    return out


def _refuse_key(prefix: str, key: str, known: Mapping[str, Flag], above: Mapping[str, Flag]) -> NoReturn:
    name = key.replace("-", "_")
    hint = did_you_mean(name, known)
    if not hint and name in above:
        # In TOML, a key belongs to the table whose heading stands above it.
        hint = " (it is for the whole server: write it above the first [[models]])"
    allowed = f"; allowed: {', '.join(known)}" if len(known) < 20 else "; mlx-serve --help lists those there are"
    raise StartError(f"{prefix}{key}: unknown key{hint}{allowed}")
