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


def is_repository(name: str) -> bool:
    """Whether ``name`` could be a repository on the hub: OWNER/NAME."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII)) and not name.startswith(("./", "../"))
