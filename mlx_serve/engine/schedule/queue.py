"""The waiting jobs, in the order in which they are served. Not thread-safe: the scheduler has the lock."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence

from mlx_serve.engine.schedule.deadlines import retry_headers
from mlx_serve.values import ApiError, Job

# The waiting time that equals one step of priority. It is long compared with usual waits, but no job waits for ever.
PRIORITY_STEP_S = 30.0
# Priorities beyond this count as this: 100 steps are 50 minutes.
MAX_PRIORITY = 100


def rank(job: Job) -> float:
    """The sort key, smallest first: the arrival time, shifted by the priority (smaller is earlier, as in vLLM)."""
    return job.arrived_s + PRIORITY_STEP_S * max(-MAX_PRIORITY, min(job.priority, MAX_PRIORITY))


class Waiting:
    """Jobs in the order of their rank; equal ranks in the order of arrival."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, jobs: Sequence[Job]) -> None:
        """Insert each job at its place."""
        for job in jobs:
            insort(self._jobs, job, key=rank)

    def take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Remove and return the wanted jobs."""
        taken = [job for job in self._jobs if wanted(job)]
        if taken:
            self._jobs = [job for job in self._jobs if not wanted(job)]
        return taken


def queue_full(max_queue: int, n_jobs: int) -> ApiError:
    """The error for a request whose ``n_jobs`` would exceed ``max_queue``."""
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
