"""What the backends of a loaded model have in common: kept prefixes, and a step whose prefill is measured in time."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from mlx_serve.engine.backend import ALIKE, Backend, StepPlan
from mlx_serve.engine.generate.token_choice import Loaded
from mlx_serve.values import Event, Failed, Job, internal_error

log = logging.getLogger(__name__)

T = TypeVar("T")

# MLX's words for a buffer that can't be had, and for whatever else goes wrong while a pass is computed.
_OF_MLX = (MemoryError, RuntimeError)


class LoadedBackend(Backend):
    """A backend whose steps are planned first, so that all ranks can follow one plan. Lives on the worker thread."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    @property
    def alone(self) -> str:
        return self._loaded.alone

    @property
    def cache_bytes(self) -> int:
        return self._loaded.prefix_cache.n_bytes

    @property
    def n_cached(self) -> int:
        return len(self._loaded.prefix_cache)

    @property
    def n_evicted(self) -> int:
        return self._loaded.prefix_cache.n_evicted

    def shrink_cache(self, max_bytes: int) -> None:
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
        return self.run_step(self.plan_step(gap_s))

    @abstractmethod
    def plan_step(self, gap_s: float) -> StepPlan:
        """What the next step does, judged by this rank's clock."""

    @abstractmethod
    def run_step(self, plan: StepPlan) -> Sequence[tuple[Job, Event]]:
        """A step as planned. It depends on nothing else that ranks could see differently."""

    @abstractmethod
    def late(self) -> list[Job]:
        """Jobs whose grammars have taken more time than they may."""

    @abstractmethod
    def give_up(self, jobs: Collection[Job]) -> None:
        """Fail the grammars of these jobs."""
