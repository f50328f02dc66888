"""KV caches of finished sequences, found again by the longest common prefix. A thin hand around mlx-lm's LRU.

Lives on the worker thread. One per loaded model, so that caches go when their model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

# LRUPromptCache can hold several models; ours holds one.
_MODEL = 0


class PrefixCache:
    """At most ``max_sequences`` caches and ``max_bytes`` bytes, the least recently stored given up first."""

    def __init__(self, max_sequences: int, max_bytes: int | None) -> None:
        self._max_sequences = max_sequences
        self._lru = LRUPromptCache(max_sequences, max_bytes if max_bytes is not None else 1 << 63)

    def fetch(self, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        """A copy of the best cache for ``tokens`` and how many of them it covers: always fewer than all."""
        cache, rest = self._lru.fetch_nearest_cache(_MODEL, list(tokens))
        if cache is None:
            return None, 0
        if rest:
            return cache, len(tokens) - len(rest)
        # mlx-lm must be left a token to start from.
        if len(tokens) > 1 and can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, 1)
            return cache, len(tokens) - 1
        return None, 0

    def store(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Keep ``cache``, which holds exactly ``tokens``."""
        if self._max_sequences == 0:
            return
        # Unevaluated, it would be a view that keeps the whole batch's memory alive.
        mx.eval([layer.state for layer in cache])
        self._lru.insert_cache(_MODEL, list(tokens), cache)
