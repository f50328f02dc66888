"""KV caches of sequences, found again by the longest common prefix. Lives on the worker thread; one per loaded model.

Not mlx-lm's LRUPromptCache: that one gives up what was stored first, however much it is used, and its search takes a
second for a prompt of 30,000 tokens, while every stream waits (docs/decisions.md).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import trim_prompt_cache
from numpy.typing import NDArray

from mlx_serve.engine.cache_state import can_trim, cut_back

Ids: TypeAlias = NDArray[np.int64]

# Fewer tokens are as quickly prefilled as copied.
MIN_TOKENS = 16
# What a file must give more than memory does, to be read.
_MIN_FROM_DISK = 128


class Tier(Protocol):
    """Where prefixes go that should outlive the process."""

    def covers(self, tokens: Sequence[int], *, trimmable: bool) -> int:
        """How many leading tokens of a prompt the best file could give."""

    def load(self, tokens: Sequence[int], *, trimmable: bool) -> tuple[list[Any], int] | None:
        """That file's cache, whole, and how many tokens it holds; None when it can't be read."""

    def save(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Keep a cache, soon."""


@dataclass(slots=True, eq=False)
class _Entry:
    ids: Ids
    cache: list[Any]
    n_bytes: int


def as_ids(tokens: Sequence[int]) -> Ids:
    """Token ids as an array that ``common`` compares."""
    return np.asarray(tokens, dtype=np.int64)


def common(a: Ids, b: Ids) -> int:
    """How many leading tokens are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class PrefixCache:
    """At most ``max_sequences`` caches and ``max_bytes`` bytes, the least recently used given up first.

    ``trimmable``: any prefix of a cache of this model can be used, however long the cache is.
    """

    def __init__(
        self, max_sequences: int, max_bytes: int | None, *, trimmable: bool = True, tier: Tier | None = None
    ) -> None:
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._trimmable = trimmable
        self._tier = tier
        # The least recently used first.
        self._entries: list[_Entry] = []
        self.n_bytes = 0
        self.n_evicted = 0
        # Changes whenever ``covers`` may.
        self.version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def shared(self, ids: Ids) -> int:
        """The longest prefix that any kept sequence has in common with a prompt, whether it can be reused or not."""
        return max((common(entry.ids, ids) for entry in self._entries), default=0)

    def covers(self, ids: Ids) -> int:
        """How many leading tokens of a prompt ``fetch`` would give: always fewer than all, for mlx-lm needs one."""
        n = self._best(ids)[1]
        return max(n, self._on_disk(ids, n))

    def fetch(self, ids: Ids) -> tuple[list[Any] | None, int]:
        """A copy of the best cache for a prompt, and how many of its tokens it covers."""
        entry, n = self._best(ids)
        if n_on_disk := self._on_disk(ids, n):
            self._read(ids, n_on_disk)
            entry, n = self._best(ids)
        if entry is None:
            return None, 0
        self._touch(entry)
        # The arrays are shared until one side writes.
        cache = copy.deepcopy(entry.cache)
        cut_back(cache, len(entry.ids) - n)
        return cache, n

    def store(self, ids: Ids, cache: list[Any]) -> None:
        """Keep ``cache``, which holds exactly these tokens."""
        if self._max_sequences == 0 or len(ids) < MIN_TOKENS:
            return
        # Unevaluated, it would be a view that keeps the whole batch's memory alive.
        mx.eval([layer.state for layer in cache])
        if self._add(ids, cache) and self._tier is not None:
            self._tier.save(ids.tolist(), cache)

    def shrink(self, max_bytes: int) -> None:
        """Give up the least recently used ones until no more than ``max_bytes`` are held."""
        while self._entries and self.n_bytes > max_bytes:
            self._evict()

    def keep(self, n_sequences: int) -> None:
        """Give up the least recently used ones until no more than ``n_sequences`` are held."""
        while len(self._entries) > n_sequences:
            self._evict()

    def _best(self, ids: Ids) -> tuple[_Entry | None, int]:
        most = len(ids) - 1
        best, best_n = None, MIN_TOKENS - 1
        for entry in reversed(self._entries):
            n = min(common(entry.ids, ids), most)
            if n > best_n and (n == len(entry.ids) or can_trim(entry.cache)):
                best, best_n = entry, n
        return (best, best_n) if best is not None else (None, 0)

    def _add(self, ids: Ids, cache: list[Any]) -> bool:
        """False when another entry already gives all of it."""
        trims = can_trim(cache)
        for entry in list(self._entries):
            n = common(entry.ids, ids)
            if n == len(ids) and (n == len(entry.ids) or can_trim(entry.cache)):
                self._touch(entry)
                return False
            # A cache that trims makes its own prefixes superfluous.
            if trims and n == len(entry.ids):
                self._drop(entry)
        entry = _Entry(ids, cache, sum(layer.nbytes for layer in cache))
        self._entries.append(entry)
        self.n_bytes += entry.n_bytes
        self.version += 1
        self.keep(self._max_sequences)
        if self._max_bytes is not None:
            self.shrink(self._max_bytes)
        return True

    def _touch(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def _evict(self) -> None:
        self._drop(self._entries[0])
        self.n_evicted += 1

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.n_bytes -= entry.n_bytes
        self.version += 1

    def _on_disk(self, ids: Ids, n_in_memory: int) -> int:
        """What a file gives, when that is so much more that it is worth reading; else 0."""
        if self._tier is None:
            return 0
        n = self._tier.covers(ids[:-1].tolist(), trimmable=self._trimmable)
        return n if n >= n_in_memory + _MIN_FROM_DISK else 0

    def _read(self, ids: Ids, n: int) -> None:
        assert self._tier is not None
        found = self._tier.load(ids[:-1].tolist(), trimmable=self._trimmable)
        if found is None:
            return
        cache, n_tokens = found
        if n_tokens > n:
            trim_prompt_cache(cache, n_tokens - n)
        self._add(ids[:n], cache)
