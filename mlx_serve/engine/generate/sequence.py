"""A job in the batch: the progress of its prompt, and how much of it other sequences have computed already.

Knows no batch. Worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_serve.engine.cache.checkpoints import Trail, reach, reach_of
from mlx_serve.engine.cache.loading import Loading
from mlx_serve.engine.cache.prefix_tree import Ids, as_ids
from mlx_serve.engine.cache.prefixes import PrefixCache, PromptPlace
from mlx_serve.engine.generate.row import Row
from mlx_serve.engine.generate.token_choice import TokenChoice


@dataclass(slots=True)
class Reusable:
    """What a waiting prompt can reuse, in the state of all sequences that has the number ``version``.

    ``n_done`` tokens are there: from ``donor``, or from the kept prefixes (None). ``coming``: the prompts being
    prefilled that have more in common. ``in_common``: its common prefix with each sequence.
    """

    version: int = -1
    n_done: int = 0
    donor: RunningSequence | None = None
    coming: Sequence[tuple[RunningSequence, int]] = ()
    in_common: dict[RunningSequence, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A job in one of three states: waiting (no ``cache``), being prefilled, or decoding (with a ``row``).

    ``ids``: its prompt, and the output before a pause. ``n_done`` of them are in its KV cache. Before it begins: the
    tokens that it could reuse, from the ``donor`` or from the kept prefixes. ``trail``: where a cache that can't be
    cut back has checkpoints. ``has_started``: its Started event was sent. ``place``: set while it is in the batch.
    """

    choice: TokenChoice
    ids: Ids
    cache: list[Any] | None = None
    n_done: int = 0
    trail: Trail = field(default_factory=Trail)
    row: Row | None = None
    has_started: bool = False
    donor: RunningSequence | None = None
    found: Reusable = field(default_factory=Reusable)
    place: PromptPlace | None = None
    # While a cache for it is read from disk, the prompt waits.
    loading: Loading | None = None

    @property
    def n_left(self) -> int:
        """The tokens to prefill: all but the last, which the batch takes."""
        return len(self.ids) - 1 - self.n_done

    @property
    def scope(self) -> str:
        """The scope whose caches the job may use, and to which its own cache belongs."""
        return self.choice.job.scope

    @property
    def held(self) -> Ids:
        """The tokens that its cache holds."""
        return self.ids[: self.n_done] if self.row is None else as_ids(self.row.tokens)

    def enter(self, kept: PrefixCache) -> None:
        """Come into the batch: from now on other prompts are compared with it."""
        self.place = kept.place(self.ids, self.scope)

    def leave(self, kept: PrefixCache, cache: list[Any] | None = None, *, is_pause: bool = False) -> None:
        """Leave the batch, with ``cache`` as a kept prefix. Prompts may refer to the sequence until they look again."""
        self.cache = None
        if self.loading is not None:
            self.loading.cancel()
        self.loading = None
        job = self.choice.job
        if not is_pause:
            kept.unpin(job)
        assert self.place is not None
        kept.leave(self.place)
        if cache is not None:
            ids = self.held
            n_prompt = min(len(job.prompt.tokens), len(ids))
            paused = job if is_pause else None
            kept.store(ids, cache, self.scope, n_prompt=n_prompt, checkpoints=self.trail.kept, paused=paused)

    def as_new(self, ids: Ids) -> RunningSequence:
        """The sequence as it comes back after a pause, with these tokens."""
        return RunningSequence(self.choice, ids, has_started=self.has_started)

    def common(self, other: RunningSequence) -> int:
        """The common prefix with another prompt. It is never the whole prompt, because one token must be left.

        0 for a prompt of another scope: the time saved would reveal its text.
        """
        assert self.place is not None
        assert other.place is not None
        return min(self.place.common(other.place), len(self.ids) - 1)

    def gives(self, n_common: int, *, trimmable: bool) -> int:
        """How much of a common prefix another prompt can reuse now."""
        n = min(n_common, self.n_done)
        if trimmable:
            return n
        if self.cache is None:
            return reach_of(self.trail.kept, n)
        return reach(self.cache, self.n_done, self.trail.kept, n)

    def will_load(self, n_common: int, *, trimmable: bool) -> int:
        """How much of a common prefix another prompt can reuse once this sequence's files are read."""
        if self.loading is None:
            return 0
        n = self.loading.n_tokens
        return min(n, n_common) if trimmable or n <= n_common else 0

    def will_give(self, n_common: int, *, trimmable: bool) -> int:
        """How much of a common prefix another prompt can reuse once this sequence has computed it."""
        return n_common if trimmable else self.trail.will_reach(n_common)
