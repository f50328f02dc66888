"""The directory of cache files: its index, its lock, and its limit of bytes.

The threads of writer.py and reader.py work in it; the MLX thread only looks into the index. Handles bytes only and
knows no MLX. An error with a file loses that file and never fails a request. file.py defines the format of a file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias, get_args

from mlx_serve.engine.cache import file as cache_file
from mlx_serve.engine.cache.file import TOKEN_BYTES, DamagedFileError, Header
from mlx_serve.engine.cache.form import Form
from mlx_serve.engine.cache.index import Block, CacheIndex
from mlx_serve.engine.cache.index import Path as BlockPath
from mlx_serve.values import StartError

log = logging.getLogger(__name__)

Count: TypeAlias = Literal[
    "loaded", "written", "bytes_written", "evicted", "damaged", "failed", "given_up", "skipped_busy", "skipped_large"
]

_LOCK_NAME = "lock"
_OUR_NAMES = re.compile(r"[0-9a-f]{64}\.(kv|tmp)", re.ASCII)


class CacheStore:
    """All cache files of one server, at most ``max_bytes``. The least recently used block is removed first.

    Raises StartError when the directory can't be used, or another server uses it. Any thread, unless a docstring says
    otherwise.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self.max_bytes = max_bytes
        # Guards the index and the counts. No thread reads or writes a file while holding it.
        self._guard = Lock()
        self._index = CacheIndex()
        self._counts: dict[Count, int] = dict.fromkeys(get_args(Count), 0)
        self._failing = False
        self._lock = _claim(directory)
        try:
            self._scan()
        except OSError as error:
            os.close(self._lock)
            raise _unusable(directory, error) from error

    def counts(self) -> dict[str, int]:
        """What has happened so far, and ``files`` and ``bytes`` of now."""
        with self._guard:
            now = {"files": len(self._index), "bytes": self._index.total_bytes}
            return now | {str(name): n for name, n in self._counts.items()}

    def count(self, name: Count, n: int = 1) -> None:
        """Add to a count."""
        with self._guard:
            self._counts[name] += n

    def close(self) -> None:
        """Unlock the directory. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # The index. These calls open no file.

    def find(self, owner: str, key: bytes) -> BlockPath | None:
        """The blocks that cover most leading tokens of a prompt."""
        with self._guard:
            return self._index.best(owner, key)

    def full(self, owner: str, form: Form, key: bytes) -> list[Block]:
        """The root for a model and a form, and the full blocks that hold the first tokens of ``key``."""
        with self._guard:
            return self._index.full(owner, form, key)

    def holds_last(self, parent: Block, key: bytes) -> bool:
        """Whether the files make a last block behind ``parent`` needless."""
        with self._guard:
            return self._index.holds_last(parent, key)

    def use(self, blocks: Sequence[Block]) -> None:
        """Note a use of a path, until the next start."""
        with self._guard:
            self._index.touch(blocks)

    # The writer's and the reader's threads.

    def read(self, block: Block, go_on: Callable[[], bool]) -> tuple[Header, memoryview] | None:
        """A file's header and arrays; None when it is gone or damaged, or ``go_on`` returned False."""
        path = self._path(block.name)
        try:
            found = cache_file.read(path, go_on)
            if found is not None:
                _check(found[0], block)
        except FileNotFoundError:
            self._drop(block)
        except DamagedFileError as error:
            self._report_damage(path, error)
            self._drop(block)
        except OSError as error:
            if error.errno == errno.EIO:
                self._report_damage(path, error)
                self._drop(block)
            else:
                # The file may be intact: the process may be out of descriptors, for example.
                self._report_failure("read", error)
        else:
            return found
        return None

    def write(
        self, parent: Block, key: bytes, states: list[Any], arrays: Iterable[bytes], go_on: Callable[[], bool]
    ) -> Block | None:
        """Write a block behind another one; None: it was not written. The writer's thread."""
        header = Header(parent.owner, parent.form, parent.name, key, states)
        head = cache_file.head(header)
        name = cache_file.name(parent.name, key)
        size = cache_file.file_size(head, header.n_bytes)
        block = Block(name, parent.owner, parent.form, key, parent, size, parent.end + len(key) // TOKEN_BYTES)
        try:
            with self._guard:
                needless = self._index.needless(block)
            self._make_room(size, needless)
            if not self._has(parent) or not cache_file.write(self._path(name), head, arrays, go_on):
                return None
            if not self._add(block):
                return None
            for former in needless:
                self._remove(former)
        except OSError as error:
            self._report_failure("write", error)
            return None
        return block

    def touch(self, blocks: Sequence[Block]) -> None:
        """Note a use of a path in the index, and in the files' times for the next start."""
        self.use(blocks)
        now = time.time_ns()
        try:
            for block in blocks:
                os.utime(self._path(block.name), ns=(now, now), follow_symlinks=False)
        except FileNotFoundError:
            # Whoever reads the file next finds out.
            return
        except OSError as error:
            self._report_failure("write", error)

    def _has(self, parent: Block) -> bool:
        with self._guard:
            return parent.parent is None or parent in self._index

    def _add(self, block: Block) -> bool:
        assert block.parent is not None
        with self._guard:
            is_reachable = block.parent.parent is None or block.parent in self._index
            if is_reachable:
                self._index.add(block)
                self._counts["written"] += 1
                self._counts["bytes_written"] += block.size
            failed_before, self._failing = self._failing, False
        if failed_before:
            log.info("prompt cache: files are written again")
        if not is_reachable:
            self._path(block.name).unlink(missing_ok=True)
        return is_reachable

    # Start-up.

    def _scan(self) -> None:
        """Index the files by their headers. The lock is held, so any temporary file is left over from a crash."""
        found: dict[str, tuple[Header, int, int]] = {}
        for file in os.scandir(self._directory):
            match = _OUR_NAMES.fullmatch(file.name)
            if match is None or not file.is_file(follow_symlinks=False):
                continue
            if match[1] == "tmp":
                Path(file.path).unlink()
            elif (read := self._header(Path(file.path))) is not None:
                found[Path(file.name).stem] = (*read, file.stat(follow_symlinks=False).st_mtime_ns)
        blocks = self._trees(found)
        for name in found.keys() - blocks.keys():
            log.debug("prompt cache: %s is removed: the block before it is gone", name)
            self._path(name).unlink(missing_ok=True)
        # A block was used whenever one behind it was.
        used = {name: found[name][2] for name in blocks}
        for block in sorted(blocks.values(), key=lambda block: -block.end):
            if block.parent is not None and block.parent.name in used:
                used[block.parent.name] = max(used[block.parent.name], used[block.name])
        self._index.touch(sorted(blocks.values(), key=lambda block: (-used[block.name], block.end)))
        self._make_room(0)
        log.info("prompt cache: %d files, %d bytes in %s", len(blocks), self._index.total_bytes, self._directory)

    def _trees(self, found: dict[str, tuple[Header, int, int]]) -> dict[str, Block]:
        """Index the files that can be reached from a root."""
        behind: dict[str, list[str]] = {}
        for name, (header, *_) in found.items():
            behind.setdefault(header.parent, []).append(name)
        blocks: dict[str, Block] = {}
        parents = []
        for header, *_ in found.values():
            root = self._index.root(header.owner, header.form)
            if header.parent == root.name:
                parents.append(root)
        while parents:
            parent = parents.pop()
            for name in behind.pop(parent.name, []):
                header, size, _ = found[name]
                if (header.owner, header.form) != (parent.owner, parent.form):
                    continue
                end = parent.end + len(header.key) // TOKEN_BYTES
                blocks[name] = block = Block(name, parent.owner, parent.form, header.key, parent, size, end)
                self._index.add(block)
                if block.is_full:
                    parents.append(block)
        return blocks

    def _header(self, path: Path) -> tuple[Header, int] | None:
        try:
            header, size = cache_file.read_header(path)
            if path.stem != cache_file.name(header.parent, header.key):
                raise DamagedFileError("it is named as another prompt's")
        except DamagedFileError as error:
            self._report_damage(path, error)
            self._unlink(path)
            return None
        except OSError as error:
            self._report_failure("read", error)
            return None
        return header, size

    # Removing files.

    def _make_room(self, size: int, needless: Sequence[Block] = ()) -> None:
        """Remove files until ``size`` more bytes fit: first needless ones, then the least recently used."""
        for former in needless:
            if self._fits(size):
                return
            self._remove(former)
        while not self._fits(size):
            with self._guard:
                oldest = self._index.oldest()
            if oldest is None:
                return
            self._remove(oldest)
            self.count("evicted")

    def _fits(self, size: int) -> bool:
        with self._guard:
            return self._index.total_bytes + size <= self.max_bytes

    def _remove(self, block: Block) -> None:
        """Remove a file and those behind it. Raises OSError."""
        with self._guard:
            removed = self._index.remove(block)
        for one in removed:
            self._path(one.name).unlink(missing_ok=True)

    def _drop(self, block: Block) -> None:
        """Remove a file that can't be used, and those behind it."""
        try:
            self._remove(block)
        except OSError as error:
            self._report_failure("remove", error)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._report_failure("remove", error)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.kv"

    def _report_damage(self, path: Path, error: Exception) -> None:
        log.warning("prompt cache: %s is dropped: %s", path, error)
        self.count("damaged")

    def _report_failure(self, doing: str, error: OSError) -> None:
        """Log a full or broken disk once, until it works again."""
        with self._guard:
            self._counts["failed"] += 1
            said, self._failing = self._failing, True
        if not said:
            log.warning("prompt cache: cannot %s files in %s: %s", doing, self._directory, error)


def _check(header: Header, block: Block) -> None:
    """Raises DamagedFileError when a file is not the one that was indexed."""
    assert block.parent is not None
    held = (header.owner, header.form, header.parent, header.key)
    if held != (block.owner, block.form, block.parent.name, block.key):
        raise DamagedFileError("it holds another prompt")


def _claim(directory: Path) -> int:
    """Create and lock the directory. The lock ends with the process. Raises StartError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            log.warning("prompt cache: other users may write in %s", directory)
        lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno == errno.EWOULDBLOCK:
            raise StartError(f"the prompt cache directory {directory} is in use by another server") from None
        raise _unusable(directory, error) from error
    return lock


def _unusable(directory: Path, error: OSError) -> StartError:
    return StartError(f"cannot use the prompt cache directory {directory}: {error.strerror}")
