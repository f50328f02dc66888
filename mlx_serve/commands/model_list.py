"""Where models may lie on this machine: the places that the server's flags name, and the Hugging Face cache.

Unlike the server's catalog it also lists models that can't be served, with the reason for the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from mlx_serve.engine.model_files import ModelFiles, look_into
from mlx_serve.paths import expanded
from mlx_serve.settings.config import Config


@dataclass(frozen=True, slots=True)
class Found:
    """A model, the name that a request gives it, and where it came from."""

    name: str
    source: str
    files: ModelFiles


def models(settings: Config) -> list[Found]:
    """What the flags name, then the model directories, then the cache; each directory once."""
    seen: dict[Path, Found] = {}
    for found in (*_named(settings), *_below_roots(settings), *hub_models()):
        seen.setdefault(found.files.path.resolve(), found)
    return list(seen.values())


def named(settings: Config) -> list[tuple[str | None, str]]:
    """The models that the flags name: a name, when they give one, and a directory or repository."""
    found = [(spec.name, spec.path or spec.repo or "") for spec in settings.models]
    found += [_name_and_place(text) for text in settings.model]
    if found and settings.served_model_name:
        found[0] = (settings.served_model_name[0], found[0][1])
    return found


def _name_and_place(text: str) -> tuple[str | None, str]:
    """NAME=PATH, unless that is a path itself."""
    name, sign, place = text.partition("=")
    if sign and place and "/" not in name and not expanded(text).exists():
        return name, place
    return None, text


def _named(settings: Config) -> Iterator[Found]:
    for name, place in named(settings):
        path = expanded(place)
        if path.is_dir():
            yield Found(name or path.resolve().name, "--model", look_into(path))


def _below_roots(settings: Config) -> Iterator[Found]:
    for root in (expanded(root) for root in settings.model_dir):
        for file in sorted([*root.glob("*/config.json"), *root.glob("*/*/config.json")]):
            yield Found(file.parent.relative_to(root).as_posix(), str(root), look_into(file.parent))


def hub_models() -> Iterator[Found]:
    """The repositories in the Hugging Face cache, at their main revision."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        main = repo.refs.get("main")
        if repo.repo_type == "model" and main is not None:
            yield Found(repo.repo_id, "hub cache", look_into(main.snapshot_path))
