"""Where a KV cache can be cut back to: the states that its windows and recurrent layers had on the way.

A layer of full attention keeps every token, so it can be cut back to any of them. A sliding window and a recurrent
state can't, but their state is small: it is kept at some positions, beside one copy of the other layers.

    sequence:  [system prompt ........][question ....][answer ...]
    cache:      full attention, all tokens                        + windows, states at the end
    Checkpoint:                       ^              ^              windows, states there

Worker thread only. Knows no model and no batch.
"""

from __future__ import annotations

import copy
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_serve.engine.cache.kinds import can_trim, cut_back, is_complete, kind_of, leaves, snapshot, with_leaves

# Prefilling fewer tokens than this costs little more than the pass that a stop adds.
MIN_APART = 32
# Where a slice ends anyway, a checkpoint is taken if the last one is so many tokens behind.
_SPACING = 256
# The checkpoints of a sequence take at most this share of its full-attention bytes, except for the first few.
SHARE = 0.5
N_FREE = 2
N_MOST = 64
# At the places where prompts are likely to part, a checkpoint is worth this many times another one.
_WORTH_OF_A_STOP = 4
# The borders between a prompt's turns that are stops, beside the first one.
_MIDDLE_BORDERS = 4
_LAST_BORDERS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The layers that can't be cut back, as they were after ``n_tokens``. Shared between sequences, never changed.

    ``is_stop``: prompts are likely to part here.
    """

    n_tokens: int
    layers: tuple[Any, ...]
    n_bytes: int
    is_stop: bool = False


def take(cache: Sequence[Any], n_tokens: int, *, is_stop: bool = False) -> Checkpoint | None:
    """A checkpoint of a cache that holds ``n_tokens``.

    None: the cache can always be cut back and needs none, or it has layers of an unknown type, which may be large.
    """
    others = [layer for layer in leaves(cache) if not is_complete(layer)]
    if not others or not all(map(kind_of, others)):
        return None
    layers = tuple(map(snapshot, others))
    mx.eval([layer.state for layer in layers])
    return Checkpoint(n_tokens, layers, sum(layer.nbytes for layer in layers), is_stop)


def reach(cache: Sequence[Any], n_held: int, checkpoints: Sequence[Checkpoint], n_wanted: int) -> int:
    """The largest number of tokens up to ``n_wanted`` to which ``cut`` can shorten a cache of ``n_held`` tokens."""
    if n_wanted >= n_held:
        return n_held
    if can_trim(cache):
        return n_wanted
    return reach_of(checkpoints, n_wanted)


def reach_of(checkpoints: Sequence[Checkpoint], n_wanted: int) -> int:
    """The largest number of tokens up to ``n_wanted`` at which these checkpoints have a state."""
    return max((_reach_of(checkpoint, n_wanted) for checkpoint in checkpoints), default=0)


def cut(
    cache: list[Any], n_held: int, checkpoints: Sequence[Checkpoint], n_tokens: int, *, is_own: bool = False
) -> list[Any]:
    """The first ``n_tokens`` of a cache, a number that ``reach`` returned.

    A copy, which shares arrays with the cache until one of them writes; with ``is_own`` the cache itself.
    """
    if is_own and n_tokens == n_held:
        return cache
    if not is_own:
        cache = copy.deepcopy(cache)
    if n_tokens == n_held or can_trim(cache):
        cut_back(cache, n_held - n_tokens)
        return cache
    checkpoint = next(one for one in checkpoints if _reach_of(one, n_tokens) == n_tokens)
    states = copy.deepcopy(list(checkpoint.layers))
    cut_back(states, checkpoint.n_tokens - n_tokens)
    complete = [layer for layer in leaves(cache) if is_complete(layer)]
    cut_back(complete, n_held - n_tokens)
    sources = {True: iter(complete), False: iter(states)}
    return with_leaves(cache, (next(sources[is_complete(layer)]) for layer in leaves(cache)))


def up_to(checkpoints: Sequence[Checkpoint], n_tokens: int) -> list[Checkpoint]:
    """The checkpoints of the first ``n_tokens``."""
    return [one for one in checkpoints if one.n_tokens <= n_tokens]


def thinned(checkpoints: Sequence[Checkpoint], max_bytes: float) -> list[Checkpoint]:
    """What is left when checkpoints may take ``max_bytes``. The first and the last stop are dropped last.

    Of the others, the next one to be dropped is the one whose neighbours are nearest to each other.
    """
    left = list(checkpoints)
    while len(left) > N_FREE and (len(left) > N_MOST or sum(one.n_bytes for one in left) > max_bytes):
        stops = [i for i, one in enumerate(left) if one.is_stop]
        last_ones = {*stops[:1], *stops[-1:]}
        del left[min((i for i in range(len(left)) if i not in last_ones), key=partial(_worth, left))]
    return left


def borders(ids: NDArray[np.int64], begin: int, controls: Collection[int]) -> list[int]:
    """Positions behind ``begin`` where a prompt's turns begin or end: the first one, the last ones, a few between."""
    found = begin + 1 + np.flatnonzero(np.isin(ids[begin + 1 :], list(controls)))
    apart = _spaced(begin, found.tolist())
    middle, last = apart[1:-_LAST_BORDERS], apart[1:][-_LAST_BORDERS:]
    return apart[:1] + middle[:: -(-len(middle) // _MIDDLE_BORDERS) or 1] + last


@dataclass(slots=True)
class Trail:
    """The checkpoints of one running sequence. Slices of its prompt end at ``stops``, in order."""

    stops: list[int] = field(default_factory=list)
    kept: list[Checkpoint] = field(default_factory=list)

    def resume(self, cache: Sequence[Any], n_done: int) -> None:
        """Take a checkpoint where a sequence goes on from a kept prefix: its end was the end of an answer, mostly."""
        if n_done - reach_of(self.kept, n_done) >= MIN_APART:
            self.add(cache, n_done, is_stop=True)

    def plan(self, begin: int, wanted: Iterable[int], likely: Iterable[int]) -> None:
        """Stop where prompts are known to part (``wanted``), and where they may part (``likely``), behind ``begin``."""
        self.stops = _spaced(begin, sorted(wanted))
        for position in sorted(likely):
            self.want(begin, position)

    def want(self, n_done: int, position: int) -> None:
        """Stop at one more position of a prompt of which ``n_done`` tokens are done, unless a checkpoint is near."""
        near = [n_done, *self.stops, *(one.n_tokens for one in self.kept)]
        if position > n_done and not any(0 <= position - other < MIN_APART for other in near):
            insort(self.stops, position)

    def end(self, begin: int, n_tokens: int) -> int:
        """Where a slice of at most ``n_tokens`` that begins at ``begin`` has to end."""
        return min([begin + n_tokens, *self.stops[:1]])

    def reached(self, cache: Sequence[Any], n_done: int) -> None:
        """Take a checkpoint at the end of a slice, if it is a stop or far enough from the last one."""
        is_stop = n_done in self.stops
        self.stops = [stop for stop in self.stops if stop > n_done]
        last = self.kept[-1].n_tokens if self.kept else 0
        if is_stop or min([n_done - last, *(stop - n_done for stop in self.stops[:1])]) >= _SPACING:
            self.add(cache, n_done, is_stop=is_stop)

    def add(self, cache: Sequence[Any], n_done: int, *, is_stop: bool) -> None:
        """Take a checkpoint, and drop those that become too many."""
        checkpoint = take(cache, n_done, is_stop=is_stop)
        if checkpoint is not None:
            # As long as the windows aren't full, the newest checkpoint serves for all earlier ones.
            former = [] if can_trim(checkpoint.layers) else up_to(self.kept, n_done - 1)
            complete_bytes = sum(layer.nbytes for layer in leaves(cache) if is_complete(layer))
            self.kept = thinned([*former, checkpoint], SHARE * complete_bytes)

    def will_reach(self, n_wanted: int) -> int:
        """The last position up to ``n_wanted`` that has a checkpoint, or will have one."""
        return max([n for n in self.stops if n <= n_wanted] + [reach_of(self.kept, n_wanted)])


def _spaced(begin: int, positions: Iterable[int]) -> list[int]:
    """The positions that are at least MIN_APART behind ``begin`` and behind each other."""
    apart: list[int] = []
    for position in positions:
        if position - (apart[-1] if apart else begin) >= MIN_APART:
            apart.append(position)
    return apart


def _worth(checkpoints: Sequence[Checkpoint], i: int) -> int:
    """The tokens between a checkpoint's neighbours; they count more at a stop."""
    before = checkpoints[i - 1].n_tokens if i else 0
    after = checkpoints[min(i + 1, len(checkpoints) - 1)].n_tokens
    return (after - before) * (_WORTH_OF_A_STOP if checkpoints[i].is_stop else 1)


def _reach_of(checkpoint: Checkpoint, n_wanted: int) -> int:
    if checkpoint.n_tokens <= n_wanted:
        return checkpoint.n_tokens
    # A window that isn't full yet has forgotten nothing.
    return n_wanted if can_trim(checkpoint.layers) else 0
