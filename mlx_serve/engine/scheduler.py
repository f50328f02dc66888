"""Which job runs when. HTTP threads submit, poll and cancel; one worker thread steps. Knows no text and no HTTP.

    submit --> waiting --(admit: room in the backend)--> running --> its events
                  |                                        |
                  +---------- cancel, recover, stop -------+

A job is looked at, inserted and only then taken off the queue: whatever raises in between, it is still in a list, and
its client is told. Only the worker thread touches ``_running`` and the backend; the queue is shared, under the lock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Literal, Protocol

from mlx_serve.core import ApiError, Event, Failed, Job, Started, TokenEvent

log = logging.getLogger(__name__)

# Told to a refused client: about as long as a short answer takes, so that its retry finds room.
RETRY_AFTER_S = 2


class Backend(Protocol):
    """What generates tokens for one model. Made, stepped and closed on the worker thread.

    ``capacity`` is how many jobs it runs at a time.
    """

    capacity: int

    def insert(self, job: Job) -> int:
        """Take a job in; gives how many tokens of its prompt were cached. An ApiError concerns that job alone."""

    def remove(self, jobs: Collection[Job]) -> None:
        """Forget jobs, at whatever stage they are."""

    def step(self) -> Sequence[tuple[Job, TokenEvent | Failed]]:
        """Go one step on with all jobs; one that failed, or whose event has ``finish``, is forgotten.

        Raising concerns them all.
        """

    def close(self) -> None:
        """Give back what the backend holds."""


OpenBackend = Callable[[str], Backend]


@dataclass(frozen=True, slots=True)
class Health:
    """What /health tells. ``model`` is the one that is loaded."""

    status: Literal["ok", "loading", "stopped"]
    model: str | None
    waiting: int
    running: int


class Scheduler:
    """First come, first served, for one model at a time: a job for another one waits until the running ones end."""

    def __init__(self, open_backend: OpenBackend, *, max_queue: int) -> None:
        self._open_backend = open_backend
        self._max_queue = max_queue
        self._changed = Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        self._backend: Backend | None = None
        self._model: str | None = None
        self._admitting: Job | None = None
        self._loading = False
        self._served = False
        self._stopped = False
        self._cancelled = False

    # Called by HTTP threads.

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request, all or none.

        Raises ApiError: 503 when the engine has stopped, 429 when ``max_queue`` would be passed.
        """
        with self._changed:
            if self._stopped:
                raise _stopping()
            if len(self._waiting) + len(jobs) > self._max_queue:
                raise _queue_full(self._max_queue, len(jobs))
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def poll(self, events: SimpleQueue[Event], timeout_s: float) -> Event | None:
        """The next event of a request's jobs, or None when none came in time."""
        try:
            return events.get(timeout=timeout_s)
        except Empty:
            return None

    def cancel(self, jobs: Collection[Job]) -> None:
        """Let go of jobs; harmless for those that have ended. Their places are free after the step that is running."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._cancelled = True
            self._changed.notify_all()

    def health(self) -> Health:
        """A snapshot for /health."""
        with self._changed:
            status: Literal["ok", "loading", "stopped"] = "ok"
            if self._stopped:
                status = "stopped"
            elif self._loading:
                status = "loading"
            return Health(status, self._model, len(self._waiting), len(self._running))

    # Called by the worker thread.

    def step(self) -> bool:
        """Drop what was cancelled, admit what fits, go one step on. False: there was nothing to do."""
        self._drop_cancelled()
        self._admit()
        if not self._running or self._backend is None:
            return False
        for job, event in self._backend.step():
            if isinstance(event, Failed) or event.finish is not None:
                del self._running[job]
            job.events.put(event)
        return True

    def wait(self) -> None:
        """Block until there is something to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._cancelled or self._stopped)

    def load(self, model: str) -> None:
        """Make ``model`` the one that is served; the former one is let go first, so that both never fill memory."""
        # Later loads are part of the service: a load balancer that saw "loading" would take the server out.
        self._loading = not self._served
        try:
            if self._backend is not None:
                self._backend.close()
                # Not a name more may hold it, or the old model stays in memory beside the new one.
                self._backend, self._model = None, None
            self._backend = self._open_backend(model)
            self._model = model
            self._served = True
        finally:
            self._loading = False

    def recover(self, error: ApiError) -> None:
        """After ``step`` raised: fail those whom it concerns, so that the next step can go on.

        A job on its way in fails alone (when its model can't be loaded, with all that wait for that model); otherwise
        the whole batch fails, and the backend, whose state is unknown, is made anew.
        """
        job, self._admitting = self._admitting, None
        if job is None:
            self._fail(self._running, error)
            self._running.clear()
            self._backend = None
            self._model = None
        elif self._backend is None:
            self._fail(self._take(lambda other: other.model == job.model), error)
        else:
            self._fail(self._take(lambda other: other is job), error)

    def stop(self) -> None:
        """Refuse new jobs and fail all others. Any thread may call it; the worker's loop then ends."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopped

    def close(self) -> None:
        """The worker's last act: nobody is left waiting, and the backend is closed on the thread that made it."""
        self.stop()
        self._fail(self._running, _stopping())
        self._running.clear()
        self._fail(self._take(lambda _: True), _stopping())
        backend, self._backend, self._model = self._backend, None, None
        if backend is not None:
            backend.close()

    def _drop_cancelled(self) -> None:
        with self._changed:
            if not self._cancelled:
                return
            self._cancelled = False
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        gone = [job for job in self._running if job.cancelled]
        if gone and self._backend is not None:
            self._backend.remove(gone)
        for job in gone:
            del self._running[job]

    def _admit(self) -> None:
        while (job := self._head()) is not None:
            if job.model != self._model and self._running:
                return
            self._admitting = job
            try:
                cached_tokens = self._insert(job)
            except ApiError as error:
                self.recover(error)
                continue
            self._admitting = None
            if cached_tokens is None:
                return
            self._take(lambda other, job=job: other is job)  # type: ignore[misc]
            self._running[job] = None
            job.events.put(Started(job.index, cached_tokens))

    def _insert(self, job: Job) -> int | None:
        """Tokens cached, or None when the backend is full."""
        if self._backend is None or job.model != self._model:
            self.load(job.model)
        assert self._backend is not None
        if len(self._running) >= self._backend.capacity:
            return None
        return self._backend.insert(job)

    def _head(self) -> Job | None:
        with self._changed:
            return self._waiting[0] if self._waiting else None

    def _take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Take the jobs that are wanted off the queue."""
        with self._changed:
            taken = [job for job in self._waiting if wanted(job)]
            self._waiting = deque(job for job in self._waiting if not wanted(job))
        return taken

    @staticmethod
    def _fail(jobs: Collection[Job], error: ApiError) -> None:
        for job in jobs:
            job.events.put(Failed(job.index, error))


def _queue_full(max_queue: int, n_jobs: int) -> ApiError:
    if n_jobs > max_queue:
        return ApiError(
            400, f"The request asks for {n_jobs} sequences; this server queues at most {max_queue}.", param="n"
        )
    return ApiError(
        429,
        f"The server is busy: {max_queue} sequences are waiting already (--max-queue). Try again soon.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=(("Retry-After", str(RETRY_AFTER_S)),),
    )


def _stopping() -> ApiError:
    return ApiError(
        503, "The server is shutting down.", type="server_error", headers=(("Retry-After", str(RETRY_AFTER_S)),)
    )
