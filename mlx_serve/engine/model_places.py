"""The directories of models on this machine, and the names by which requests can ask for them.

The server's catalog, ``mlx-serve models`` and ``doctor`` all list through this module, so that they agree. A name that
no request can ask for has a ``fault``. Touches the file system, never MLX, and does not look into a model's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.errors import CacheNotFound, HFValidationError, LocalEntryNotFoundError

# The files that mlx_lm.load downloads from a repository.
HUB_FILES = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
# The characters of one part of a model's name. No separator and no leading dot, so a name cannot leave its directory.
_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@ -]{0,127}")
# Model directories are laid out as NAME or as OWNER/NAME, the hub's cache as OWNER/NAME alone.
_MAX_PARTS = 2


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """A directory that may hold a model. ``fault``: why no request can name it; "" when one can."""

    name: str
    path: Path
    fault: str = ""


def name_parts(name: str) -> list[str]:
    """The parts of a name. Empty: no model below a directory can have this name."""
    parts = name.split("/")
    return parts if len(parts) <= _MAX_PARTS and all(_NAME_PART.fullmatch(part) for part in parts) else []


def below(root: Path) -> Iterator[ModelPlace]:
    """The directories below a model directory that have a config.json, as NAME and as OWNER/NAME."""
    for config in sorted([*root.glob("*/config.json"), *root.glob("*/*/config.json")]):
        name = config.parent.relative_to(root).as_posix()
        yield ModelPlace(name, config.parent, "" if name_parts(name) else _unusable(name))


def in_hub_cache() -> Iterator[ModelPlace]:
    """The models in the Hugging Face cache, at their main revision."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        main = repo.refs.get("main")
        if repo.repo_type == "model" and main is not None:
            fault = "" if _is_repository_name(repo.repo_id) else _unusable(repo.repo_id)
            yield ModelPlace(repo.repo_id, main.snapshot_path, fault)


def hub_path(name: str) -> Path | None:
    """Where a repository's main revision lies in the Hugging Face cache; None: it is not there."""
    # A scan of the cache would read every file of every repository, and this runs for each request.
    if not _is_repository_name(name):
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=["config.json"]))
    except (LocalEntryNotFoundError, HFValidationError, CacheNotFound):
        return None


def _is_repository_name(name: str) -> bool:
    return len(name_parts(name)) == _MAX_PARTS


def _unusable(name: str) -> str:
    return (
        f"no request can name {name!r}: a name is NAME or OWNER/NAME, of letters, digits, blanks and any of _ . + @ -"
    )
