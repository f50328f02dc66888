"""Which job runs when, on which model. HTTP threads submit, poll and cancel; one worker thread steps. Knows no text.

    submit --> waiting --(admit: a loaded model, a place in its batch, memory)--> running --> its events
                  |                                                                |
                  +------------------ cancel, time out, recover, stop -------------+

A job is looked at, inserted and only then taken off the queue: whatever raises in between, it is still in a list, and
its client is told. Only the worker thread touches backends and changes the slots; the queue is shared, under the lock.
A step may hang: whatever has to be answered in time (``expire``, ``cancel``, ``stop``, ``health``) never waits for one.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Literal

from mlx_serve.engine.backend import ModelLoader, is_last
from mlx_serve.engine.memory import MemoryUse
from mlx_serve.engine.schedule.deadlines import Deadlines, retry_headers
from mlx_serve.engine.schedule.heartbeat import Costs, Heartbeat, Overdue
from mlx_serve.engine.schedule.loaded_models import LoadedModels, Slot
from mlx_serve.engine.schedule.queue import Waiting, queue_full
from mlx_serve.engine.schedule.room import Room
from mlx_serve.values import ApiError, EngineStats, Event, Failed, Job

log = logging.getLogger(__name__)

# A step can't be interrupted, and a place is to be free within a second of its client's hanging up.
IDLE_GAP_S = 0.5
# Least time after which a piece of the MLX thread's work may be called overdue, and that of a first piece, of which
# nothing is known: a model's first step compiles kernels, its weights may come from a slow disk.
_STEP_S = (20.0, 120.0)
_LOAD_S = (120.0, 120.0)
_OTHER_S = (60.0, 60.0)
# While the MLX thread works, it is looked at so often.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the queue and of the pauses in a stream, in seconds; 0: no time-out."""

    max_queue: int = 128
    max_gap_s: float = 0.2
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    model_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Health:
    """What /health tells. ``models`` are those in memory, the most recently used last.

    "stalled": the MLX thread's present step takes far longer than steps do; ``reason`` says what it is at.
    """

    status: Literal["ok", "loading", "stalled", "stopped"]
    models: tuple[str, ...]
    waiting: int
    running: int
    reason: str = ""


class Scheduler:
    """First come, first served, but for priorities; several models take turns step by step."""

    def __init__(
        self, models: ModelLoader, limits: Limits = Limits(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = models
        self._limits = limits
        self._clock = clock
        self._deadlines = Deadlines(limits.queue_timeout_s, limits.request_timeout_s)
        self._heart = Heartbeat(clock)
        self._load_costs = Costs(*_LOAD_S)
        self._other_costs = Costs(*_OTHER_S)
        self._changed = Condition()
        self._waiting = Waiting()
        self._loaded = LoadedModels(models, self._changed, clock, lambda: Costs(*_STEP_S))
        self._slots = self._loaded.slots
        self._room = Room(models, self._loaded)
        # Whom an exception concerns: the job on its way in, or the model whose step it is.
        self._admitting: Job | None = None
        self._stepping: str | None = None
        # Asked for on the worker thread, as all of MLX is.
        self._memory = MemoryUse()
        self._stopped = False
        self._cancelled = False

    # Called by HTTP threads.

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request, all or none.

        Raises ApiError: 503 when the engine has stopped, 429 when ``max_queue`` would be passed, 400 when a job's KV
        cache could never fit.
        """
        self._check_size(jobs)
        with self._changed:
            if self._stopped:
                raise _stopping()
            if len(self._waiting) + len(jobs) > self._limits.max_queue:
                raise queue_full(self._limits.max_queue, len(jobs))
            now = self._clock()
            for job in jobs:
                job.arrived_s = now
            self._waiting.add(jobs)
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
            self._let_go(jobs)

    def health(self) -> Health:
        """A snapshot for /health."""
        with self._changed:
            overdue = self._heart.overdue()
            status: Literal["ok", "loading", "stalled", "stopped"] = "ok"
            if self._stopped:
                status = "stopped"
            elif overdue is not None:
                status = "stalled"
            elif self._loaded.opening is not None and not self._loaded.served:
                # Later loads are part of the service: a load balancer that saw "loading" would take the server out.
                status = "loading"
            n_running = sum(len(slot.running) for slot in self._slots.values())
            reason = str(overdue) if status == "stalled" else ""
            return Health(status, tuple(self._slots), len(self._waiting), n_running, reason)

    def stats(self) -> EngineStats:
        """A snapshot for the metrics."""
        with self._changed:
            slots = dict(self._slots)
            waiting = Counter(job.model for job in self._waiting)
            memory = self._memory
        return self._loaded.stats(slots, waiting, memory)

    # Called by the watch thread.

    def expire(self) -> None:
        """Tell the jobs whose time is over, and let go of them."""
        now = self._clock()
        with self._changed:
            jobs = [(job, True) for job in self._waiting] + [(job, False) for job in self._loaded.running()]
            late = {job: error for job, waits in jobs if (error := self._deadlines.fault(job, now, waits=waits))}
            self._let_go(late)
        for job, error in late.items():
            self._fail([job], error)

    def wait_for_deadline(self) -> None:
        """Block until a job's time may be over, or the MLX thread should be looked at."""
        with self._changed:
            if self._stopped:
                return
            dues = [self._deadlines.due_s(job, waits=True) for job in self._waiting]
            dues += [self._deadlines.due_s(job, waits=False) for job in self._loaded.running()]
            next_s = max(0.0, min(dues, default=math.inf) - self._clock())
            if dues or not self._heart.is_resting:
                next_s = min(next_s, _LOOK_S)
            self._changed.wait(None if next_s == math.inf else next_s)

    def overdue(self) -> Overdue | None:
        """What the MLX thread is at, if it takes far longer than such work does. Any thread."""
        return self._heart.overdue()

    def _let_go(self, jobs: Collection[Job]) -> None:
        """Under the lock: off the queue now, out of the batches after the step that is running."""
        if not jobs:
            return
        for job in jobs:
            job.cancelled = True
        self._waiting.take(lambda job: job.cancelled)
        self._cancelled = True
        self._changed.notify_all()

    # Called by the worker thread.

    def step(self) -> bool:
        """Drop what has ended, load and admit what there is room for, go a step on. False: there was nothing to do."""
        self._heart.turn_to("admission", self._other_costs)
        self._drop_cancelled()
        try:
            self._continue_opening()
        except ApiError as error:
            self.recover(error)
        self._admit()
        self._loaded.unload_unused(self._limits.model_ttl_s)
        active = [(name, slot) for name, slot in self._slots.items() if slot.running]
        gap_s = self._gap_s([slot for _, slot in active])
        for name, slot in active:
            self._stepping = name
            self._heart.turn_to(f"a step of {name}", slot.costs)
            for job, event in slot.backend.step(gap_s):
                if is_last(event):
                    slot.running.pop(job, None)
                job.events.put(event)
            self._stepping = None
            slot.used_s = self._clock()
        self._heart.turn_to("memory", self._other_costs)
        self._room.bound_caches()
        self._memory = self._models.memory()
        return bool(active) or self._loaded.opening is not None

    def wait(self, at_most_s: float | None = None) -> None:
        """Block until there is something to do, or for ``at_most_s`` seconds."""
        self._models.rest()
        self._memory = self._models.memory()
        self._heart.rest()
        due_s = self._loaded.next_expiry_s(self._limits.model_ttl_s)
        timeouts = [timeout_s for timeout_s in (at_most_s, due_s) if timeout_s is not None]
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._cancelled or self._stopped, min(timeouts, default=None)
            )

    def load(self, name: str) -> None:
        """Load a model now, with nothing else going on. Raises ApiError."""
        self._loaded.open(name)
        while self._loaded.opening is not None:
            self._continue_opening()
        self._memory = self._models.memory()

    def recover(self, error: ApiError) -> bool:
        """After ``step`` raised: fail those whom it concerns, so that the next step can go on. False: nobody.

        A job on its way in fails alone; a model that can't be loaded fails all that wait for it; a step that failed
        fails its model's jobs, and the backend, whose state is unknown, is made anew.
        """
        self._heart.turn_to("recovery", self._other_costs)
        job, self._admitting = self._admitting, None
        name, self._stepping = self._stepping, None
        if job is not None:
            self._fail(self._take(lambda other: other is job), error)
        elif name is not None:
            with self._changed:
                slot = self._slots.pop(name)
                # It may have failed to let go of some, with those of other models still to come.
                self._cancelled = True
            # First of all: what follows may raise in its turn.
            self._fail(slot.running, error)
            # Memory may be what was wanting.
            slot.backend.shrink_cache(0)
            self._loaded.make_anew(name)
        elif self._loaded.opening is not None:
            (name, _), self._loaded.opening = self._loaded.opening, None
            self._fail(self._take(lambda other: other.model == name), error)
        else:
            return False
        return True

    def stop(self, error: ApiError | None = None) -> None:
        """Refuse new jobs and tell all others at once; those that run get ``error``, or that the server stops.

        Any thread may call it; the worker's loop then ends.
        """
        with self._changed:
            self._stopped = True
            waiting = list(self._waiting)
            running = self._loaded.running()
            self._let_go([*waiting, *running])
            self._changed.notify_all()
        self._fail(waiting, _stopping())
        self._fail(running, error or _stopping())

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopped

    def close(self) -> None:
        """The worker's last act: nobody is left waiting, and backends are closed on the thread that made them."""
        self.stop()
        self._loaded.close()

    # Letting go.

    def _drop_cancelled(self) -> None:
        with self._changed:
            if not self._cancelled:
                return
            self._cancelled = False
        for name, slot in self._slots.items():
            gone = [job for job in slot.running if job.cancelled]
            if gone:
                self._stepping = name
                slot.backend.remove(gone)
                self._stepping = None
            for job in gone:
                del slot.running[job]

    def _continue_opening(self) -> None:
        if self._loaded.opening is None:
            return
        name, opening = self._loaded.opening
        self._heart.turn_to(f"the loading of {name}", self._load_costs)
        self._loaded.go_on(name, opening)
        self._heart.turn_to("admission", self._other_costs)

    # Admission.

    def _admit(self) -> None:
        """Take in, in order, what there is room for.

        A job that waits for memory holds back all behind it, or a stream of smaller ones would pass it by for ever;
        one that waits for its model's batch or load holds back that model's jobs alone.
        """
        held: set[str] = set()
        for job in self._in_line():
            if job.cancelled or job.model in held:
                continue
            self._admitting = job
            try:
                place = self._place(job)
            except ApiError as error:
                self.recover(error)
                continue
            self._admitting = None
            if place == "blocked":
                return
            if place == "held":
                held.add(job.model)

    def _place(self, job: Job) -> Literal["in", "held", "blocked"]:
        slot = self._slots.get(job.model)
        if slot is None:
            return self._place_unloaded(job.model)
        if len(slot.running) >= slot.backend.capacity:
            return "held"
        if not self._room.has_memory(job, slot):
            return "blocked"
        slot.backend.insert(job)
        # At one go, for ``stop`` and ``expire`` to find it in one of the two.
        with self._changed:
            self._waiting.take(lambda other: other is job)
            slot.running[job] = None
            # The most recently used one last.
            self._slots[job.model] = self._slots.pop(job.model)
        return "in"

    def _place_unloaded(self, name: str) -> Literal["held", "blocked"]:
        if self._loaded.opening is not None:
            return "held"
        if not self._loaded.may_open(name):
            return "blocked"
        self._loaded.open(name)
        return "held"

    def _check_size(self, jobs: Iterable[Job]) -> None:
        """What can't ever fit is refused before it queues, when its model is in memory and can tell."""
        with self._changed:
            slots = dict(self._slots)
        for job in jobs:
            if job.model in slots:
                self._room.check_alone(job, slots[job.model])

    def _gap_s(self, active: Sequence[Slot]) -> float:
        """Seconds of prefill that each model may do in this step."""
        n_prefilling = sum(slot.n_prefilling > 0 for slot in active)
        gap_s = self._limits.max_gap_s if any(slot.backend.n_decoding for slot in active) else IDLE_GAP_S
        return gap_s / max(1, n_prefilling)

    def _in_line(self) -> list[Job]:
        with self._changed:
            return list(self._waiting)

    def _take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Take the jobs that are wanted off the queue."""
        with self._changed:
            return self._waiting.take(wanted)

    @staticmethod
    def _fail(jobs: Collection[Job], error: ApiError) -> None:
        for job in jobs:
            job.events.put(Failed(job.index, error))


def _stopping() -> ApiError:
    return ApiError(503, "The server is shutting down.", type="server_error", headers=retry_headers())
