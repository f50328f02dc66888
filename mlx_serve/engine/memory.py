"""The memory budget (weights, KV caches of running sequences, kept prefixes), and marks of what the process may hold.

Only numbers; knows no MLX.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mlx_serve.values import MemoryPressure

# The part of the total that stays free for Python and its libraries, activations and request bodies.
RESERVE_BYTES = 1 << 30


# The parts of the memory beside the weights at which kept prefixes are dropped, and running jobs too.
_SOFT_SHARE, _HARD_SHARE = 0.85, 0.95


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """MLX's own figures, in bytes: in use, the most so far, kept for its next arrays, and the wired limit.

    ``footprint_bytes`` is what the process holds by the system's count; 0: not known.
    """

    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    wired_limit_bytes: int = 0
    footprint_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What is compared with the marks."""
        return max(self.active_bytes, self.footprint_bytes)


@dataclass(frozen=True, slots=True)
class Marks:
    """What the process may hold before memory is freed: by dropping kept prefixes, then at the cost of running jobs."""

    soft_bytes: int
    hard_bytes: int

    def eased(self, mark: int) -> int:
        """Below this the mark no longer counts as exceeded."""
        return mark - (self.hard_bytes - self.soft_bytes) // 2


@dataclass(frozen=True, slots=True)
class MemoryState:
    """What was held at the last look, the marks that it was compared with, and the mark that counts as exceeded."""

    use: MemoryUse = MemoryUse()
    marks: Marks | None = None
    pressure: MemoryPressure = "none"

    def after(self, use: MemoryUse, marks: Marks | None) -> MemoryState:
        """The state at the next look. An exceeded mark counts until it is well undercut, so it does not flicker."""
        return MemoryState(use, marks, "none" if marks is None else _pressure(use.held_bytes, marks, self.pressure))

    @property
    def excess_bytes(self) -> int:
        """What has to be freed until no mark counts as exceeded."""
        if self.marks is None or self.pressure == "none":
            return 0
        return self.use.held_bytes - self.marks.eased(self.marks.soft_bytes) + 1


def _pressure(held: int, marks: Marks, before: MemoryPressure) -> MemoryPressure:
    if held >= (marks.eased(marks.hard_bytes) if before == "hard" else marks.hard_bytes):
        return "hard"
    return "soft" if held >= (marks.soft_bytes if before == "none" else marks.eased(marks.soft_bytes)) else "none"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """``total_bytes`` for everything, ``kv_bytes`` at most for KV caches, running and kept. None: no such limit.

    KV caches always get ``least_kv_bytes``: a total that the operator did not choose must not refuse what might fit.
    """

    total_bytes: int | None = None
    kv_bytes: int | None = None
    max_models: int = 4
    least_kv_bytes: int = 0

    def kv_limit(self, weights: Collection[int]) -> int | None:
        """The bytes left for KV caches beside these weights; below 0: the weights do not fit."""
        if self.total_bytes is None:
            return self.kv_bytes
        left = max(self.least_kv_bytes, self.total_bytes - RESERVE_BYTES - sum(weights))
        return left if self.kv_bytes is None else min(left, self.kv_bytes)

    def marks(self, weights: Collection[int]) -> Marks | None:
        """The marks while these weights are in memory. None: no limit.

        They divide what the weights leave. As parts of the total, a model of nine tenths of it would be above them by
        itself.
        """
        if self.total_bytes is None:
            return None
        room = max(self.least_kv_bytes, self.total_bytes - sum(weights))
        return Marks(sum(weights) + int(_SOFT_SHARE * room), sum(weights) + int(_HARD_SHARE * room))

    def has_room(self, weights: Collection[int]) -> bool:
        """Whether models with these weights may be in memory together."""
        if len(weights) > self.max_models:
            return False
        if self.total_bytes is None:
            return True
        # Without a limit set by the operator, a single model may always try.
        is_alone = len(weights) == 1 and self.least_kv_bytes > 0
        return is_alone or self.total_bytes - RESERVE_BYTES - sum(weights) > 0
