"""The memory budget: weights, KV caches of running sequences, kept prefixes. Only numbers; knows no MLX."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# The part of the total that stays free for Python and its libraries, activations and request bodies.
RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """MLX's own figures, in bytes: in use, the most so far, kept for its next arrays, and the wired limit."""

    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    wired_limit_bytes: int = 0


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

    def has_room(self, weights: Collection[int]) -> bool:
        """Whether models with these weights may be in memory together."""
        if len(weights) > self.max_models:
            return False
        if self.total_bytes is None:
            return True
        # Without a limit set by the operator, a single model may always try.
        is_alone = len(weights) == 1 and self.least_kv_bytes > 0
        return is_alone or self.total_bytes - RESERVE_BYTES - sum(weights) > 0
