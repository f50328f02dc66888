"""What there is on this machine: its memory, and the versions of installed packages. Imports nothing large."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version


def memory_bytes() -> int | None:
    """The memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def installed(package: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
