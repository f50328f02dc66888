"""The cache of a batch of one, for models whose caches can't be rows. Used like ``batch_cache.BatchCache``."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from mlx_serve.engine.cache.kinds import cut_back, is_complete, leaves, take_back


class LoneCache:
    """A sequence's own cache. ``lengths`` has at most one entry."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.lengths: list[int] = []
        self._n_added = 0

    @property
    def can_cut_back(self) -> bool:
        """Whether the last tokens of a pass can be dropped."""
        return all(map(is_complete, leaves(self.layers)))

    @property
    def spare_bytes(self) -> int:
        """There is nothing beside the sequence."""
        return 0

    def join(self, cache: Sequence[Any], length: int, max_spare: float = math.inf) -> None:
        """Take over the cache of the only sequence."""
        assert not self.lengths, "a second sequence joins one that must run alone"
        self.layers, self.lengths = list(cache), [length]

    def leave(self, row: int, max_spare: float = math.inf) -> list[Any]:
        """Give the cache back."""
        cache, self.layers, self.lengths = self.layers, [], []
        cut_back(cache, 0)
        return cache

    def give_up_spare(self) -> None:
        """There is nothing to give up."""

    def copy(self, row: int, n_tokens: int | None = None) -> list[Any]:
        """A copy of the sequence's cache, or of its first ``n_tokens``, which then must be trimmable."""
        cache = copy.deepcopy(self.layers)
        cut_back(cache, self.lengths[row] - n_tokens if n_tokens is not None else 0)
        return cache

    def begin(self, n_tokens: int) -> None:
        """Prepare a pass that adds ``n_tokens``."""
        self._n_added = n_tokens

    def advance(self, n_tokens: Sequence[int]) -> None:
        """Keep the first so many of the tokens that the pass added."""
        (n_kept,) = n_tokens
        if n_kept < self._n_added:
            take_back(self.layers, self._n_added - n_kept)
        self.lengths[0] += n_kept
