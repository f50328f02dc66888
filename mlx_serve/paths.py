"""Paths as people write them, and names of repositories, which look like some."""

from __future__ import annotations

import os
import re
from pathlib import Path


def expanded(text: str | Path) -> Path:
    """The path with ``~`` and ``~name`` replaced; an unknown user's stays as it is, and is then not found.

    ``Path.expanduser`` raises RuntimeError there.
    """
    return Path(os.path.expanduser(text))


def is_repository(name: str) -> bool:
    """Whether a text could name a repository of the hub: OWNER/NAME."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII)) and not name.startswith(("./", "../"))
