"""A job in the batch: how far its prompt is, and how much of it others have computed already.

Knows no batch, no generator and no cache but as something to hold. Worker thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_serve.engine.cache.prefixes import Ids, common
from mlx_serve.engine.generate.token_choice import TokenChoice


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A job on its way: a prompt that waits (no ``cache``), that is prefilled, or (with a ``uid``) that decodes.

    ``n_done`` tokens of its prompt are in its KV cache; before it begins, so many are to be had, of the ``donor`` or of
    the kept prefixes. ``marks``: where a copy of the cache is still to be kept.
    """

    choice: TokenChoice
    ids: Ids
    cache: list[Any] | None = None
    n_done: int = 0
    marks: list[int] = field(default_factory=list)
    uid: int = -1
    donor: RunningSequence | None = None
    cache_version: int = -1
    n_kept: int = 0
    in_common: dict[RunningSequence, int] = field(default_factory=dict)

    @property
    def n_left(self) -> int:
        """Tokens to prefill: all but the last, which the generator takes."""
        return len(self.ids) - 1 - self.n_done

    @property
    def scope(self) -> str:
        """Whose caches it may use, and leave its own to."""
        return self.choice.job.scope

    def common(self, other: RunningSequence) -> int:
        """How much of the prompt is another one's too; never all of it, for one token has to be left.

        Nothing of a prompt of another scope: its client could find it out.
        """
        if other.scope != self.scope:
            return 0
        if other not in self.in_common:
            self.in_common[other] = min(common(self.ids, other.ids), len(self.ids) - 1)
        return self.in_common[other]

    def will_give(self, n_common: int, *, trimmable: bool) -> int:
        """How much of what it has in common with another prompt can be had once it has got there."""
        if trimmable:
            return n_common
        return max((mark for mark in self.marks if mark <= n_common), default=0)
