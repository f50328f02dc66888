"""The directory of cache files: its index, its lock, and its limit of bytes.

    worker thread:  find, read, covers, admit, put
    writer thread:  make room -> write whole or not at all -> index -> remove what the new file makes useless

The writer handles bytes only; this module knows no MLX. An error with a file loses that file and never fails a request.
file.py defines the format of a file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Literal, TypeAlias, TypeVar, get_args

from mlx_serve.engine.cache import file as cache_file
from mlx_serve.engine.cache.file import DamagedFileError, Header
from mlx_serve.engine.cache.index import CacheIndex, Entry
from mlx_serve.values import StartError

log = logging.getLogger(__name__)

T = TypeVar("T")

Count: TypeAlias = Literal["loaded", "written", "evicted", "damaged", "failed", "skipped_busy", "skipped_large"]

_LOCK_NAME = "lock"
_OUR_NAMES = re.compile(r"[0-9a-f]{64}\.(kv|tmp)", re.ASCII)
# Copies that wait for the disk may take this part of the machine's memory.
_PENDING_SHARE = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    entry: Entry
    head: bytes
    arrays: list[bytes]


class CacheStore:
    """All cache files of one server, at most ``max_bytes``. The least recently used file is removed first.

    At most ``max_pending_bytes`` (by default an eighth of the machine's memory) wait for the disk. Raises StartError
    when the directory can't be used, or another server uses it.
    """

    def __init__(self, directory: Path, max_bytes: int, *, max_pending_bytes: int | None = None) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_pending_bytes = _memory_bytes() // _PENDING_SHARE if max_pending_bytes is None else max_pending_bytes
        # Guards the attributes below. No thread reads or writes a file while holding it.
        self._changed = Condition()
        self._index = CacheIndex()
        self._counts: dict[Count, int] = dict.fromkeys(get_args(Count), 0)
        self._queue: deque[_Pending] = deque()
        self._writing: _Pending | None = None
        self._pending_bytes = 0
        self._closing = False
        self._abandoned = False
        self._failing = False
        self._lock = _claim(directory)
        try:
            self._scan()
        except OSError as error:
            os.close(self._lock)
            raise _unusable(directory, error) from error
        # A daemon thread, because a disk that hangs must not keep the process from ending.
        self._writer = Thread(target=self._write_all, name="cache-writer", daemon=True)
        self._writer.start()

    def counts(self) -> dict[str, int]:
        """What has happened so far, and ``files``, ``bytes`` and ``pending_bytes`` of now. Any thread."""
        with self._changed:
            now = {"files": len(self._index), "bytes": self._index.total_bytes, "pending_bytes": self._pending_bytes}
            return now | {str(name): n for name, n in self._counts.items()}

    def flush(self, timeout_s: float) -> bool:
        """Wait until every saved cache is written or dropped. False when it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and self._writing is None, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Accept nothing more, wait for pending writes, and unlock the directory. May be called twice.

        After ``timeout_s`` the writer is told to stop, and gets the same time again to do so.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(timeout_s)
        if self._writer.is_alive():
            log.warning("prompt cache: %d bytes were not written in %g s", self.counts()["pending_bytes"], timeout_s)
            self._abandoned = True
            self._writer.join(timeout_s)
        # While the writer hangs, the directory stays locked. The lock ends with the process.
        if self._lock >= 0 and not self._writer.is_alive():
            os.close(self._lock)
            self._lock = -1

    # Methods for tiers, on the worker thread.

    def find(self, identity: str, key: bytes, *, trimmable: bool) -> tuple[Entry, int] | None:
        """The best file for a prompt, and how many of its leading tokens it covers."""
        with self._changed:
            return self._index.best(identity, key, trimmable=trimmable)

    def read(self, entry: Entry, decode: Callable[[Header, Callable[[int], bytearray]], T]) -> T | None:
        """The result of ``decode`` on a file (see ``file.read``); None when the file is gone or damaged."""
        try:
            value = cache_file.read(entry.path, decode)
        except FileNotFoundError:
            self._forget(entry)
            return None
        except DamagedFileError as error:
            self._forget(entry)
            self._drop_damaged(entry.path, error)
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                self._forget(entry)
                self._drop_damaged(entry.path, error)
            else:
                # The file may be intact: the process may be out of descriptors, for example.
                self._count_failure("read", error)
            return None
        self._touch(entry)
        with self._changed:
            self._counts["loaded"] += 1
        return value

    def entry(self, identity: str, key: bytes, *, trimmable: bool, size: int = 0) -> Entry:
        """The file that a prompt has or would have."""
        return Entry(identity, key, trimmable, self._directory / _name(identity, key), size)

    def covers(self, entry: Entry) -> bool:
        """Whether a file, written or pending, makes ``entry`` useless. This counts as a use of that file."""
        with self._changed:
            waiting = [*self._queue, *([self._writing] if self._writing else [])]
            if any(pending.entry.covers(entry) for pending in waiting):
                return True
            found = self._index.covering(entry)
        return found is not None and self._touch(found)

    def admit(self, entry: Entry) -> bool:
        """Whether ``entry`` may be queued; a refusal is counted. Pending files that it makes useless are dropped."""
        with self._changed:
            useless = [pending for pending in self._queue if entry.covers(pending.entry)]
            rest_bytes = self._pending_bytes - sum(pending.entry.size for pending in useless)
            if entry.size > min(self._max_bytes, self._max_pending_bytes):
                self._counts["skipped_large"] += 1
                return False
            if self._closing or rest_bytes + entry.size > self._max_pending_bytes:
                self._counts["skipped_busy"] += 1
                return False
            for pending in useless:
                self._queue.remove(pending)
            self._pending_bytes = rest_bytes
            return True

    def put(self, entry: Entry, head: bytes, arrays: list[bytes]) -> None:
        """Queue a file for writing."""
        with self._changed:
            self._queue.append(_Pending(entry, head, arrays))
            self._pending_bytes += entry.size
            self._changed.notify_all()

    # Start-up.

    def _scan(self) -> None:
        """Index the files by their headers. The lock is held, so any temporary file is left over from a crash."""
        found: list[tuple[int, Entry]] = []
        for file in os.scandir(self._directory):
            match = _OUR_NAMES.fullmatch(file.name)
            if match is None or not file.is_file(follow_symlinks=False):
                continue
            if match[1] == "tmp":
                Path(file.path).unlink()
            elif (entry := self._indexed(Path(file.path))) is not None:
                found.append((file.stat().st_mtime_ns, entry))
        for _, entry in sorted(found, key=lambda pair: pair[0]):
            self._index.add(entry)
        self._make_room(0)
        log.info("prompt cache: %d files, %d bytes in %s", len(found), self._index.total_bytes, self._directory)

    def _indexed(self, path: Path) -> Entry | None:
        try:
            header, size = cache_file.read_header(path)
            if path.name != _name(header.identity, header.key):
                raise DamagedFileError("it is named as another prompt's")
        except DamagedFileError as error:
            self._drop_damaged(path, error)
            return None
        except OSError as error:
            self._count_failure("read", error)
            return None
        return Entry(header.identity, header.key, header.trimmable, path, size)

    # The writer thread.

    def _write_all(self) -> None:
        while (pending := self._next()) is not None:
            try:
                self._write(pending)
            except OSError as error:
                self._count_failure("write", error)
            finally:
                self._done(pending)

    def _next(self) -> _Pending | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._abandoned or not self._queue:
                return None
            self._writing = self._queue.popleft()
            return self._writing

    def _write(self, pending: _Pending) -> None:
        entry = pending.entry
        with self._changed:
            useless = self._index.covered(entry)
        self._make_room(entry.size, useless)
        if not cache_file.write(entry.path, pending.head, pending.arrays, lambda: not self._abandoned):
            return
        with self._changed:
            self._index.add(entry)
            self._counts["written"] += 1
            failed_before, self._failing = self._failing, False
        if failed_before:
            log.info("prompt cache: files are written again")
        for former in useless:
            self._remove(former)

    def _done(self, pending: _Pending) -> None:
        with self._changed:
            self._writing = None
            self._pending_bytes -= pending.entry.size
            self._changed.notify_all()

    # Removing files.

    def _make_room(self, size: int, useless: Sequence[Entry] = ()) -> None:
        """Remove files until ``size`` more bytes fit: first ``useless`` ones, then the least recently used."""
        for former in useless:
            if self._fits(size):
                return
            self._remove(former)
        while not self._fits(size):
            with self._changed:
                oldest = self._index.oldest()
            if oldest is None:
                return
            self._remove(oldest)
            with self._changed:
                self._counts["evicted"] += 1

    def _fits(self, size: int) -> bool:
        with self._changed:
            return self._index.total_bytes + size <= self._max_bytes

    def _remove(self, entry: Entry) -> None:
        # The file is removed before its entry: a file that can't be removed still counts.
        entry.path.unlink(missing_ok=True)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        with self._changed:
            self._index.remove(entry)

    def _drop_damaged(self, path: Path, error: Exception) -> None:
        log.warning("prompt cache: %s is dropped: %s", path, error)
        with self._changed:
            self._counts["damaged"] += 1
        try:
            path.unlink(missing_ok=True)
        except OSError as unlink_error:
            self._count_failure("remove", unlink_error)

    def _touch(self, entry: Entry) -> bool:
        """Note a use in the index, and in the file's time for the next start. False when the file is gone."""
        try:
            os.utime(entry.path, follow_symlinks=False)
        except FileNotFoundError:
            self._forget(entry)
            return False
        except OSError as error:
            self._count_failure("write", error)
        with self._changed:
            self._index.touch(entry)
        return True

    def _count_failure(self, doing: str, error: OSError) -> None:
        """Log a full or broken disk once, until it works again."""
        with self._changed:
            self._counts["failed"] += 1
            said, self._failing = self._failing, True
        if not said:
            log.warning("prompt cache: cannot %s files in %s: %s", doing, self._directory, error)


def _name(identity: str, key: bytes) -> str:
    digest = hashlib.sha256(f"{len(identity)} {identity} ".encode(errors="surrogatepass"))
    digest.update(key)
    return digest.hexdigest() + ".kv"


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


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
