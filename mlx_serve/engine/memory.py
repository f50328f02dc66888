"""What may be in memory: weights, KV caches of running sequences, kept prefixes. Numbers only; nothing of MLX."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# What is left free of the whole for the rest: Python and its libraries, activations, request bodies.
RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """MLX's own figures, in bytes: in use, the most so far, and kept for its next arrays."""

    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """``total_bytes`` for everything, ``kv_bytes`` at most for KV caches, running and kept. None: no such bound.

    ``least_kv_bytes`` are given to KV caches in any case: a total that nobody chose must not refuse what might go well.
    """

    total_bytes: int | None = None
    kv_bytes: int | None = None
    max_models: int = 4
    least_kv_bytes: int = 0

    def kv_limit(self, weights: Collection[int]) -> int | None:
        """What is left for KV caches beside so many bytes of weights; below 0: they do not fit."""
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
        # One alone may try when nobody set the bound.
        is_alone = len(weights) == 1 and self.least_kv_bytes > 0
        return is_alone or self.total_bytes - RESERVE_BYTES - sum(weights) > 0
