"""A prompt's KV cache on its way from files into memory, beside the steps of other jobs. Worker thread.

blank arrays, a few in each step  -->  the reader's thread fills them  -->  a cache of them
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_serve.engine.cache import state
from mlx_serve.engine.cache.file import DamagedFileError
from mlx_serve.engine.cache.form import arrays_of
from mlx_serve.engine.cache.index import Path
from mlx_serve.engine.cache.reader import CacheReader, Read
from mlx_serve.engine.cache.store import CacheStore

log = logging.getLogger(__name__)

# A step makes arrays for a prompt for about so long, then goes on with other work.
_SLICE_S = 0.02
# How Python and MLX report a lack of memory. Neither a save nor a load may fail the requests that are being decoded.
NO_MEMORY = (MemoryError, RuntimeError)


class Loading:
    """The first ``n_tokens`` of a prompt, from the files of ``path``.

    ``keep`` gets the cache and how many tokens it holds. When reading has taken longer than ``within_s``, which
    prefilling would take, it is given up: no job waits for a disk that hangs.
    """

    def __init__(
        self,
        store: CacheStore,
        reader: CacheReader,
        path: Path,
        keep: Callable[[list[Any], int], None],
        clock: Callable[[], float],
        within_s: float,
    ) -> None:
        self._store = store
        self._reader = reader
        self._path = path
        self._form = path.blocks[0].form
        self._keep = keep
        self._clock = clock
        self._until_s = clock() + within_s
        self._blank: list[mx.array] = []
        self._read: Read | None = None
        self._last: list[mx.array] = []
        self._is_over = False
        self.n_tokens = path.n_tokens

    def poll(self) -> bool:
        """Go on for a short time. True: it is over, whether or not there is a cache."""
        try:
            if not self._is_over and self._advance(self._clock() + _SLICE_S):
                self._is_over = True
        except (*NO_MEMORY, DamagedFileError) as error:
            log.warning("prompt cache: a cache of %d bytes is not loaded: %s", self._path.n_bytes, error)
            self.cancel()
        return self._is_over

    def wait(self, timeout_s: float) -> None:
        """Wait for the disk, at most so long."""
        if self._read is not None:
            self._reader.wait(self._read, timeout_s)

    def cancel(self) -> None:
        """Nobody waits for it any longer."""
        if self._read is not None:
            self._reader.drop(self._read)
        self._blank, self._last, self._is_over = [], [], True

    def _advance(self, stop_s: float) -> bool:
        """Do what is next until about ``stop_s``. True: it is over."""
        read = self._read
        if self._clock() > self._until_s:
            log.info("prompt cache: a cache of %d bytes is computed instead: the disk is slow", self._path.n_bytes)
            self._store.count("given_up")
            self.cancel()
            return True
        if read is None:
            if self._make_blank(stop_s):
                self._read = Read(self._path, state.views(self._blank))
                self._reader.put(self._read)
            return False
        if read.state == "waiting":
            return False
        is_enough = read.n_tokens == self.n_tokens or (read.n_tokens > 0 and self._form.whole)
        if is_enough and not self._copy_states(read, stop_s):
            return False
        if is_enough:
            self._finish(read)
        return True

    def _make_blank(self, stop_s: float) -> bool:
        """Make the arrays that the reader fills. False: not all of them yet."""
        for array in self._form.growing[len(self._blank) :]:
            if self._clock() > stop_s:
                return False
            self._blank.append(state.blank(array.of(self.n_tokens)))
        return True

    def _copy_states(self, read: Read, stop_s: float) -> bool:
        """Make the arrays of the layers that do not grow. False: not all of them yet."""
        arrays = list(arrays_of(read.states))[len(self._last) :]
        for array, data in zip(arrays, read.last[len(self._last) :], strict=True):
            if self._clock() > stop_s:
                return False
            self._last.append(state.from_numpy(array, data))
        return True

    def _finish(self, read: Read) -> None:
        n = read.n_tokens
        growing = self._blank if n == self.n_tokens else [array[..., :n, :] for array in self._blank]
        cache = state.put_together(self._form, n, growing, read.states, self._last)
        self._blank, self._last = [], []
        self._keep(cache, n)
