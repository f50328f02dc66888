"""Tests of what a server meets that runs as another user than the owner of the files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Nobody's, on Linux. On macOS any number will do.
_STRANGER = 65534


@contextmanager
def stranger(closed: Path) -> Iterator[None]:
    """This process as a user who may not enter a folder; permissions do not bind root, so root becomes another one."""
    mode = closed.stat().st_mode
    closed.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(_STRANGER, _STRANGER, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        closed.chmod(mode)
