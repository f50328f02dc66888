"""Reads the files of a model directory. They come from others and may be damaged, huge, or not regular files.

Opening a FIFO blocks until a writer comes. So all functions refuse anything but a regular file before they read. Knows
no MLX, and not what the files mean.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Large vocabularies make a tokenizer.json of tens of megabytes; other files have kilobytes.
MAX_TOKENIZER_BYTES = 256_000_000
MAX_CONFIG_BYTES = 16_000_000


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_regular(path)
    return open(fd, "rb")


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """A JSON file's value. Raises OSError and ValueError."""
    with open_regular(path) as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return parse_json(raw)


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON file's object. Raises OSError and ValueError."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def parse_json(raw: bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_files(directory: Path) -> None:
    """Check that the directory has only files and folders: a library could block on anything else. Raises OSError."""
    for path in _below(directory, depth=2):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:  # a broken link: the code that needs the file reports it
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _not_regular(path)


def _below(directory: Path, depth: int) -> Iterator[Path]:
    for path in directory.iterdir():
        yield path
        if depth > 1 and path.is_dir():
            yield from _below(path, depth - 1)


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
