"""The jobs in line for one model, and the prefixes that are pinned for them. Knows no batch. Worker thread."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_serve.engine.cache.prefix_tree import Ids, as_ids
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.values import Job


class InLine:
    """The jobs for which the batch has no place yet, and paused ones. ``kept`` evicts last what they will use."""

    def __init__(self, kept: PrefixCache) -> None:
        self._kept = kept
        self._jobs: set[Job] = set()
        # The jobs that were pinned last, and the state of the kept prefixes then.
        self._pinned: tuple[list[Job], int] = [], -1

    def pin(self, jobs: Sequence[Job]) -> None:
        """Pin for these jobs in their order, and for no others. Embedding jobs use no prefixes."""
        state = [*jobs], self._kept.version
        if state == self._pinned:
            return
        self._pinned = state
        for job in self._jobs.difference(jobs):
            self.let_go(job)
        for job in jobs:
            if job.inputs is None:
                self.hold(job, self.ids_of(job))

    def hold(self, job: Job, ids: Ids) -> None:
        """Pin for a job which has these tokens when its turn comes."""
        self._jobs.add(job)
        self._kept.pin(job, ids, job.scope)

    def ids_of(self, job: Job) -> Ids:
        """The tokens of a job in line, or of one that never stood in it."""
        place = self._kept.pinned_place(job)
        return as_ids(job.prompt.tokens) if place is None else place.ids

    def claim(self, job: Job, ids: Ids) -> None:
        """A job with these tokens leaves the line for the batch, and takes over what was pinned for it."""
        self._jobs.discard(job)
        self._kept.claim(job, ids, job.scope)

    def let_go(self, job: Job) -> None:
        """A job leaves the line, and its pin ends."""
        self._jobs.discard(job)
        self._kept.unpin(job)
