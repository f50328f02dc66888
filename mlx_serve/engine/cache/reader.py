"""The thread that reads KV caches from files, checks them, and puts them where the MLX thread wants them.

It knows how fast the disk has been: a cache that takes longer to read than to compute is not worth reading. Knows no
MLX.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any, Literal

from numpy.typing import NDArray

from mlx_serve.engine.cache.file import TOKEN_BYTES, Header
from mlx_serve.engine.cache.form import arrays_of
from mlx_serve.engine.cache.index import Block, Path
from mlx_serve.engine.cache.store import CacheStore

log = logging.getLogger(__name__)

# The newest block's weight in the average speed.
_WEIGHT = 0.3
# A disk that was slow once is tried again: each read that is not begun for its sake makes it count as so much faster.
_FORGIVEN = 1.1


@dataclass(slots=True, eq=False)
class Read:
    """The first tokens of a prompt's cache, from files into ``targets``: one array for each that grows, in order.

    Afterwards ``n_tokens`` says how many came, and ``states`` and ``last`` are those of the last block. The MLX thread
    has these, and the arrays in ``targets``, once ``state`` is "done".
    """

    path: Path
    targets: Sequence[NDArray[Any]]
    state: Literal["waiting", "done", "dropped"] = "waiting"
    n_tokens: int = 0
    states: list[Any] = field(default_factory=list)
    last: list[NDArray[Any]] = field(default_factory=list)


class CacheReader:
    """Reads one cache at a time, in the order of asking."""

    def __init__(self, store: CacheStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._changed = Condition()
        self._queue: deque[Read] = deque()
        self._reading: Read | None = None
        self._closing = False
        # Bytes per second; 0 before anything was read.
        self._speed = 0.0
        # A daemon thread, because a disk that hangs must not keep the process from ending.
        self._thread = Thread(target=self._read_all, name="cache-reader", daemon=True)
        self._thread.start()

    def is_worth(self, n_bytes: int, within_s: float) -> bool:
        """Whether so many bytes more are likely to be read in time. MLX thread."""
        with self._changed:
            if self._reading is not None and self._reading.state == "dropped":
                # The disk has kept a job waiting for too long, and has not answered yet.
                return False
            ahead = [*([self._reading] if self._reading else []), *self._queue]
            n_bytes += sum(read.path.n_bytes for read in ahead)
            is_worth = not self._speed or n_bytes / self._speed <= within_s
            if not is_worth:
                self._speed *= _FORGIVEN
            return is_worth

    def put(self, read: Read) -> None:
        """Queue a read. MLX thread."""
        with self._changed:
            self._queue.append(read)
            self._changed.notify_all()

    def drop(self, read: Read) -> None:
        """Nobody waits for this read any longer. MLX thread."""
        with self._changed:
            if read.state == "waiting":
                read.state = "dropped"
            if read in self._queue:
                self._queue.remove(read)

    def wait(self, read: Read, timeout_s: float) -> None:
        """Wait until a read is done, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: read.state != "waiting", timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop all reads and end the thread. False: the disk hangs."""
        with self._changed:
            self._closing = True
            for read in [*self._queue, *([self._reading] if self._reading else [])]:
                read.state = "dropped"
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _read_all(self) -> None:
        while (read := self._next()) is not None:
            try:
                self._read(read)
            except Exception:  # the thread boundary: the error loses a read, not all that come
                log.exception("prompt cache: a cache of %d bytes is not loaded", read.path.n_bytes)
            finally:
                self._done(read)
                del read

    def _next(self) -> Read | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            self._reading = self._queue.popleft()
            return self._reading

    def _done(self, read: Read) -> None:
        with self._changed:
            self._reading = None
            if read.state == "waiting":
                read.state = "done"
            self._changed.notify_all()

    def _read(self, read: Read) -> None:
        for block in read.path.blocks:
            started_s = self._clock()
            found = self._store.read(block, lambda: read.state == "waiting")
            if found is None:
                break
            self._note(block.size, self._clock() - started_s)
            end = min(block.end, read.path.n_tokens)
            data = _spread(*found, block, end, read.targets)
            if found[0].states:
                read.states, read.last = found[0].states, _states(found[0], data)
            read.n_tokens = end
        if read.n_tokens == read.path.n_tokens:
            self._store.count("loaded")
        self._store.touch(read.path.blocks)

    def _note(self, n_bytes: int, seconds: float) -> None:
        speed = n_bytes / max(seconds, 1e-6)
        with self._changed:
            self._speed += _WEIGHT * (speed - self._speed) if self._speed else speed


def _spread(header: Header, data: memoryview, block: Block, end: int, targets: Sequence[NDArray[Any]]) -> memoryview:
    """Copy a block's tokens up to ``end`` to their places, and return the bytes behind these arrays."""
    n_tokens = len(block.key) // TOKEN_BYTES
    for array, target in zip(header.form.growing, targets, strict=True):
        part = array.of(n_tokens)
        target[..., block.start : end, :] = part.read(data[: part.n_bytes])[..., : end - block.start, :]
        data = data[part.n_bytes :]
    return data


def _states(header: Header, data: memoryview) -> list[NDArray[Any]]:
    found = []
    for array in arrays_of(header.states):
        found.append(array.read(data[: array.n_bytes]))
        data = data[array.n_bytes :]
    return found
