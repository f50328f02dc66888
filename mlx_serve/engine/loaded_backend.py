"""What the backends of a loaded model have in common: kept prefixes, and a step whose prefill is measured in time."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_serve.core import Event, Job
from mlx_serve.engine.choice import Loaded
from mlx_serve.engine.prefill_budget import StepPlan


class LoadedBackend:
    """Lives on the worker thread."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    @property
    def cache_bytes(self) -> int:
        """What kept prefixes hold."""
        return self._loaded.prefix_cache.n_bytes

    @property
    def n_cached(self) -> int:
        """Kept prefixes."""
        return len(self._loaded.prefix_cache)

    @property
    def n_evicted(self) -> int:
        """Prefixes given up for room."""
        return self._loaded.prefix_cache.n_evicted

    def shrink_cache(self, max_bytes: int) -> None:
        """Give up kept prefixes."""
        self._loaded.prefix_cache.shrink(max_bytes)

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        """Go on with all jobs: a token of each that decodes, and about ``gap_s`` seconds of prefill."""
        return self.run_step(self.plan_step(gap_s))

    def plan_step(self, gap_s: float) -> StepPlan:
        """What the next step does."""
        raise NotImplementedError

    def run_step(self, plan: StepPlan) -> Sequence[tuple[Job, Event]]:
        """A step as planned."""
        raise NotImplementedError
