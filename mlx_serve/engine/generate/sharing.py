"""What waiting prompts can reuse of others: of kept prefixes and of running sequences, and which wait for a prefill.

Worker thread. Everything about a prompt is looked up again only when a sequence has begun or left, or when the kept
prefixes have changed; so a step costs a few comparisons for each waiting prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.generate.sequence import Reusable, RunningSequence

# A prompt waits for another prompt's prefill only if it gains so many tokens over what it can reuse now.
MIN_SHARED = 32


class Sharing:
    """The sources of one model's prompts. ``shares``: sequences give to others while they run."""

    def __init__(self, kept: PrefixCache, *, shares: bool, trimmable: bool) -> None:
        self._kept = kept
        self._shares = shares
        self._trimmable = trimmable
        self._begun: list[RunningSequence] = []
        self._loading: list[RunningSequence] = []
        self._done: list[RunningSequence] = []
        self._kept_version = -1
        self._version = 0

    def update(self, waiting: list[RunningSequence], done: list[RunningSequence]) -> None:
        """Say which prompts wait or are being prefilled, and which sequences have all of theirs in their caches."""
        begun = [prompt for prompt in waiting if prompt.cache is not None]
        self._loading = [prompt for prompt in waiting if prompt.loading is not None]
        if (self._kept_version, self._begun, self._done) != (self._kept.version, begun, done):
            self._version += 1
            self._kept_version, self._begun, self._done = self._kept.version, begun, done

    def waits(self, prompt: RunningSequence) -> bool:
        """Whether a prompt should wait for another one. Also records what it could reuse now."""
        found = prompt.found
        if found.version != self._version:
            found = prompt.found = self._find(prompt)
        donor, n_done = self._best(found.coming, found.donor, found.n_done)
        prompt.donor, prompt.n_done = donor, n_done
        n_coming = self.to_load(prompt)
        for other, n_common in found.coming:
            if not self._trimmable and n_common >= n_done + MIN_SHARED:
                other.trail.want(other.n_done, n_common)
            n_coming = max(n_coming, other.will_give(n_common, trimmable=self._trimmable))
        return n_coming >= n_done + MIN_SHARED

    def to_load(self, prompt: RunningSequence) -> int:
        """How much of a prompt is being read from disk for others."""
        n_loaded = (other.will_load(prompt.common(other), trimmable=self._trimmable) for other in self._loading)
        return max(n_loaded, default=0)

    def _find(self, prompt: RunningSequence) -> Reusable:
        assert prompt.place is not None
        n_kept = self._kept.covers(prompt.place)
        if not self._shares:
            return Reusable(self._version, n_kept)
        known = prompt.found.in_common
        in_common = {
            other: known[other] if other in known else prompt.common(other) for other in (*self._begun, *self._done)
        }
        done = [(other, n) for other in self._done if (n := in_common[other]) >= n_kept + MIN_SHARED]
        donor, n_done = self._best(done, None, n_kept)
        coming = [(other, n) for other in self._begun if (n := in_common[other]) >= n_done + MIN_SHARED]
        return Reusable(self._version, n_done, donor, coming, in_common)

    def _best(
        self, others: Iterable[tuple[RunningSequence, int]], donor: RunningSequence | None, n_done: int
    ) -> tuple[RunningSequence | None, int]:
        """The best of a source and of others; another one has to give MIN_SHARED tokens more."""
        for other, n_common in others:
            if (n := other.gives(n_common, trimmable=self._trimmable)) >= n_done + MIN_SHARED:
                donor, n_done = other, n
        return donor, n_done
