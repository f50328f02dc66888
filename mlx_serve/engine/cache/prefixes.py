"""KV caches of earlier sequences, found by the longest common prefix. Worker thread; one instance per loaded model.

mlx-lm's LRUPromptCache does not serve here: it evicts in the order of storing, whatever is used, and its search takes
a second for a prompt of 30,000 tokens, while every stream waits (docs/decisions.md).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_serve.engine.cache.disk import DiskTier, FoundFile
from mlx_serve.engine.cache.kinds import can_trim, cut_back, holds, take_back

log = logging.getLogger(__name__)

Ids: TypeAlias = NDArray[np.int64]

# Prefilling fewer tokens than this takes no longer than copying them.
MIN_TOKENS = 16
# A file is read only if it covers so many more tokens than memory does.
_MIN_FROM_DISK = 128


@dataclass(slots=True, eq=False)
class _KeptPrefix:
    ids: Ids
    scope: str
    cache: list[Any]
    n_bytes: int
    number: int


def as_ids(tokens: Sequence[int]) -> Ids:
    """Token ids as an array that ``common`` compares."""
    return np.asarray(tokens, dtype=np.int64)


def common(a: Ids, b: Ids) -> int:
    """How many leading tokens are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class PrefixCache:
    """At most ``max_sequences`` caches and ``max_bytes`` bytes. The least recently used cache is evicted first.

    What an owner has pinned is evicted last. The limit of ``max_sequences`` ignores pins: one rank alone knows the jobs
    in line, and all ranks must evict alike.

    ``trimmable``: any prefix of a cache of this model can be used, however long the cache is. A cache is stored and
    reused only if its length equals its number of tokens: any other length would silently give wrong tokens. A prompt
    never uses the caches of another scope, because the number of cached tokens would reveal what others have sent.
    """

    def __init__(
        self, max_sequences: int, max_bytes: int | None, *, trimmable: bool = True, tier: DiskTier | None = None
    ) -> None:
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._trimmable = trimmable
        self._tier = tier
        # The least recently used first.
        self._entries: list[_KeptPrefix] = []
        # What each owner will use, in the order of pinning.
        self._pins: dict[Hashable, _KeptPrefix] = {}
        self._n_added = 0
        self.n_bytes = 0
        self.n_evicted = 0
        # This number changes whenever the result of ``covers`` may change.
        self.version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def shared(self, ids: Ids, scope: str = "") -> int:
        """The longest common prefix of a prompt with any kept sequence, whether or not it can be reused."""
        return max((common(entry.ids, ids) for entry in self._of(scope)), default=0)

    def covers(self, ids: Ids, scope: str = "") -> int:
        """How many leading tokens ``fetch`` would cover. Never the whole prompt: mlx-lm needs one token."""
        n = self._best(ids, scope)[1]
        if self._tier is None:
            return n
        n_on_disk = self._tier.covers(ids[:-1].tolist(), scope, trimmable=self._trimmable)
        return n_on_disk if _is_worth_reading(n_on_disk, n) else n

    def fetch(self, ids: Ids, scope: str = "") -> tuple[list[Any] | None, int]:
        """A copy of the best cache for a prompt, and how many of its tokens it covers."""
        entry, n = self._best(ids, scope)
        if (found := self._on_disk(ids, scope, n)) is not None:
            self._read(ids, scope, found)
            entry, n = self._best(ids, scope)
        if entry is None:
            return None, 0
        self._touch(entry)
        # The copy shares its arrays with the original until one of them writes.
        cache = copy.deepcopy(entry.cache)
        cut_back(cache, len(entry.ids) - n)
        if not is_whole(cache, n):
            self._drop(entry)
            return self.fetch(ids, scope)
        return cache, n

    def store(self, ids: Ids, cache: list[Any], scope: str = "") -> None:
        """Keep ``cache``, which holds exactly these tokens."""
        if self._max_sequences == 0 or len(ids) < MIN_TOKENS:
            return
        # Without evaluation the cache would be a view that keeps the memory of the whole batch.
        mx.eval([layer.state for layer in cache])
        if is_whole(cache, len(ids)) and self._add(ids, scope, cache) and self._tier is not None:
            self._tier.save(ids.tolist(), scope, cache)

    def pin(self, owner: Hashable, ids: Ids, scope: str = "") -> None:
        """Evict the cache that ``fetch`` would use for this prompt after all others. It replaces the owner's pin."""
        self.unpin(owner)
        entry, _ = self._best(ids, scope)
        if entry is not None:
            self._pins[owner] = entry

    def unpin(self, owner: Hashable) -> None:
        """Give up the owner's pin, if it has one."""
        self._pins.pop(owner, None)

    def shrink(self, max_bytes: int, *, pinned: bool = True) -> list[int]:
        """Evict caches until the rest takes at most ``max_bytes``. Returns their numbers, for ``evict``.

        The least recently used goes first, then the pinned ones, from the latest pin on; without ``pinned`` they stay.
        """
        held = dict.fromkeys(self._pins.values())
        order = [entry for entry in self._entries if entry not in held]
        if pinned:
            order += reversed(held)
        evicted = []
        for entry in order:
            if self.n_bytes <= max_bytes:
                break
            self._evict(entry)
            evicted.append(entry.number)
        return evicted

    def evict(self, numbers: Collection[int]) -> None:
        """Evict what another rank has evicted. All ranks number their caches alike."""
        for entry in [entry for entry in self._entries if entry.number in numbers]:
            self._evict(entry)

    def clear(self) -> None:
        """Evict all caches."""
        self.keep(0)

    def keep(self, n_sequences: int) -> None:
        """Evict the least recently used caches until at most ``n_sequences`` are left."""
        while len(self._entries) > n_sequences:
            self._evict(self._entries[0])

    def _best(self, ids: Ids, scope: str) -> tuple[_KeptPrefix | None, int]:
        most = len(ids) - 1
        best, best_n = None, MIN_TOKENS - 1
        for entry in reversed(self._of(scope)):
            n = min(common(entry.ids, ids), most)
            if n > best_n and (n == len(entry.ids) or can_trim(entry.cache)):
                best, best_n = entry, n
        return (best, best_n) if best is not None else (None, 0)

    def _of(self, scope: str) -> list[_KeptPrefix]:
        return [entry for entry in self._entries if entry.scope == scope]

    def _add(self, ids: Ids, scope: str, cache: list[Any]) -> bool:
        """Add a cache. False when another entry already covers it."""
        trims = can_trim(cache)
        covered = []
        for entry in self._of(scope):
            n = common(entry.ids, ids)
            if n == len(ids) and (n == len(entry.ids) or can_trim(entry.cache)):
                self._touch(entry)
                return False
            # A trimmable cache replaces the caches of its own prefixes.
            if trims and n == len(entry.ids):
                covered.append(entry)
        entry = _KeptPrefix(ids, scope, cache, sum(layer.nbytes for layer in cache), self._n_added)
        self._n_added += 1
        for former in covered:
            self._pins.update({owner: entry for owner, pinned in self._pins.items() if pinned is former})
            self._drop(former)
        self._entries.append(entry)
        self.n_bytes += entry.n_bytes
        self.version += 1
        self.keep(self._max_sequences)
        if self._max_bytes is not None:
            self.shrink(self._max_bytes)
        return True

    def _touch(self, entry: _KeptPrefix) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def _evict(self, entry: _KeptPrefix) -> None:
        self._drop(entry)
        self.n_evicted += 1

    def _drop(self, entry: _KeptPrefix) -> None:
        self._entries.remove(entry)
        self._pins = {owner: pinned for owner, pinned in self._pins.items() if pinned is not entry}
        self.n_bytes -= entry.n_bytes
        self.version += 1

    def _on_disk(self, ids: Ids, scope: str, n_in_memory: int) -> FoundFile | None:
        """The best file, if it covers enough more tokens than memory to be worth reading."""
        if self._tier is None:
            return None
        found = self._tier.find(ids[:-1].tolist(), scope, trimmable=self._trimmable)
        return found if found is not None and _is_worth_reading(found.n_tokens, n_in_memory) else None

    def _read(self, ids: Ids, scope: str, found: FoundFile) -> None:
        """Load the cache of a file into memory."""
        assert self._tier is not None
        n, n_held = found.n_tokens, len(found.held)
        cache = self._tier.load(found)
        if cache is None or not is_whole(cache, n_held) or common(found.held, ids) < n:
            return
        if n_held > n:
            take_back(cache, n_held - n)
        self._add(ids[:n], scope, cache)


def _is_worth_reading(n_on_disk: int, n_in_memory: int) -> bool:
    return n_on_disk >= n_in_memory + _MIN_FROM_DISK


def is_whole(cache: list[Any], n_tokens: int) -> bool:
    """Whether a cache holds all its tokens. False is a bug of this server: it is logged, and costs a prefill."""
    if holds(cache, n_tokens):
        return True
    log.error("a KV cache is not reused: it does not hold the %d tokens that it should", n_tokens)
    return False
