"""Lists the models on this machine by the server's own rules for names and places.

Unlike the server's catalog, the list includes models that cannot be served, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_serve.engine.model_files import Fault, ModelFiles, look_into
from mlx_serve.engine.model_places import ModelPlace, below, hub_path, in_hub_cache
from mlx_serve.paths import expanded
from mlx_serve.settings import models as model_options
from mlx_serve.settings.config import Config


@dataclass(frozen=True, slots=True)
class Found:
    """A model, its name in requests, and the flag or directory that it comes from."""

    name: str
    source: str
    files: ModelFiles


def models(settings: Config) -> list[Found]:
    """The models of the flags, the model directories, and the hub cache if it is used. Each directory appears once."""
    by_path: dict[Path, Found] = {}
    by_name: dict[str, Path] = {}
    for source, place in _places(settings):
        if place.path.resolve() in by_path:
            continue
        first = by_name.setdefault(place.name, place.path)
        hidden = "" if first == place.path else f"the name {place.name!r} already belongs to {first}"
        by_path[place.path.resolve()] = Found(place.name, source, _with_fault(place, place.fault or hidden))
    return list(by_path.values())


def _places(settings: Config) -> Iterator[tuple[str, ModelPlace]]:
    for spec in model_options.named(settings):
        source = model_options.place(spec)
        path = expanded(source) if os.path.isdir(expanded(source)) else hub_path(source)
        if path is not None:
            yield "--model", ModelPlace(model_options.name_of(spec, path), path)
    for root in filter(os.path.isdir, map(expanded, settings.model_dir)):
        yield from ((str(root), place) for place in below(root))
    if model_options.uses_hub_cache(settings):
        yield from (("hub cache", place) for place in in_hub_cache())


def _with_fault(place: ModelPlace, text: str) -> ModelFiles:
    files = look_into(place.path)
    if not text:
        return files
    return replace(
        files,
        faults=(*files.faults, Fault(text, "rename the directory, or give the model another name: --model NAME=PATH")),
    )
