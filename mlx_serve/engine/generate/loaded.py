"""The base of the backend: kept prefixes, and steps whose prefill is planned by time."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

from mlx_serve.engine.backend import ALIKE, NO_GAP, Backend, StepPlan
from mlx_serve.engine.cache.checkpoints import Trail, borders
from mlx_serve.engine.cache.prefix_tree import Ids, as_ids
from mlx_serve.engine.generate.token_choice import Loaded
from mlx_serve.values import Event, Failed, Job, internal_error

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long a step without work waits for the disk. New jobs and cancellations are seen between steps.
_DISK_WAIT_S = 0.02
# MLX raises these when it can't allocate a buffer, and for any other failure while a pass is computed.
_OF_MLX = (MemoryError, RuntimeError)


class LoadedBackend(Backend):
    """A backend that plans each step before running it, so that all ranks can follow one plan. Worker thread."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.max_spare: int | None = None
        # The jobs in line that have pinned prefixes, with their prompts as arrays.
        self._in_line: dict[Job, Ids] = {}
        # The jobs that were pinned last, and the state of the kept prefixes then.
        self._pinned: tuple[list[Job], int] = [], -1
        # A former backend that failed has left pins.
        loaded.prefix_cache.forget_jobs()

    @property
    def alone(self) -> str:
        return self._loaded.alone

    @property
    def undrafted(self) -> str:
        return self._loaded.undrafted

    @property
    def cache_bytes(self) -> int:
        return self._loaded.prefix_cache.n_bytes + self._loaded.prefix_cache.unkept_bytes

    @property
    def n_cached(self) -> int:
        return len(self._loaded.prefix_cache)

    @property
    def n_evicted(self) -> int:
        return self._loaded.prefix_cache.n_evicted

    def pin(self, jobs: Sequence[Job]) -> None:
        state = [*jobs], self._loaded.prefix_cache.version
        if state == self._pinned:
            return
        self._pinned = state
        known = self._in_line
        self._in_line = {
            job: known[job] if job in known else as_ids(job.prompt.tokens) for job in jobs if job.inputs is None
        }
        for job in known.keys() - self._in_line.keys():
            self._loaded.prefix_cache.unpin(job)
        for job, ids in self._in_line.items():
            self._loaded.prefix_cache.pin(job, ids, job.scope)

    def wanted_bytes(self, within_s: float) -> int:
        return self._loaded.prefix_cache.wanted_bytes(within_s)

    def shrink_cache(self, max_bytes: int, *, pinned: bool = True) -> None:
        prefixes = self._loaded.prefix_cache
        prefixes.shrink(max_bytes - prefixes.unkept_bytes, pinned=pinned)

    def ids_of(self, job: Job) -> Ids:
        """The prompt of a job that leaves the line."""
        ids = self.let_go(job)
        return as_ids(job.prompt.tokens) if ids is None else ids

    def let_go(self, job: Job) -> Ids | None:
        """End the pin of a job in line. Returns the tokens that it was for, if there was one."""
        self._loaded.prefix_cache.unpin(job)
        return self._in_line.pop(job, None)

    def hold(self, job: Job, ids: Ids) -> None:
        """Pin the prefix of a paused job, which has these tokens when it comes back."""
        self._in_line[job] = ids
        self._loaded.prefix_cache.pin(job, ids, job.scope)

    def forget(self, paused: MutableMapping[Job, Any], jobs: Collection[Job]) -> None:
        """Drop those of ``jobs`` that are ``paused``."""
        for job in jobs:
            if paused.pop(job, None) is not None:
                self.let_go(job)

    def plan_stops(
        self, trail: Trail, ids: Ids, scope: str, n_done: int, cache: Sequence[Any], waiting: Iterable[int] = ()
    ) -> None:
        """Choose where the slices of a prompt end, if its cache can't be cut back later. ``n_done`` tokens are done.

        They end where kept prefixes and ``waiting`` prompts part from it, at borders of turns, and at the prompt's end.
        ``waiting``: how many tokens it has in common with each of those.
        """
        if self._loaded.trimmable:
            return
        most = len(ids) - 1
        wanted = {self._loaded.prefix_cache.shared(ids, scope), *waiting}
        trail.resume(cache, n_done)
        trail.plan(
            n_done,
            {min(position, most) for position in wanted},
            {*borders(ids, n_done, self._loaded.control_ids), most},
        )

    def attempt(self, job: Job, work: Callable[[], T]) -> T | Failed:
        """The result of ``work``, which runs one job's prompt. If it raises, that job alone fails.

        With several ranks this holds only for errors that all ranks raise alike. Other errors propagate and end them.
        """
        own = ALIKE if self._loaded.agree is not None else (*ALIKE, *_OF_MLX)
        try:
            return work()
        except own as error:
            log.exception("a prompt could not be run through the model")
            if isinstance(error, _OF_MLX):
                # The error may be a lack of memory.
                self.shrink_cache(0)
            return Failed(job.index, internal_error())

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        if gap_s == NO_GAP:
            self.wait_for_disk(_DISK_WAIT_S)
        return self.run_step(self.plan_step(gap_s))

    @abstractmethod
    def wait_for_disk(self, timeout_s: float) -> None:
        """Wait a moment if this backend has nothing else to do."""

    @abstractmethod
    def plan_step(self, gap_s: float) -> StepPlan:
        """The plan of the next step, by this rank's clock."""

    @abstractmethod
    def run_step(self, plan: StepPlan) -> Sequence[tuple[Job, Event]]:
        """Run a planned step. It depends on nothing else that differs between ranks."""

    @abstractmethod
    def late(self) -> list[Job]:
        """Jobs whose grammars have used up their CPU time."""

    @abstractmethod
    def give_up(self, jobs: Collection[Job]) -> None:
        """Fail the grammars of these jobs."""
