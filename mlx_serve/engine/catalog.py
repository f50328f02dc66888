"""Which models a request may name, and their directories. Touches the file system, never MLX.

A client can only reach what the operator named: the models of the command line and the configuration file and their
aliases, the directories below the model directories, or, when neither was given, what the operator has already
downloaded into the Hugging Face cache. Nothing is downloaded because a client asked for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_serve.engine.architectures import architecture_fault
from mlx_serve.engine.model_directory import read_object
from mlx_serve.engine.model_places import ModelPlace, below, hub_path, in_hub_cache, name_parts
from mlx_serve.values import ApiError

# mlx_lm.server's name for "the model of the command line".
DEFAULT_NAME = "default_model"
# The longest name that an operator may give or that a pattern may match.
MAX_NAME_CHARS = 256
_NOTHING: Mapping[str, str] = MappingProxyType({})
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be served. ``created``: seconds since the epoch. None: config.json has no such value.

    ``base`` names the model that an adapter extends, when both are served. The other fields are the operator's settings
    for this model: a chat template that replaces the tokenizer's, its arguments, a cap on prompt plus output tokens,
    and the defaults of requests (by the names of ``values.Sampling``).
    """

    name: str
    path: Path
    created: int
    context_tokens: int | None
    vocab_size: int | None
    adapter_path: Path | None = None
    base: str | None = None
    chat_template: str = ""
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    max_model_len: int | None = None
    defaults: Mapping[str, float] = field(default_factory=dict, hash=False)


class NotAModelError(Exception):
    """The directory holds no model. The text is one line that says what is missing."""


class UnknownTypeError(NotAModelError):
    """The directory holds a model that mlx-lm has no code for, such as a BERT embedder."""


def read_entry(name: str, path: Path, adapter_path: Path | None = None) -> ModelEntry:
    """Read a model directory. Raises NotAModelError when something is missing or unreadable."""
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


def context_limit(entry: ModelEntry, max_model_len: int | None) -> int | None:
    """The most tokens of prompt and output together. ``max_model_len``: the server's cap. None: no limit is known.

    A model's own cap replaces the server's.
    """
    cap = max_model_len if entry.max_model_len is None else entry.max_model_len
    return min((limit for limit in (entry.context_tokens, cap) if limit is not None), default=None)


def _first_int(settings: dict[str, Any], keys: Sequence[str]) -> int | None:
    values = (settings.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_object(path / "config.json")
    except FileNotFoundError:
        raise NotAModelError(f"{path} is not a model directory: it has no config.json") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise NotAModelError(f"{path / 'config.json'} cannot be read: {reason}") from None


class Catalog:
    """The models that requests can name. ``default`` is also found by ``names``; ``roots`` are the model directories.

    ``models`` are the operator's further models. ``short_names`` and ``aliases`` map to the name of a model. Listings
    contain the aliases, except patterns (a "*" matches any text). An exact name takes precedence over patterns, and a
    longer pattern over a shorter one.
    """

    def __init__(
        self,
        default: ModelEntry | None = None,
        names: Sequence[str] = (),
        roots: Sequence[Path] = (),
        *,
        use_hub_cache: bool = False,
        models: Sequence[ModelEntry] = (),
        short_names: Mapping[str, str] = _NOTHING,
        aliases: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.default = default
        first = [default] if default is not None else []
        self._models = {entry.name: entry for entry in (*first, *models)}
        self._unlisted = dict(short_names)
        if default is not None:
            self._unlisted |= dict.fromkeys([*names, DEFAULT_NAME], default.name)
        self._aliases = {name: model for name, model in aliases.items() if "*" not in name}
        patterns = [name for name in aliases if "*" in name]
        self._patterns = {name: aliases[name] for name in sorted(patterns, key=len, reverse=True)}
        self._roots = tuple(roots)
        self._use_hub_cache = use_hub_cache
        # All models that were ever offered by name: a request of one that no longer is may still run.
        self._known = dict(self._models)

    def become(self, other: Catalog) -> list[str]:
        """Offer what another catalog offers. Returns the names that now stand for another directory.

        Their former models stay, since a loaded model, its tokenizer and its caches go by its name. Any thread.
        """
        moved = [name for name, entry in other._models.items() if _has_moved(self._known.get(name), entry)]
        state = vars(other) | {"_models": other._models | {name: self._known[name] for name in moved}}
        if other.default is not None:
            state["default"] = state["_models"][other.default.name]
        state["_known"] = self._known | state["_models"]
        # One assignment: a request that reads at this moment sees the one catalog or the other.
        self.__dict__ = state
        return moved

    def entry(self, name: str) -> ModelEntry:
        """A model that is or was offered, by its own name. Raises ApiError 404."""
        return self._known.get(name) or self.find(name)

    def find(self, name: str | None) -> ModelEntry:
        """The model that a request names; None is the default one. Raises ApiError 404 ``model_not_found``."""
        return self.look_up(name)[1]

    def look_up(self, name: str | None) -> tuple[str, ModelEntry]:
        """Like ``find``, with the public name of the result: the alias if the request used one, else the model's."""
        if name is None and self.default is not None:
            return self.default.name, self.default
        if name and name in self._aliases:
            return name, self._model(self._aliases[name])
        entry = self._find_exactly(name) if name else None
        if entry is not None:
            return entry.name, entry
        if name and (model := self._match(name)):
            return name, self._model(model)
        raise _not_found(name)

    def models(self) -> list[ModelEntry]:
        """The models that the operator named one by one, the default first."""
        return list(self._models.values())

    def entries(self) -> list[ModelEntry]:
        """All models that could be served, the default first, each name once."""
        # The first place with a name hides later ones, even if it is unusable, because requests get the first one.
        places: dict[str, ModelPlace] = {}
        for place in self._places():
            places.setdefault(place.name, place)
        others = [place for place in places.values() if not place.fault and place.name not in self._models]
        return [*self.models(), *(entry for place in others for entry in _readable(place.name, place.path))]

    def _places(self) -> Iterator[ModelPlace]:
        for root in self._roots:
            yield from below(root)
        if self._use_hub_cache:
            yield from in_hub_cache()

    def listing(self) -> list[tuple[str, ModelEntry]]:
        """Public names with their models: the models first, then the aliases whose models exist."""
        models = {entry.name: entry for entry in self.entries()}
        aliases = [(name, models[model]) for name, model in self._aliases.items() if model in models]
        # An alias hides a directory with the same name.
        return [(name, entry) for name, entry in models.items() if name not in self._aliases] + aliases

    def _model(self, name: str) -> ModelEntry:
        """The model of an alias. It may have been below a model directory and be gone now."""
        entry = self._find_exactly(name)
        if entry is None:
            raise _not_found(name)
        return entry

    def _find_exactly(self, name: str) -> ModelEntry | None:
        entry = self._models.get(name) or self._models.get(self._unlisted.get(name, "")) or self._find_below_roots(name)
        return _find_in_hub_cache(name) if entry is None and self._use_hub_cache else entry

    def _match(self, name: str) -> str | None:
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            return None
        return next((model for pattern, model in self._patterns.items() if _fits(name, pattern)), None)

    def _find_below_roots(self, name: str) -> ModelEntry | None:
        parts = name_parts(name)
        for root in self._roots if parts else ():
            path = root.joinpath(*parts)
            if os.path.isfile(path / "config.json") and _is_spelled_so(path, len(parts)):
                return _entry_or_refuse(name, path)
        return None


def _has_moved(before: ModelEntry | None, now: ModelEntry) -> bool:
    return before is not None and (before.path, before.adapter_path) != (now.path, now.adapter_path)


def _fits(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern with at least one "*". Each part is searched once, from left to right.

    This is not a regular expression: with several "*" a client could make one backtrack without end.
    """
    first, *middle, last = pattern.split("*")
    if not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return at <= end


def _is_spelled_so(path: Path, n_parts: int) -> bool:
    """Whether the last parts of an existing path are spelled as on disk.

    macOS opens "QWEN" for "Qwen". Without this check, each spelling of a name would load one more model.
    """
    ends = [path, *path.parents][:n_parts]
    return all(end.name in os.listdir(end.parent) for end in ends)


def _entry_or_refuse(name: str, path: Path) -> ModelEntry:
    try:
        return _loadable(name, path)
    except UnknownTypeError:
        raise _not_found(name) from None
    except NotAModelError:
        # The error's text has the operator's paths, so clients do not get it. ``--model`` on the directory shows it.
        raise ApiError(
            500, "The model's directory is incomplete or damaged.", type="server_error", param="model"
        ) from None


def _find_in_hub_cache(name: str) -> ModelEntry | None:
    path = hub_path(name)
    # The cache's layout is models--OWNER--NAME/snapshots/COMMIT.
    return _entry_or_refuse(name, path) if path is not None and _is_spelled_so(path.parents[1], 1) else None


def _readable(name: str, path: Path) -> Iterator[ModelEntry]:
    # Listings leave out directories without a language model. A request that names one gets the reason.
    try:
        yield _loadable(name, path)
    except NotAModelError:
        return


def _loadable(name: str, path: Path) -> ModelEntry:
    """The entry of a model that a client may name. Raises NotAModelError."""
    entry = read_entry(name, path)
    if fault := architecture_fault(_read_config(path)):
        raise UnknownTypeError(f"{path} cannot be loaded: {fault}")
    return entry


def _not_found(name: str | None) -> ApiError:
    text = "This server has no default model; name one in 'model'." if name is None else _unknown(name)
    return ApiError(404, text, param="model", code="model_not_found")


def _unknown(name: str) -> str:
    # A name is echoed only if it is harmless: routers act on some words in error messages.
    shown = f" '{name}'" if len(name) <= 128 and re.fullmatch(r"[\w./:+@-]+", name, re.ASCII) else ""
    return f"The model{shown} does not exist on this server; GET /v1/models lists those that do."
