"""The jobs that wait, in the order in which they are to be served. Not thread-safe: the scheduler has the lock."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence

from mlx_serve.engine.schedule.deadlines import retry_headers
from mlx_serve.values import ApiError, Job

# What a step of priority is worth in waiting time: much beside an ordinary wait, but no job is passed by for ever.
PRIORITY_STEP_S = 30.0
# Beyond this all priorities are alike: 100 steps are 50 minutes.
MAX_PRIORITY = 100


def rank(job: Job) -> float:
    """Smaller is earlier: the time of arrival, moved by the priority (smaller is earlier too, as vLLM has it)."""
    return job.arrived_s + PRIORITY_STEP_S * max(-MAX_PRIORITY, min(job.priority, MAX_PRIORITY))


class Waiting:
    """Jobs by their rank; those of equal rank as they came."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, jobs: Sequence[Job]) -> None:
        """Each to its place."""
        for job in jobs:
            insort(self._jobs, job, key=rank)

    def take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Take out the jobs that are wanted."""
        taken = [job for job in self._jobs if wanted(job)]
        if taken:
            self._jobs = [job for job in self._jobs if not wanted(job)]
        return taken


def queue_full(max_queue: int, n_jobs: int) -> ApiError:
    """What the client of so many jobs gets when they would be more than ``max_queue``."""
    if n_jobs > max_queue:
        return ApiError(
            400, f"The request asks for {n_jobs} sequences; this server queues at most {max_queue}.", param="n"
        )
    return ApiError(
        429,
        f"The server is busy: {max_queue} sequences are waiting already (--max-queue). Try again soon.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=retry_headers(),
    )
