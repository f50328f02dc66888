"""The deadlines of jobs, and the errors for missing them. Knows no thread: the scheduler has the jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_serve.values import ApiError, Job

# The Retry-After of a refused client. It is about the time of a short answer, so a retry is likely to find room.
RETRY_AFTER_S = 2


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The seconds that a job may wait for its turn, and those that it may take in all. 0: no limit."""

    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0

    def due_s(self, job: Job, *, waits: bool) -> float:
        """The job's deadline, on the clock of its arrival. ``waits``: the job is still in the queue."""
        limits = [self.request_timeout_s, self.queue_timeout_s if waits else 0.0]
        return min((job.arrived_s + limit for limit in limits if limit), default=math.inf)

    def fault(self, job: Job, now: float, *, waits: bool) -> ApiError | None:
        """The error for the client if the job's deadline has passed; None: it has not."""
        age_s = now - job.arrived_s
        if waits and self.queue_timeout_s and age_s >= self.queue_timeout_s:
            return _waited_too_long(self.queue_timeout_s)
        if self.request_timeout_s and age_s >= self.request_timeout_s:
            return _took_too_long(self.request_timeout_s)
        return None


def retry_headers() -> tuple[tuple[str, str], ...]:
    """The headers of errors after which the same request may succeed."""
    return (("Retry-After", str(RETRY_AFTER_S)),)


def _waited_too_long(limit_s: float) -> ApiError:
    return ApiError(
        503,
        f"The request waited {limit_s:g} seconds for its turn (--queue-timeout). Try again later.",
        type="server_error",
        code="queue_timeout",
        headers=retry_headers(),
    )


def _took_too_long(limit_s: float) -> ApiError:
    return ApiError(
        504,
        f"The request was not done after {limit_s:g} seconds (--request-timeout).",
        type="server_error",
        code="request_timeout",
    )
