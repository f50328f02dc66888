"""Which job runs when, on which model. HTTP threads submit, poll and cancel; one worker thread steps. Knows no text.

    submit --> waiting --(admit: a loaded model, a place in its batch, memory)--> running --> its events
                  |                                                            |      ^
                  |                                        memory is short --> paused |--> back, with the next tokens
                  +------------------ cancel, time out, recover, stop -------------+

A job is paused when the running ones have grown to the limit of memory. Its place in line is that of its arrival. A job
leaves the queue only after it is inserted. If anything raises in between, the job is still in a list, and its client
gets the error. Only the worker thread uses backends and changes the slots; the queue is shared, under the lock.
A step may hang, so calls that must return in time (``expire``, ``cancel``, ``stop``, ``health``) never wait for one.
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

from mlx_serve.engine.backend import NO_GAP, ModelLoader, is_last
from mlx_serve.engine.schedule.deadlines import Deadlines, retry_headers
from mlx_serve.engine.schedule.heartbeat import Costs, Heartbeat, Overdue
from mlx_serve.engine.schedule.loaded_models import LoadedModels, Slot
from mlx_serve.engine.schedule.pressure import Pressure
from mlx_serve.engine.schedule.queue import Waiting, queue_full, rank
from mlx_serve.engine.schedule.room import Room
from mlx_serve.values import ApiError, EngineStats, Event, Failed, Job, TokenEvent

log = logging.getLogger(__name__)

# The least times after which the MLX thread's work counts as overdue. The second is for the first piece of a kind,
# which has nothing to compare: a first step compiles kernels, and weights may come from a slow disk.
_STEP_S = (20.0, 120.0)
_LOAD_S = (120.0, 120.0)
_OTHER_S = (60.0, 60.0)
# After so long without work, freed memory is returned to the system. A client often asks again at once, and returning
# many small pieces takes up to half a second.
_RELEASE_AFTER_S = 1.0
# How often a working MLX thread is checked.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the queue and of the pauses in a stream, in seconds; 0: no time-out."""

    max_queue: int = 128
    max_gap_s: float = 0.2
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    model_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Health:
    """The state for /health. ``models`` are those in memory, the most recently used last.

    "stalled": the MLX thread's current step takes far longer than usual; ``reason`` names the work.
    """

    status: Literal["ok", "loading", "stalled", "stopped"]
    models: tuple[str, ...]
    waiting: int
    running: int
    reason: str = ""


class Scheduler:
    """First come, first served, adjusted by priorities. Several models take turns, a step each."""

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
        self._room = Room(models, self._loaded, self._in_line, clock)
        # What an exception concerns: the job being admitted, or the model whose step is running.
        self._admitting: Job | None = None
        self._stepping: str | None = None
        self._pressure = Pressure(models, self._room.drop_kept, clock)
        # When the last work ended since freed memory was returned to the system. None: there was no work since.
        self._worked_s: float | None = clock()
        self._stopped = False
        self._cancelled = False
        # Models that somebody wants unloaded.
        self._unwanted: set[str] = set()

    # Called by HTTP threads.

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request, all or none.

        Raises ApiError: 503 when the engine has stopped, 429 when ``max_queue`` would be exceeded, 400 when a job's KV
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
        """Cancel jobs; no effect on ended ones. Their places are free after the running step."""
        with self._changed:
            self._let_go(jobs)

    def unload(self, name: str) -> bool:
        """Unload a model that nobody uses, after the running step. False: it is not in memory.

        Raises ApiError 409 while requests for it run or wait.
        """
        with self._changed:
            slot = self._slots.get(name)
            if slot is None:
                return False
            if not slot.is_idle or any(job.model == name for job in self._waiting):
                raise ApiError(409, f"Requests for {name} run or wait.", param="model", code="model_busy")
            self._unwanted.add(name)
            self._changed.notify_all()
            return True

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
                # Later loads are part of normal service: for "loading", a load balancer would remove the server.
                status = "loading"
            n_running = sum(len(slot.running) for slot in self._slots.values())
            reason = str(overdue) if status == "stalled" else ""
            return Health(status, tuple(self._slots), len(self._waiting), n_running, reason)

    def stats(self) -> EngineStats:
        """A snapshot for the metrics."""
        with self._changed:
            slots = dict(self._slots)
            waiting = Counter(job.model for job in self._waiting)
        return self._loaded.stats(slots, waiting, self._pressure.state)

    # Called by the watch thread.

    def expire(self) -> None:
        """Fail the jobs whose deadlines have passed."""
        now = self._clock()
        with self._changed:
            jobs = [(job, True) for job in self._waiting] + [(job, False) for job in self._loaded.begun()]
            late = {job: error for job, waits in jobs if (error := self._deadlines.fault(job, now, waits=waits))}
            self._let_go(late)
        for job, error in late.items():
            self._fail([job], error)

    def wait_for_deadline(self) -> None:
        """Block until the next deadline, or until the MLX thread should be checked."""
        with self._changed:
            if self._stopped:
                return
            dues = [self._deadlines.due_s(job, waits=True) for job in self._waiting]
            dues += [self._deadlines.due_s(job, waits=False) for job in self._loaded.begun()]
            next_s = max(0.0, min(dues, default=math.inf) - self._clock())
            if dues or not self._heart.is_resting:
                next_s = min(next_s, _LOOK_S)
            self._changed.wait(None if next_s == math.inf else next_s)

    def overdue(self) -> Overdue | None:
        """The MLX thread's current work, if it takes far longer than usual. Any thread."""
        return self._heart.overdue()

    def _let_go(self, jobs: Collection[Job]) -> None:
        """With the lock held: remove jobs from the queue now, and from the batches after the running step."""
        if not jobs:
            return
        for job in jobs:
            job.cancelled = True
        self._waiting.take(lambda job: job.cancelled)
        self._cancelled = True
        self._changed.notify_all()

    # Called by the worker thread.

    def step(self) -> bool:
        """Remove ended jobs, load models and admit jobs that fit, and run one step. False: there was nothing to do."""
        self._heart.turn_to("admission", self._other_costs)
        self._drop_cancelled()
        try:
            self._continue_opening()
        except ApiError as error:
            self.recover(error)
        self._admit()
        self._loaded.unload_unused(self._limits.model_ttl_s)
        self._unload_unwanted()
        active = [(name, slot) for name, slot in self._slots.items() if slot.running]
        gap_s = self._gap_s([slot for _, slot in active])
        self._room.allow_spare([slot for _, slot in active])
        for name, slot in active:
            self._stepping = name
            self._heart.turn_to(f"a step of {name}", slot.costs)
            self._deliver(slot, slot.backend.step(gap_s))
            self._stepping = None
            slot.used_s = self._clock()
        self._heart.turn_to("memory", self._other_costs)
        while (job := self._room.to_pause()) is not None:
            self._pause(job)
        self._pressure.relieve(self._loaded.marks())
        # Its cache becomes a kept prefix, which the next look drops if it must.
        if self._pressure.state.pressure == "hard" and (job := self._room.last_in_line()) is not None:
            self._pause(job)
        is_working = bool(active) or self._loaded.opening is not None
        if is_working:
            self._worked_s = self._clock()
        return is_working

    def wait(self, at_most_s: float | None = None) -> None:
        """Block until there is something to do, or for ``at_most_s`` seconds."""
        self._models.rest()
        release_s = None if self._worked_s is None else self._worked_s + _RELEASE_AFTER_S - self._clock()
        if release_s is not None and release_s <= 0:
            self._worked_s = release_s = None
            self._pressure.release(self._loaded.marks())
        self._heart.rest()
        due_s = self._loaded.next_expiry_s(self._limits.model_ttl_s)
        timeouts = [timeout_s for timeout_s in (at_most_s, due_s, release_s) if timeout_s is not None]
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._cancelled or self._unwanted or self._stopped, min(timeouts, default=None)
            )

    def load(self, name: str) -> None:
        """Load a model now, while nothing else runs. Raises ApiError."""
        self._loaded.open(name)
        while self._loaded.opening is not None:
            self._continue_opening()
        self._pressure.relieve(self._loaded.marks())

    def recover(self, error: ApiError) -> bool:
        """Fail the jobs that an exception of ``step`` concerns, so that the next step can run. False: there are none.

        A job that was being admitted fails alone. A model that can't be loaded fails all jobs that wait for it. A
        failed step fails the jobs of its model, and its backend, whose state is unknown, is replaced.
        """
        self._heart.turn_to("recovery", self._other_costs)
        job, self._admitting = self._admitting, None
        name, self._stepping = self._stepping, None
        if job is not None:
            self._fail(self._take(lambda other: other is job) or self._take_paused(job), error)
        elif name is not None:
            with self._changed:
                slot = self._slots.pop(name)
                # Removing the cancelled jobs may have failed midway, before those of other models.
                self._cancelled = True
            # Clients get their errors first, because the code below may raise too.
            self._fail([*slot.running, *slot.paused], error)
            # The error may be a lack of memory.
            slot.backend.shrink_cache(0)
            self._loaded.make_anew(name, slot)
        elif self._loaded.opening is not None:
            (name, _), self._loaded.opening = self._loaded.opening, None
            self._fail(self._take(lambda other: other.model == name), error)
        else:
            return False
        return True

    def stop(self, error: ApiError | None = None) -> None:
        """Refuse new jobs and fail all others at once. Running jobs get ``error``, by default that the server stops.

        Any thread may call this. The worker's loop then ends.
        """
        with self._changed:
            self._stopped = True
            waiting = list(self._waiting)
            begun = self._loaded.begun()
            self._let_go([*waiting, *begun])
            self._changed.notify_all()
        self._fail(waiting, _stopping())
        self._fail(begun, error or _stopping())

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopped

    def close(self) -> None:
        """The worker's last call: fails jobs that are left, and closes the backends on the thread that made them."""
        self.stop()
        self._loaded.close()

    # Delivering, pausing and removing.

    def _deliver(self, slot: Slot, events: Sequence[tuple[Job, Event]]) -> None:
        for job, event in events:
            if isinstance(event, TokenEvent):
                job.n_output += 1
            if is_last(event):
                slot.running.pop(job, None)
                slot.outputs.note(job.n_output)
            job.events.put(event)

    def _pause(self, job: Job) -> None:
        """Take a job out of its batch. Its client sees a pause."""
        slot = self._slots[job.model]
        self._stepping = job.model
        self._deliver(slot, slot.backend.pause([job]))
        self._stepping = None
        if job in slot.running:
            with self._changed:
                del slot.running[job]
                slot.paused[job] = None
                self._loaded.n_preemptions += 1
            log.info("memory for KV caches is short: a sequence of %s pauses", job.model)

    def _unload_unwanted(self) -> None:
        with self._changed:
            names, self._unwanted = self._unwanted, set()
        for name in names:
            # A request may have come since.
            if name in self._slots and self._slots[name].is_idle:
                log.info("unloading %s: somebody asked for it", name)
                self._loaded.unload(name)

    def _drop_cancelled(self) -> None:
        with self._changed:
            if not self._cancelled:
                return
            self._cancelled = False
        for name, slot in self._slots.items():
            gone = [job for job in (*slot.running, *slot.paused) if job.cancelled]
            if gone:
                self._stepping = name
                slot.backend.remove(gone)
                self._stepping = None
            for job in gone:
                slot.running.pop(job, None)
                slot.paused.pop(job, None)
                # A stop string ends an output by cancelling its job.
                slot.outputs.note(job.n_output)

    def _continue_opening(self) -> None:
        if self._loaded.opening is None:
            return
        name, opening = self._loaded.opening
        self._heart.turn_to(f"the loading of {name}", self._load_costs)
        self._loaded.go_on(name, opening)
        self._heart.turn_to("admission", self._other_costs)

    # Admission.

    def _admit(self) -> None:
        """Admit paused and waiting jobs in order, as far as they fit.

        A job that waits for memory holds back all later jobs; otherwise smaller ones could pass it for ever. Only
        paused jobs pass one that has not begun, because it may wait for their ends. A job that waits for its model's
        batch or load holds back only that model's jobs. One that may not displace kept prefixes yet holds back none.
        """
        held: set[str] = set()
        is_blocked = False
        for job in self._in_line():
            is_paused = self._is_paused(job)
            if job.cancelled or job.model in held or (is_blocked and not is_paused):
                continue
            self._admitting = job
            try:
                place = self._place(job)
            except ApiError as error:
                self.recover(error)
                continue
            self._admitting = None
            if place == "blocked":
                is_blocked = True
                if is_paused:
                    return
            if place == "held":
                held.add(job.model)

    def _place(self, job: Job) -> Literal["in", "held", "blocked", "passed"]:
        slot = self._slots.get(job.model)
        if slot is None:
            return self._place_unloaded(job.model)
        if len(slot.running) >= slot.backend.capacity:
            return "held"
        if self._is_short() or not self._room.has_memory(job, slot):
            return "blocked"
        displacing_s = self._room.displacing_s(job, slot)
        if displacing_s and not self._room.may_displace:
            return "passed"
        slot.backend.insert(job)
        if displacing_s:
            self._room.displaced(displacing_s)
        # One atomic change, so that ``stop`` and ``expire`` find the job in the queue or in the batch.
        with self._changed:
            self._waiting.take(lambda other: other is job)
            slot.paused.pop(job, None)
            slot.running[job] = None
            # The most recently used model is last.
            self._slots[job.model] = self._slots.pop(job.model)
        self._room.make_room()
        return "in"

    def _is_short(self) -> bool:
        """Whether nothing may start beside what runs. Alone, a job always may: nothing else could free memory."""
        return self._pressure.is_on and any(slot.running for slot in self._slots.values())

    def _place_unloaded(self, name: str) -> Literal["held", "blocked"]:
        if self._loaded.opening is not None:
            return "held"
        if not self._loaded.may_open(name):
            return "blocked"
        self._loaded.open(name)
        return "held"

    def _check_size(self, jobs: Iterable[Job]) -> None:
        """Refuse a job that can never fit before it is queued, if its model is in memory."""
        with self._changed:
            slots = dict(self._slots)
        for job in jobs:
            if job.model in slots:
                self._room.check_alone(job, slots[job.model])

    def _gap_s(self, active: Sequence[Slot]) -> float:
        """Seconds of prefill that each model may do in this step."""
        n_prefilling = sum(slot.n_prefilling > 0 for slot in active)
        gap_s = self._limits.max_gap_s if any(slot.backend.n_decoding for slot in active) else NO_GAP
        return gap_s / max(1, n_prefilling)

    def _in_line(self) -> list[Job]:
        """The jobs to admit, in order. Of equal rank, paused ones come first."""
        with self._changed:
            return sorted([*self._loaded.paused(), *self._waiting], key=rank)

    def _is_paused(self, job: Job) -> bool:
        slot = self._slots.get(job.model)
        return slot is not None and job in slot.paused

    def _take_paused(self, job: Job) -> list[Job]:
        """Remove and return a job if it is paused."""
        if not self._is_paused(job):
            return []
        with self._changed:
            del self._slots[job.model].paused[job]
        return [job]

    def _take(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Remove and return the wanted jobs of the queue."""
        with self._changed:
            return self._waiting.take(wanted)

    @staticmethod
    def _fail(jobs: Collection[Job], error: ApiError) -> None:
        for job in jobs:
            job.events.put(Failed(job.index, error))


def _stopping() -> ApiError:
    return ApiError(503, "The server is shutting down.", type="server_error", headers=retry_headers())
