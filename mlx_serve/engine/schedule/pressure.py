"""Frees memory while the process holds more than its marks, by the system's count or by MLX's, whichever is larger.

Above the soft mark kept prefixes are dropped, and nothing new starts beside what runs. Worker thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from mlx_serve.engine.backend import ModelLoader
from mlx_serve.engine.memory import Marks, MemoryState

log = logging.getLogger(__name__)

# How often freed memory is returned to the system while a mark is exceeded.
_RELEASE_EVERY_S = 5.0


class Pressure:
    """``drop`` evicts so many bytes of kept prefixes, or all, and returns how many they were.

    Any thread may read ``state``.
    """

    def __init__(self, models: ModelLoader, drop: Callable[[int], int], clock: Callable[[], float]) -> None:
        self._models = models
        self._drop = drop
        self._clock = clock
        self._released_s = -math.inf
        self._has_told = False
        self.state = MemoryState()

    @property
    def is_on(self) -> bool:
        """Whether the process holds more than a mark."""
        return self.state.pressure != "none"

    def relieve(self, marks: Marks | None) -> None:
        """Look at the memory. Above the soft mark, return freed memory to the system and drop prefixes."""
        self._look(marks)
        if self.is_on and self._clock() - self._released_s >= _RELEASE_EVERY_S:
            self.release(marks)
        if self.is_on and self._drop(self.state.excess_bytes):
            self.release(marks)
        elif self.is_on:
            self._tell()
        else:
            self._has_told = False

    def release(self, marks: Marks | None) -> None:
        """Return freed memory to the system."""
        self._models.release()
        self._released_s = self._clock()
        self._look(marks)

    def _look(self, marks: Marks | None) -> None:
        self.state = self.state.after(self._models.memory(), marks)

    def _tell(self) -> None:
        """Log once that nothing is left to drop."""
        marks = self.state.marks
        if self._has_told or marks is None:
            return
        self._has_told = True
        log.warning(
            "the process holds %.1f GiB, which is over the %s mark (%.1f and %.1f GiB), and no kept prefix is left to "
            "drop: new requests wait while others run (--memory-bytes)",
            self.state.use.held_bytes / 2**30,
            self.state.pressure,
            marks.soft_bytes / 2**30,
            marks.hard_bytes / 2**30,
        )
