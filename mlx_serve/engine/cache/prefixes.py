"""KV caches of earlier sequences, found by the longest common prefix. Worker thread; one instance per loaded model.

mlx-lm's LRUPromptCache does not serve here: it evicts in the order of storing, whatever is used, and its search takes
a second for a prompt of 30,000 tokens, while every stream waits (docs/decisions.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from numpy.lib.stride_tricks import sliding_window_view

from mlx_serve.engine.cache.checkpoints import MIN_APART, Checkpoint, cut, reach_of, up_to
from mlx_serve.engine.cache.disk import DiskTier
from mlx_serve.engine.cache.kinds import can_trim, holds, packed, unpacked
from mlx_serve.engine.cache.loading import Loading
from mlx_serve.engine.cache.prefix_tree import (
    Ids,
    Node,
    Path,
    PrefixTree,
    best_member,
    common,
    members_in_common,
    shared_tokens,
)
from mlx_serve.engine.cache.writer import Save

log = logging.getLogger(__name__)

# Prefilling fewer tokens than this takes no longer than copying them.
MIN_TOKENS = 16
# A tail of so few tokens is no reason to keep a second copy of what comes before it.
_SHORT_TAIL = 64
# Such an opening of an answer ("<think>") is part of its prompt, and the next turn has another one in its place.
_OPENING = 4
# So many tokens from an answer's end show that a later prompt has the answer, without the thoughts before it.
_ANSWER_END = 8
# A file is read only if it covers so many more tokens than memory does.
_MIN_FROM_DISK = 128


@dataclass(slots=True, eq=False)
class _KeptPrefix:
    """A cache of exactly ``ids``. The first ``n_prompt`` of them came from a client, the rest is an answer.

    ``trims``: it can be cut back to any number of tokens; else it can be to its ``checkpoints``. ``saves`` write it to
    disk.
    """

    ids: Ids
    scope: str
    cache: list[Any]
    n_prompt: int
    number: int
    checkpoints: Sequence[Checkpoint]
    # When it was last stored or reused.
    used_s: float = 0.0
    saves: list[Save] = field(default_factory=list)
    node: Node[_KeptPrefix] = field(init=False)
    trims: bool = field(init=False)
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.trims = can_trim(self.cache)
        if self.trims:
            self.checkpoints = ()
        self.n_bytes = sum(layer.nbytes for layer in self.cache) + sum(one.n_bytes for one in self.checkpoints)

    def reach(self, n_tokens: int) -> int:
        """How many of its first ``n_tokens`` can be reused."""
        if n_tokens >= len(self.ids):
            return len(self.ids)
        return n_tokens if self.trims else reach_of(self.checkpoints, n_tokens)

    def is_replaced_by(self, ids: Ids, n_common: int) -> bool:
        """Whether a longer sequence that has ``n_common`` tokens in common leaves nothing worth keeping of this one.

        The rest of this one is short, or it is an answer that costs little to prefill again, or its thoughts are dead:
        the other sequence has the end of the same answer, and no client sends thoughts back.
        """
        n_rest = len(self.ids) - n_common
        if n_rest <= min(_SHORT_TAIL, n_common // 8):
            return True
        if n_common < self.n_prompt - _OPENING:
            return False
        return n_rest <= n_common // 4 or _occurs(self.ids[-_ANSWER_END - 1 : -1], ids[n_common : n_common + n_rest])


@dataclass(slots=True, eq=False)
class PromptPlace:
    """A prompt's place among the kept sequences, by which it is looked up again in microseconds."""

    ids: Ids
    scope: str
    node: Node[_KeptPrefix]

    def common(self, other: PromptPlace) -> int:
        """How many leading tokens two prompts have in common; 0 if they are of different scopes."""
        return self.node.common(other.node)


def _occurs(part: Ids, ids: Ids) -> bool:
    return len(ids) >= len(part) and bool((sliding_window_view(ids, len(part)) == part).all(axis=1).any())


class PrefixCache:
    """At most ``max_sequences`` caches and ``max_bytes`` bytes. The least recently used cache is evicted first.

    What an owner has pinned is evicted last. The limit of ``max_sequences`` ignores pins: one rank alone knows the jobs
    in line, and all ranks must evict alike. What an owner has claimed is part of that job's memory: it is not evicted,
    and neither counted in ``n_bytes`` nor in the number of caches. What a paused job has left is dropped for no other
    sequence, and nobody else takes it over.

    ``bits``: caches are quantized while they are kept, here and in files. A cache is stored and reused only if its
    length equals its number of tokens: any other length would silently give wrong tokens. A prompt never uses the
    caches of another scope, because the number of cached tokens would reveal what others have sent.
    """

    def __init__(
        self,
        max_sequences: int,
        max_bytes: int | None,
        *,
        bits: int | None = None,
        tier: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._bits = bits
        self._tier = tier
        self._clock = clock
        # The least recently used first.
        self._entries: dict[_KeptPrefix, None] = {}
        self._tree: PrefixTree[_KeptPrefix] = PrefixTree()
        # Of those that have pinned or claimed something, or tried to.
        self._places: dict[Hashable, PromptPlace] = {}
        # What each owner will use, in the order of pinning.
        self._pins: dict[Hashable, _KeptPrefix] = {}
        # What each owner will take over. Others may still copy it.
        self._claims: dict[Hashable, _KeptPrefix] = {}
        # The cache that each paused owner has left here. It is the same on all ranks, as eviction depends on it.
        self._left: dict[Hashable, _KeptPrefix] = {}
        self._n_added = 0
        self.n_bytes = 0
        self.n_evicted = 0
        # This number changes whenever the result of ``covers`` may change.
        self.version = 0

    @property
    def unkept_bytes(self) -> int:
        """The bytes of dropped caches that stay in memory until they are on disk. Any thread."""
        return self._tier.unkept_bytes if self._tier is not None else 0

    @property
    def has_disk(self) -> bool:
        """Whether what is evicted stays in files."""
        return self._tier is not None

    def __len__(self) -> int:
        return len(self._entries)

    def place(self, ids: Ids, scope: str = "") -> PromptPlace:
        """Give a prompt that will be looked up several times its place. ``leave`` gives it back."""
        return PromptPlace(ids, scope, self._tree.place(ids, scope))

    def leave(self, place: PromptPlace) -> None:
        """Give back a place."""
        self._tree.leave(place.node)

    def shared(self, ids: Ids, scope: str = "") -> int:
        """The longest common prefix of a prompt with any kept sequence, whether or not it can be reused."""
        return shared_tokens(self._tree.walk(ids, scope))

    def covers(self, place: PromptPlace) -> int:
        """How many leading tokens ``fetch`` would cover. Never the whole prompt: mlx-lm needs one token."""
        return self._best(place.node.path(), len(place.ids))[1]

    def load(self, ids: Ids, scope: str, n_held: int, prefill_s: Callable[[int], float]) -> Loading | None:
        """Begin to load what files hold of a prompt, if that is worth it. Then it is kept like any other cache.

        ``n_held``: the tokens that the prompt can reuse without. ``prefill_s``: how long so many tokens would take.
        """
        if self._tier is None:
            return None

        def keep(cache: list[Any], n: int) -> None:
            if is_whole(cache, n):
                self._add(ids[:n], scope, cache)

        return self._tier.load(ids[:-1], scope, keep, n_held=n_held, least=_MIN_FROM_DISK, prefill_s=prefill_s)

    def fetch(
        self, ids: Ids, scope: str = "", owner: Hashable = None
    ) -> tuple[list[Any] | None, int, list[Checkpoint]]:
        """The best cache for a prompt, how many of its tokens it covers, and their checkpoints. Ends the owner's pin.

        An owner gets the cache itself if it can claim it, else a copy; without an owner it is a copy.
        """
        entry, n = self._source(owner, self._tree.walk(ids, scope), len(ids))
        is_own = owner is not None and entry is not None and self._may_claim(owner, entry, ids)
        if entry is not None and is_own:
            self._drop(entry)
        self.unpin(owner)
        if entry is None:
            return None, 0, []
        if not is_own:
            self._touch(entry)
        cache = cut(entry.cache, len(entry.ids), entry.checkpoints, n, is_own=is_own)
        if is_whole(cache, n):
            return cache if self._bits is None else unpacked(cache), n, up_to(entry.checkpoints, n)
        if not is_own:
            self._drop(entry)
        return self.fetch(ids, scope)

    def store(
        self,
        ids: Ids,
        cache: list[Any],
        scope: str = "",
        *,
        n_prompt: int | None = None,
        checkpoints: Sequence[Checkpoint] = (),
        paused: Hashable = None,
    ) -> None:
        """Keep ``cache``, which holds exactly these tokens: those of a prompt (by default all), then of its answer.

        ``paused``: the owner that goes on with it, and must get the very tokens that would have come. So the cache is
        not quantized, and stays until the owner fetches it or is unpinned, if there is room.
        """
        if self._max_sequences == 0 or len(ids) < MIN_TOKENS:
            return
        # Without evaluation the cache would be a view that keeps the memory of the whole batch.
        mx.eval([layer.state for layer in cache])
        if not is_whole(cache, len(ids)):
            return
        if self._bits is not None and paused is None:
            for i in range(len(cache)):
                # Layer by layer, so that both forms of one layer alone are in memory.
                cache[i : i + 1] = packed(cache[i : i + 1], self._bits)
                mx.eval(cache[i].state)
        entry = self._add(ids, scope, cache, n_prompt, checkpoints, as_it_is=paused is not None)
        if paused is not None and entry in self._entries:
            self._left[paused] = entry
        if entry is not None and self._tier is not None:
            entry.saves = self._save(self._tier, entry)
            if entry not in self._entries:
                self._release(entry)

    def pin(self, owner: Hashable, ids: Ids, scope: str = "") -> None:
        """Evict the cache that ``fetch`` would use for this prompt after all others. It replaces the owner's pin."""
        known = self._places.get(owner)
        place = known if known is not None and known.ids is ids else self.place(ids, scope)
        if known is not None and known is not place:
            self.leave(known)
        self._places[owner] = place
        self._let_go(owner)
        entry, _ = self._source(owner, place.node.path(), len(ids))
        if entry is not None:
            self._pins[owner] = entry

    def pinned_place(self, owner: Hashable) -> PromptPlace | None:
        """The place of the prompt for which an owner has pinned something, or tried to."""
        return self._places.get(owner)

    def wanted_bytes(self, within_s: float) -> int:
        """The bytes of the caches that are pinned, or were stored or reused in the last ``within_s`` seconds."""
        since_s, pinned = self._clock() - within_s, set(self._pins.values())
        return sum(entry.n_bytes for entry in self._entries if entry.used_s >= since_s or entry in pinned)

    def claim(self, owner: Hashable, ids: Ids, scope: str = "") -> None:
        """Pin the cache that ``fetch`` would use for an admitted job, as a part of that job's memory if it can be.

        It can if no other job has claimed it, and if the job leaves nothing of it that is worth a copy.
        """
        self.pin(owner, ids, scope)
        entry, _ = self._source(owner, self._places[owner].node.path(), len(ids))
        if entry is not None and self._may_claim(owner, entry, ids):
            self._uncount(entry)
            self._pins = {other: pinned for other, pinned in self._pins.items() if pinned is not entry}
            self._claims[owner] = entry

    def unpin(self, owner: Hashable) -> None:
        """Give up the owner's pin or claim, if it has one, and the cache that it left when it paused."""
        self._let_go(owner)
        self._left.pop(owner, None)
        if (place := self._places.pop(owner, None)) is not None:
            self.leave(place)

    def forget_jobs(self) -> None:
        """Give up all places, pins and claims: the jobs are gone, and their backend."""
        for owner in list(self._places):
            self.unpin(owner)
        self._left.clear()
        self._tree = PrefixTree()
        for entry in self._entries:
            self._put_into_tree(entry)

    def shrink(self, max_bytes: int, *, pinned: bool = True) -> list[int]:
        """Evict caches until the rest takes at most ``max_bytes``. Returns their numbers, for ``evict``.

        The least recently used goes first, then the pinned ones, from the latest pin on; without ``pinned`` they stay.
        """
        held = dict.fromkeys(self._pins.values())
        order = [entry for entry in self._entries if entry not in held]
        if pinned:
            order += [entry for entry in reversed(held) if entry in self._entries]
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
        """Evict all caches, those that are claimed too."""
        self.forget_jobs()
        self.keep(0)

    def keep(self, n_sequences: int) -> None:
        """Evict the least recently used caches until at most ``n_sequences`` are left."""
        while len(self._entries) > n_sequences:
            self._evict(next(iter(self._entries)))

    def _best(self, path: Path[_KeptPrefix], n_tokens: int) -> tuple[_KeptPrefix | None, int]:
        """The kept sequence that covers most of a prompt of ``n_tokens`` with this path."""
        best = best_member(path, n_tokens - 1)
        return best if best is not None and best[1] >= MIN_TOKENS else (None, 0)

    def _source(self, owner: Hashable, path: Path[_KeptPrefix], n_tokens: int) -> tuple[_KeptPrefix | None, int]:
        """What an owner's prompt goes on with: what it has left itself, unless another one covers more."""
        best, n = self._best(path, n_tokens)
        left = self._left.get(owner)
        return (left, len(left.ids)) if left is not None and len(left.ids) >= n else (best, n)

    def _let_go(self, owner: Hashable) -> None:
        self._pins.pop(owner, None)
        if (entry := self._claims.pop(owner, None)) is not None:
            self._keep(entry)

    def _may_claim(self, owner: Hashable, entry: _KeptPrefix, ids: Ids) -> bool:
        held = (one for owners in (self._claims, self._left) for other, one in owners.items() if other != owner)
        n_common = min(common(entry.ids, ids), len(ids) - 1)
        return entry not in held and entry.is_replaced_by(ids, n_common)

    def _add(
        self,
        ids: Ids,
        scope: str,
        cache: list[Any],
        n_prompt: int | None = None,
        checkpoints: Sequence[Checkpoint] = (),
        *,
        as_it_is: bool = False,
    ) -> _KeptPrefix | None:
        """Add a cache. None when another entry already covers it."""
        n_prompt = len(ids) if n_prompt is None else n_prompt
        entry = _KeptPrefix(ids, scope, cache, n_prompt, self._n_added, checkpoints)
        others = members_in_common(self._tree.walk(ids, scope))
        for other, n in others.items():
            covers = n == len(ids) == other.reach(n) and (other.checkpoints or not entry.checkpoints)
            if covers and (self._bits is None or not as_it_is):
                self._touch(other)
                return None
        self._n_added += 1
        self._put_into_tree(entry)
        self.version += 1
        for other, n in others.items():
            # What a job has claimed takes no memory of its own, and a paused job needs all that it has left.
            is_free = other in self._entries and other not in self._left.values()
            if n >= MIN_TOKENS and is_free and _makes_useless(entry, other, n):
                self._pins.update({owner: entry for owner, pinned in self._pins.items() if pinned is other})
                self._drop(other)
        self._keep(entry)
        return entry

    def _put_into_tree(self, entry: _KeptPrefix) -> None:
        entry.node = self._tree.place(entry.ids, entry.scope)
        entry.node.add(entry)

    def _keep(self, entry: _KeptPrefix) -> None:
        self._entries[entry] = None
        self.n_bytes += entry.n_bytes
        entry.used_s = self._clock()
        self.keep(self._max_sequences)
        if self._max_bytes is not None:
            self.shrink(self._max_bytes)

    def _touch(self, entry: _KeptPrefix) -> None:
        if entry in self._entries:
            self._entries[entry] = self._entries.pop(entry)
        entry.used_s = self._clock()
        entry.node.remove(entry)
        entry.node.add(entry)

    def _evict(self, entry: _KeptPrefix) -> None:
        self._drop(entry)
        self.n_evicted += 1

    def _drop(self, entry: _KeptPrefix) -> None:
        self._remove(entry)
        self._release(entry)

    @staticmethod
    def _save(tier: DiskTier, entry: _KeptPrefix) -> list[Save]:
        """Write a cache to disk, and its first and last checkpoints of those where prompts are likely to part."""
        saves = [tier.save(entry.ids, entry.scope, entry.cache)]
        stops = [one for one in entry.checkpoints if one.is_stop]
        for stop in dict.fromkeys(stops[:1] + stops[-1:]):
            ids = entry.ids[: stop.n_tokens]
            if not tier.holds(ids, entry.scope):
                cache = cut(entry.cache, len(entry.ids), entry.checkpoints, stop.n_tokens)
                saves.append(tier.save(ids, entry.scope, cache))
        return [save for save in saves if save is not None]

    def _release(self, entry: _KeptPrefix) -> None:
        """Say that from now on only the save keeps the cache in memory, if there is one."""
        if self._tier is not None:
            for save in entry.saves:
                self._tier.release(save)

    def _remove(self, entry: _KeptPrefix) -> None:
        if entry in self._entries:
            self._uncount(entry)
        for owners in (self._pins, self._claims, self._left):
            for owner in [owner for owner, held in owners.items() if held is entry]:
                del owners[owner]
        entry.node.remove(entry)
        self._tree.leave(entry.node)
        self.version += 1

    def _uncount(self, entry: _KeptPrefix) -> None:
        del self._entries[entry]
        self.n_bytes -= entry.n_bytes


def _makes_useless(entry: _KeptPrefix, other: _KeptPrefix, n_common: int) -> bool:
    if n_common < len(other.ids) and not other.is_replaced_by(entry.ids, n_common):
        return False
    return entry.reach(n_common) > max(0, other.reach(n_common) - MIN_APART)


def is_whole(cache: list[Any], n_tokens: int) -> bool:
    """Whether a cache holds all its tokens. False is a bug of this server: it is logged, and costs a prefill."""
    if holds(cache, n_tokens):
        return True
    log.error("a KV cache is not reused: it does not hold the %d tokens that it should", n_tokens)
    return False
