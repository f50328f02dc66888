"""The jobs of one request, from the queue to their end: submit, wait for events, trace, and cancel what is left.

A context manager, which cancels the jobs that still run at its end. Knows no text and no vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty
from types import TracebackType

from mlx_serve.engine.schedule.scheduler import Scheduler
from mlx_serve.metrics import Trace
from mlx_serve.values import ClientGone, Event, Failed, Job, Started, TokenEvent

# The longest time until the server notices that a client has left.
ALIVE_EVERY_S = 0.25


class RunningJobs:
    """``first``: the event that came while the jobs were submitted, if one did; ``next`` gives it out again."""

    def __init__(self, scheduler: Scheduler, jobs: Sequence[Job], alive: Callable[[], bool], trace: Trace) -> None:
        self._scheduler = scheduler
        self._jobs = {job.index: job for job in jobs}
        self._events = jobs[0].events
        self._alive = alive
        self._alive_at = time.monotonic()
        self._trace = trace
        self.first: Event | None = None

    def __contains__(self, event: Event) -> bool:
        """Whether an event is of a job that has not ended."""
        return event.index in self._jobs

    def __bool__(self) -> bool:
        """Whether a job has not ended."""
        return bool(self._jobs)

    def submit(self, wait_s: float) -> None:
        """Queue the jobs and wait, up to a limit, until the first of them runs or fails. Raises ApiError."""
        jobs = list(self._jobs.values())
        self._trace.submitting(jobs)
        try:
            self._scheduler.submit(jobs)
        except BaseException:
            self._trace.refused()
            raise
        self._trace.queued(jobs)
        try:
            self.first = self._wait(wait_s)
            if isinstance(self.first, Failed):
                self._trace.close(failed=True)
                raise self.first.error
        except BaseException:
            self.cancel()
            raise

    def next(self, timeout_s: float) -> Event | None:
        """The next event, or None after ``timeout_s``. Raises ApiError from a job that failed, or ClientGone."""
        event, self.first = self.first or self._wait(timeout_s), None
        if isinstance(event, Failed):
            raise event.error
        if event is not None and event in self:
            self._follow(event)
        return event

    def end(self, event: Event, reason: str) -> None:
        """A job has come to its end with this event."""
        self._trace.ended(reason)
        job = self._jobs.pop(event.index)
        if isinstance(event, TokenEvent) and not event.finish:
            # The job ended by a stop string, which the engine does not know.
            self._scheduler.cancel([job])

    def untaken(self) -> Iterator[Event]:
        """The events that unfinished jobs produced and nobody took."""
        with suppress(Empty):
            while True:
                event = self._events.get_nowait()
                if event in self:
                    yield event

    def cancel(self) -> None:
        """Free the places of the jobs that have not ended."""
        self._trace.close()
        if self._jobs:
            self._scheduler.cancel(list(self._jobs.values()))

    def __enter__(self) -> RunningJobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A client that has left is not a failure. Any other job that has not ended by now has failed.
        self._trace.close(failed=not isinstance(error, ClientGone | GeneratorExit))
        self.cancel()

    def _follow(self, event: Event) -> None:
        if isinstance(event, Started):
            job = self._jobs[event.index]
            texts = (job.prompt.tokens,) if job.inputs is None else job.inputs.tokens
            self._trace.admitted(sum(map(len, texts)), event.cached_tokens, looked_up=job.inputs is None)
        elif isinstance(event, TokenEvent):
            self._trace.token(event.index)

    def _wait(self, timeout_s: float) -> Event | None:
        """Wait for an event, and check regularly that the client is connected."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            event = self._scheduler.poll(self._events, min(left_s, ALIVE_EVERY_S))
            self._check_alive()
            if event is not None:
                return event
        return None

    def _check_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY_S:
            self._alive_at = now
            if not self._alive():
                raise ClientGone
