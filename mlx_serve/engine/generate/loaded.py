"""What the backends of a loaded model have in common: kept prefixes, and a step whose prefill is measured in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from mlx_serve.engine.backend import ALIKE, StepPlan
from mlx_serve.engine.generate.token_choice import Loaded
from mlx_serve.values import Event, Failed, Job, internal_error

log = logging.getLogger(__name__)

T = TypeVar("T")

# MLX's words for a buffer that can't be had, and for whatever else goes wrong while a pass is computed.
_OF_MLX = (MemoryError, RuntimeError)


class LoadedBackend:
    """Lives on the worker thread."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    @property
    def alone(self) -> str:
        """Why jobs run one at a time; "": they need not."""
        return self._loaded.alone

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

    def attempt(self, job: Job, work: Callable[[], T]) -> T | Failed:
        """What ``work`` gives, which runs the prompt of one job alone: when it raises, that job fails and no other.

        With several ranks that holds only for what all of them raise alike; the rest goes on up, and ends them.
        """
        own = ALIKE if self._loaded.agree is not None else (*ALIKE, *_OF_MLX)
        try:
            return work()
        except own as error:
            log.exception("a prompt could not be run through the model")
            if isinstance(error, _OF_MLX):
                # Memory may be what was wanting.
                self.shrink_cache(0)
            return Failed(job.index, internal_error())

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        """Go on with all jobs: a token of each that decodes, and about ``gap_s`` seconds of prefill."""
        return self.run_step(self.plan_step(gap_s))

    def plan_step(self, gap_s: float) -> StepPlan:
        """What the next step does."""
        raise NotImplementedError

    def run_step(self, plan: StepPlan) -> Sequence[tuple[Job, Event]]:
        """A step as planned."""
        raise NotImplementedError
