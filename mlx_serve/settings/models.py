"""Turns flags into the models that are offered: their places and names. Raises StartError of one line.

Uses no MLX: the function that finds a directory or a repository is passed in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlx_serve.demo import model as demo
from mlx_serve.engine.catalog import DEFAULT_NAME, MAX_NAME_CHARS, Catalog, ModelEntry, read_entry
from mlx_serve.paths import expanded, why_missing
from mlx_serve.settings.config import Config
from mlx_serve.settings.file import ModelSpec
from mlx_serve.settings.flags import did_you_mean
from mlx_serve.values import ApiError, Progress, StartError

# Finds the directory of a value of --model.
Locate = Callable[[str], Path]
# NAME=PATH. The name holds no "/", so the part of a path before a "=" is not read as a name.
_NAMED = re.compile(r"([^=/~.][^=/]*)=(.+)")
_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


def catalog(settings: Config, locate: Locate, progress: Progress | None = None) -> Catalog:
    """All models of the settings, under all their names. ``progress`` gets the progress of the demo model."""
    specs = _specs(settings, progress)
    models = [_entry(spec, locate) for spec in specs]
    adapted = [_adapted(models[0], name, path) for name, path in settings.adapter]
    default = models[0] if models else None
    entries = [*models, *adapted]
    _check_names(entries)
    roots = directories(settings)
    make = partial(
        Catalog,
        default,
        roots=roots,
        use_hub_cache=uses_hub_cache(settings),
        models=entries[1:],
        short_names=_short_names(specs, models),
    )
    wanted = [(alias, entry.name) for spec, entry in zip(specs, models, strict=True) for alias in spec.aliases]
    return make(aliases=_aliases([*wanted, *settings.alias], make()))


def draft_path(settings: Config, locate: Locate) -> Path | None:
    """The draft model's directory; None: there is no draft model."""
    if settings.draft_model is None:
        return None
    if not (settings.demo or settings.model or settings.models):
        raise StartError("--draft-model needs --model")
    path = locate(settings.draft_model)
    read_entry("draft", path)
    return path


def _specs(settings: Config, progress: Progress | None) -> list[ModelSpec]:
    """The models as the operator names them, the demo model among them."""
    if not settings.demo:
        specs = named(settings)
        if not specs and (settings.adapter_path or settings.adapter or settings.served_model_name):
            raise StartError("--adapter-path, --adapter and --served-model-name need --model")
        return specs
    if settings.models or settings.model:
        raise StartError("--demo and --model (or the file's [[models]]) exclude each other")
    path = str(demo.ensure_demo_model(progress=progress))
    return _with_flags(settings, [ModelSpec(name=demo.DEMO_MODEL_NAME, path=path)])


def named(settings: Config) -> list[ModelSpec]:
    """The models of --model, or of the file, the default first, with the flags that apply to the default."""
    specs = list(settings.models) or [_spec(text) for text in settings.model]
    return _with_flags(settings, specs) if specs else []


def _with_flags(settings: Config, specs: Sequence[ModelSpec]) -> list[ModelSpec]:
    name, *aliases = settings.served_model_name or (specs[0].name,)
    # `None` is a valid value only for a model's own name; it means "use the directory's name".
    aliases = [*filter(None, aliases), *specs[0].aliases]
    return [replace(specs[0], name=name, aliases=tuple(aliases), adapter_path=settings.adapter_path), *specs[1:]]


def uses_hub_cache(settings: Config) -> bool:
    """Whether requests may name what is in the Hugging Face cache: only where the operator named nothing."""
    return not (settings.demo or settings.models or settings.model or settings.model_dir)


def _spec(text: str) -> ModelSpec:
    match = _NAMED.fullmatch(text)
    if match is None or os.path.exists(expanded(text)):
        return ModelSpec(repo=text)
    return ModelSpec(name=match[1], repo=match[2])


def _entry(spec: ModelSpec, locate: Locate) -> ModelEntry:
    source = place(spec)
    is_directory = os.path.exists(expanded(source))
    if spec.path is not None and not is_directory:
        # Without this check, a mistyped path might be looked for on the hub.
        raise StartError(f"model not found: there is no directory {source!r}{why_missing(expanded(source))}")
    path = locate(source)
    return replace(
        read_entry(name_of(spec, path), path, _adapter(spec.adapter_path)),
        chat_template=spec.chat_template,
        template_options=spec.chat_template_args,
        max_model_len=spec.max_model_len,
        defaults=spec.defaults,
    )


def name_of(spec: ModelSpec, path: Path) -> str:
    """What clients call a model: the given name, or a directory's name, or a repository's whole id.

    The path to a directory is the operator's matter and not for clients.
    """
    if spec.name is not None:
        return spec.name
    source = place(spec)
    return path.resolve().name if os.path.exists(expanded(source)) else source


def place(spec: ModelSpec) -> str:
    """The directory or the repository that a model is given as."""
    return spec.path or spec.repo or ""


def _adapted(base: ModelEntry, name: str, path: str) -> ModelEntry:
    return replace(base, name=name, adapter_path=_adapter(path), base=base.name)


def _adapter(text: str | None) -> Path | None:
    if text is None:
        return None
    path = expanded(text)
    for name in _ADAPTER_FILES:
        if not os.path.isfile(path / name):
            raise StartError(f"adapters not found: {path} has no {name}{why_missing(path / name)}")
    return path


def directories(settings: Config) -> list[Path]:
    """The directories of --model-dir. Raises StartError if one does not exist."""
    roots = [expanded(root) for root in settings.model_dir]
    for root in roots:
        if not os.path.isdir(root):
            raise StartError(f"model directory not found: {root}{why_missing(root)}")
    return roots


def _short_names(specs: Sequence[ModelSpec], models: Sequence[ModelEntry]) -> dict[str, str]:
    """Additional names of models without a given name: the value as typed, as clients of mlx_lm.server send it, and the
    name without its owner."""
    out: dict[str, str] = {}
    for spec, entry in zip(specs, models, strict=True):
        if spec.name is None:
            for name in (place(spec), entry.name.rsplit("/", 1)[-1]):
                out.setdefault(name, entry.name)
    return out


def _check_names(entries: Sequence[ModelEntry]) -> None:
    for i, entry in enumerate(entries):
        _check_name(entry.name)
        if "*" in entry.name:
            raise StartError(f"the name {entry.name!r} of a model holds '*': only an alias may be a pattern")
        if entry.name in (other.name for other in entries[:i]):
            raise StartError(f"two models are called {entry.name!r}: rename one, with NAME=PATH or the file's name")
        if i > 0 and entry.name == DEFAULT_NAME:
            raise StartError(f"no other model can be called {DEFAULT_NAME!r}: this name means the first one")


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise StartError(f"{name[:MAX_NAME_CHARS]!r} cannot be a model's name: at most {MAX_NAME_CHARS} characters")


def _aliases(wanted: Sequence[tuple[str, str]], plain: Catalog) -> dict[str, str]:
    """From alias to model. ``plain`` is the catalog without aliases, so an alias of an alias is not found in it."""
    out: dict[str, str] = {}
    taken = _taken_names(plain)
    for alias, text in wanted:
        _check_name(alias)
        model = _model_called(text, alias, plain)
        if taken.get(alias, model) != model or out.get(alias, model) != model:
            raise StartError(f"alias {alias!r} of {model!r}: another model has that name")
        if alias not in taken:
            out[alias] = model
    return out


def _taken_names(plain: Catalog) -> dict[str, str]:
    names = {entry.name: entry.name for entry in plain.models()}
    return names if plain.default is None else {DEFAULT_NAME: plain.default.name} | names


def _model_called(name: str, alias: str, plain: Catalog) -> str:
    try:
        return plain.find(name).name
    except ApiError as error:
        if error.status != 404:
            raise StartError(f"alias {alias!r}: {name!r}: {error.message}") from error
        hint = did_you_mean(name, _names(plain))
        raise StartError(f"alias {alias!r}: no model is called {name!r}{hint}") from None


def _names(plain: Catalog) -> Iterator[str]:
    return (entry.name for entry in plain.entries())
