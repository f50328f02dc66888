"""Paths as users type them, and repository names, which look like paths."""

from __future__ import annotations

import os
import re
from pathlib import Path


def expanded(text: str | Path) -> Path:
    """The path with ``~`` and ``~name`` replaced. The ``~name`` of an unknown user stays, so opening the path fails.

    ``Path.expanduser`` raises RuntimeError for an unknown user.
    """
    return Path(os.path.expanduser(text))


def closed_folder(path: Path) -> Path | None:
    """The first folder on the way to ``path`` that this user may not enter, such as another user's home; or None."""
    folders = reversed(path.absolute().parents)
    return next((folder for folder in folders if os.path.isdir(folder) and not os.access(folder, os.X_OK)), None)


def why_missing(path: Path) -> str:
    """What to add to the message that ``path`` does not exist: it may only be out of this user's sight."""
    folder = closed_folder(path)
    return f" (this user may not enter {folder})" if folder else ""


def is_repository(name: str) -> bool:
    """Whether ``name`` could be a repository on the hub: OWNER/NAME."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII)) and not name.startswith(("./", "../"))
