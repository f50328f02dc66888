"""The thread that writes KV caches to files. It reads the arrays where MLX has them; the MLX thread copies nothing.

A view of an evaluated array may be read on any thread: MLX writes into a buffer only while nothing else holds it.
A save holds its cache's arrays until it is written. While the prefix cache keeps them too they take no memory of their
own; ``unkept_bytes`` counts those that it has given up. Knows no MLX.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from numpy.typing import NDArray

from mlx_serve.engine.cache.file import BLOCK_KEY_BYTES, BLOCK_TOKENS, TOKEN_BYTES
from mlx_serve.engine.cache.form import Form
from mlx_serve.engine.cache.store import CacheStore, Count
from mlx_serve.machine import memory_bytes

log = logging.getLogger(__name__)

# Saves that wait for the disk may hold or write this part of the machine's memory.
_PENDING_SHARE = 8


@dataclass(slots=True, eq=False)
class Save:
    """A cache to be written. ``growing``: views with a token axis; ``last``: views of the states at its end.

    ``n_bytes``: about what has to be written; ``held_bytes``: the size of the arrays. ``is_kept``: the prefix cache
    keeps them too.
    """

    owner: str
    form: Form
    key: bytes
    growing: Sequence[NDArray[Any]]
    states: list[Any]
    last: Sequence[NDArray[Any]]
    n_bytes: int
    held_bytes: int
    is_kept: bool = True

    @property
    def charge(self) -> int:
        """Its bytes for the limit of what is pending."""
        return self.n_bytes if self.is_kept else self.held_bytes


class CacheWriter:
    """At most ``max_pending_bytes`` (by default an eighth of the machine's memory) are pending, or one save."""

    def __init__(self, store: CacheStore, max_pending_bytes: int | None = None) -> None:
        self._store = store
        most = (memory_bytes() or 0) // _PENDING_SHARE if max_pending_bytes is None else max_pending_bytes
        self._max_pending_bytes = most
        self._changed = Condition()
        self._queue: deque[Save] = deque()
        self._writing: Save | None = None
        self._closing = False
        self._abandoned = False
        # A daemon thread, because a disk that hangs must not keep the process from ending.
        self._thread = Thread(target=self._write_all, name="cache-writer", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """The bytes that saves wait to write or hold. Any thread."""
        with self._changed:
            return self._charge()

    def unkept_bytes(self, identity: str) -> int:
        """The bytes of a model's arrays that only saves hold. Any thread."""
        with self._changed:
            unkept = [save for save in self._pending() if not save.is_kept]
            return sum(save.held_bytes for save in unkept if save.owner.startswith(identity))

    def put(self, save: Save) -> bool:
        """Queue a save; False: it is too large, or too much is pending. MLX thread."""
        with self._changed:
            if self._closing or (self._pending() and self._charge() + save.charge > self._max_pending_bytes):
                refusal: Count = "skipped_busy"
            elif len(save.key) // TOKEN_BYTES * save.form.token_bytes > self._store.max_bytes:
                refusal = "skipped_large"
            else:
                self._queue.append(save)
                self._changed.notify_all()
                return True
        self._store.count(refusal)
        return False

    def release(self, save: Save) -> None:
        """The prefix cache has given up the cache of a save. It is not written if too much is pending. MLX thread."""
        with self._changed:
            save.is_kept = False
            if save in self._queue and len(self._pending()) > 1 and self._charge() > self._max_pending_bytes:
                self._queue.remove(save)
                self._changed.notify_all()
                self._store.count("skipped_busy")

    def flush(self, timeout_s: float) -> bool:
        """Wait until every save is written or dropped. False when it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending(), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Accept nothing more and wait for what is pending. False: the disk hangs.

        After ``timeout_s`` the thread is told to stop, and gets the same time again to do so.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("prompt cache: %d bytes were not written in %g s", self.pending_bytes, timeout_s)
            self._abandoned = True
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _pending(self) -> list[Save]:
        return [*([self._writing] if self._writing else []), *self._queue]

    def _charge(self) -> int:
        return sum(save.charge for save in self._pending())

    def _write_all(self) -> None:
        while (save := self._next()) is not None:
            try:
                self._write(save)
            except Exception:  # the thread boundary: the error loses a save, not all that come
                log.exception("prompt cache: a cache of %d bytes is not saved", save.n_bytes)
            finally:
                # Nothing may hold the arrays while this thread waits for the next save.
                del save
                self._done()

    def _next(self) -> Save | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._abandoned or not self._queue:
                return None
            self._writing = self._queue.popleft()
            return self._writing

    def _done(self) -> None:
        with self._changed:
            self._writing = None
            self._changed.notify_all()

    def _write(self, save: Save) -> None:
        """Write the blocks that are not there yet, each after the one before it."""
        root, *blocks = self._store.full(save.owner, save.form, save.key)
        # What is about to be continued must not make room for it.
        self._store.touch(blocks)
        parent = blocks[-1] if blocks else root
        n_full = len(save.key) // BLOCK_KEY_BYTES
        for start in range(len(blocks) * BLOCK_TOKENS, n_full * BLOCK_TOKENS, BLOCK_TOKENS):
            key = save.key[start * TOKEN_BYTES : (start + BLOCK_TOKENS) * TOKEN_BYTES]
            block = self._store.write(parent, key, [], _slices(save, start, start + BLOCK_TOKENS), self._goes_on)
            if block is None:
                return
            blocks.append(block)
            parent = block
        rest = save.key[n_full * BLOCK_KEY_BYTES :]
        if not self._store.holds_last(parent, rest):
            start, end = n_full * BLOCK_TOKENS, len(save.key) // TOKEN_BYTES
            block = self._store.write(parent, rest, save.states, _slices(save, start, end, save.last), self._goes_on)
            blocks += [block] if block is not None else []
        self._store.touch(blocks)

    def _goes_on(self) -> bool:
        return not self._abandoned


def _slices(save: Save, start: int, end: int, last: Sequence[NDArray[Any]] = ()) -> Iterator[bytes]:
    """The bytes of a block's arrays, copied one array at a time."""
    for view in save.growing:
        yield view[..., start:end, :].tobytes()
    for view in last:
        yield view.tobytes()
