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
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Literal

from mlx_serve.engine.backend import Backend, Models, Opening, is_last
from mlx_serve.engine.memory import MemoryUse
from mlx_serve.engine.schedule.deadlines import Deadlines, retry_headers
from mlx_serve.engine.schedule.heartbeat import Costs, Heartbeat, Overdue
from mlx_serve.engine.schedule.queue import Waiting
from mlx_serve.values import ApiError, EngineStats, Event, Failed, Job, ModelStats

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


@dataclass(slots=True)
class _Slot:
    """A model in memory."""

    backend: Backend
    running: dict[Job, None] = field(default_factory=dict)
    used_s: float = 0.0
    costs: Costs = field(default_factory=lambda: Costs(*_STEP_S))

    @property
    def n_prefilling(self) -> int:
        return len(self.running) - self.backend.n_decoding


class Scheduler:
    """First come, first served, but for priorities; several models take turns step by step."""

    def __init__(self, models: Models, limits: Limits = Limits(), clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._limits = limits
        self._clock = clock
        self._deadlines = Deadlines(limits.queue_timeout_s, limits.request_timeout_s)
        self._heart = Heartbeat(clock)
        self._load_costs = Costs(*_LOAD_S)
        self._other_costs = Costs(*_OTHER_S)
        self._changed = Condition()
        self._waiting = Waiting()
        # By name, the least recently used first. Only the worker thread writes; health() takes a copy.
        self._slots: dict[str, _Slot] = {}
        self._opening: tuple[str, Opening] | None = None
        # Whom an exception concerns: the job on its way in, or the model whose step it is.
        self._admitting: Job | None = None
        self._stepping: str | None = None
        # What kept prefixes held when they were last looked at.
        self._bounded_bytes = 0
        # Of the models that are no longer in memory.
        self._n_evicted_before = 0
        # Asked for on the worker thread, as all of MLX is.
        self._memory = MemoryUse()
        self._served = False
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
                raise _queue_full(self._limits.max_queue, len(jobs))
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
            elif self._opening is not None and not self._served:
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
        models = tuple(self._model_stats(name, slot, waiting[name]) for name, slot in slots.items())
        return EngineStats(
            waiting=waiting.total(),
            running=sum(model.running for model in models),
            models=models,
            kv_bytes=sum(model.kv_bytes for model in models),
            prefix_cache_bytes=sum(slot.backend.cache_bytes for slot in slots.values()),
            prefix_cache_entries=sum(slot.backend.n_cached for slot in slots.values()),
            evictions=self._n_evicted_before + sum(slot.backend.n_evicted for slot in slots.values()),
            weights_bytes=sum(model.weights_bytes for model in models),
            active_bytes=memory.active_bytes,
            peak_bytes=memory.peak_bytes,
            cache_bytes=memory.cache_bytes,
        )

    def _model_stats(self, name: str, slot: _Slot, n_waiting: int) -> ModelStats:
        # A copy at one go: the worker thread takes jobs out without the lock.
        running = list(slot.running)
        kv_bytes = slot.backend.kv_bytes(running) if running else 0
        weights_bytes, backend = self._models.weights_bytes(name), slot.backend
        return ModelStats(name, n_waiting, len(running), weights_bytes, kv_bytes, backend.capacity, backend.alone)

    # Called by the watch thread.

    def expire(self) -> None:
        """Tell the jobs whose time is over, and let go of them."""
        now = self._clock()
        with self._changed:
            jobs = [(job, True) for job in self._waiting] + [(job, False) for job in self._running()]
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
            dues += [self._deadlines.due_s(job, waits=False) for job in self._running()]
            next_s = max(0.0, min(dues, default=math.inf) - self._clock())
            if dues or not self._heart.is_resting:
                next_s = min(next_s, _LOOK_S)
            self._changed.wait(None if next_s == math.inf else next_s)

    def overdue(self) -> Overdue | None:
        """What the MLX thread is at, if it takes far longer than such work does. Any thread."""
        return self._heart.overdue()

    def _running(self) -> list[Job]:
        """Of all models, but for those whose clients were told already."""
        # Copies at one go: the worker thread takes jobs out without the lock.
        return [job for slot in self._slots.values() for job in list(slot.running) if not job.cancelled]

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
        self._unload_expired()
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
        self._bound_caches()
        self._memory = self._models.memory()
        return bool(active) or self._opening is not None

    def wait(self, at_most_s: float | None = None) -> None:
        """Block until there is something to do, or for ``at_most_s`` seconds."""
        self._models.rest()
        self._memory = self._models.memory()
        self._heart.rest()
        timeouts = [timeout_s for timeout_s in (at_most_s, self._next_expiry_s()) if timeout_s is not None]
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._cancelled or self._stopped, min(timeouts, default=None)
            )

    def load(self, name: str) -> None:
        """Load a model now, with nothing else going on. Raises ApiError."""
        self._open(name)
        while self._opening is not None:
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
            self._make_anew(name)
        elif self._opening is not None:
            (name, _), self._opening = self._opening, None
            self._fail(self._take(lambda other: other.model == name), error)
        else:
            return False
        return True

    def _make_anew(self, name: str) -> None:
        """A backend on weights that are still in memory."""
        if self._opening is None:
            self._opening = (name, self._models.open(name))
        else:
            self._models.unload(name)

    def stop(self, error: ApiError | None = None) -> None:
        """Refuse new jobs and tell all others at once; those that run get ``error``, or that the server stops.

        Any thread may call it; the worker's loop then ends.
        """
        with self._changed:
            self._stopped = True
            waiting = list(self._waiting)
            running = self._running()
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
        with self._changed:
            opening, self._opening = self._opening, None
            slots, self._slots = self._slots, {}
        if opening is not None:
            opening[1].close()
        for slot in slots.values():
            slot.backend.close()

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

    # Models.

    def _open(self, name: str) -> None:
        """Begin to load a model; whoever has to give room for it must be idle by now."""
        # Nobody has to go for a model that is too large by itself: opening it says so.
        fits_alone = self._models.has_room([name])
        for other in list(self._slots):
            if not fits_alone or self._models.has_room([*self._slots, name]):
                break
            if not self._slots[other].running:
                self._unload(other)
        with self._changed:
            self._opening = (name, self._models.open(name))

    def _may_open(self, name: str) -> bool:
        """Whether there is room for a model once the idle ones are gone."""
        busy = [other for other, slot in self._slots.items() if slot.running]
        return self._models.has_room([*busy, name]) or not busy

    def _continue_opening(self) -> None:
        if self._opening is None:
            return
        name, opening = self._opening
        self._heart.turn_to(f"the loading of {name}", self._load_costs)
        try:
            next(opening)
        except StopIteration as opened:
            with self._changed:
                self._slots[name] = _Slot(opened.value, used_s=self._clock())
                self._opening = None
                self._served = True
        self._heart.turn_to("admission", self._other_costs)

    def _unload(self, name: str) -> None:
        with self._changed:
            slot = self._slots.pop(name)
            self._n_evicted_before += slot.backend.n_evicted
        slot.backend.close()
        # Not a name more may hold it, or the old model stays in memory beside the new one.
        del slot
        self._models.unload(name)

    def _unload_expired(self) -> None:
        ttl_s, now = self._limits.model_ttl_s, self._clock()
        if not ttl_s:
            return
        for name, slot in list(self._slots.items()):
            if not slot.running and now - slot.used_s >= ttl_s:
                log.info("unloading %s: not used for %g s", name, ttl_s)
                self._unload(name)

    def _next_expiry_s(self) -> float | None:
        if not self._limits.model_ttl_s or not self._slots:
            return None
        first = min(slot.used_s for slot in self._slots.values())
        return max(0.0, first + self._limits.model_ttl_s - self._clock())

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
        if not self._has_memory(job, slot):
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
        if self._opening is not None:
            return "held"
        if not self._may_open(name):
            return "blocked"
        self._open(name)
        return "held"

    def _has_memory(self, job: Job, slot: _Slot) -> bool:
        """Whether the job's KV cache fits beside those that run; kept prefixes yield. Raises ApiError 400: never."""
        self._check_alone(job, slot)
        while (limit := self._models.kv_limit(list(self._slots))) is not None:
            wanted = self._running_bytes() + self._kv_bytes(slot, [*slot.running, job])
            wanted -= self._kv_bytes(slot, slot.running)
            if wanted <= limit:
                self._shrink_caches(limit - wanted)
                return True
            # Idle models go only when there is nothing to wait for.
            idle = [name for name, other in self._slots.items() if other is not slot]
            if not idle or any(other.running for other in self._slots.values()):
                return False
            self._unload(idle[0])
        return True

    def _check_alone(self, job: Job, slot: _Slot) -> None:
        # With no other model in memory: those can go.
        limit = self._models.kv_limit([job.model])
        if limit is None or (alone := self._kv_bytes(slot, [job])) <= limit:
            return
        if not (job.sampling.is_limit_default and self._shorten(job, slot, limit)):
            raise _never_fits(job, alone, limit)

    def _shorten(self, job: Job, slot: _Slot, limit: int) -> bool:
        """Lower a limit on the output that no client set to what its KV cache has room for; False: there is none."""
        whole = job.sampling

        def fits(n_output: int) -> bool:
            job.sampling = replace(whole, max_tokens=n_output)
            return self._kv_bytes(slot, [job]) <= limit

        # The first number of tokens that does not fit, less one.
        most = bisect_left(range(1, whole.max_tokens + 1), True, key=lambda n_output: not fits(n_output))
        job.sampling = replace(whole, max_tokens=most) if most else whole
        return most > 0

    def _running_bytes(self) -> int:
        """What the KV caches of all that runs can come to."""
        return sum(self._kv_bytes(slot, slot.running) for slot in self._slots.values() if slot.running)

    def _kv_bytes(self, slot: _Slot, jobs: Collection[Job]) -> int:
        return slot.backend.kv_bytes(jobs) * self._models.kv_copies

    def _cached_bytes(self) -> int:
        return sum(slot.backend.cache_bytes for slot in self._slots.values())

    def _bound_caches(self) -> None:
        """After a step may have kept more prefixes."""
        if self._cached_bytes() > self._bounded_bytes:
            limit = self._models.kv_limit(list(self._slots))
            if limit is not None:
                self._shrink_caches(limit - self._running_bytes())

    def _shrink_caches(self, max_bytes: int) -> None:
        """The least recently used model's prefixes go first."""
        excess = self._cached_bytes() - max(0, max_bytes)
        for slot in self._slots.values():
            if excess <= 0:
                break
            held = slot.backend.cache_bytes
            slot.backend.shrink_cache(max(0, held - excess))
            excess -= held - slot.backend.cache_bytes
        self._bounded_bytes = self._cached_bytes()

    def _check_size(self, jobs: Iterable[Job]) -> None:
        """What can't ever fit is refused before it queues, when its model is in memory and can tell."""
        with self._changed:
            slots = dict(self._slots)
        for job in jobs:
            if job.model in slots:
                self._check_alone(job, slots[job.model])

    def _gap_s(self, active: Sequence[_Slot]) -> float:
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
        headers=retry_headers(),
    )


def _never_fits(job: Job, wanted: int, limit: int) -> ApiError:
    n_prompt, n_output = len(job.prompt.tokens), job.sampling.max_tokens
    wants = f"{n_prompt} prompt tokens and 'max_tokens' {n_output}"
    if job.inputs is not None:
        wants = f"its longest input has {n_prompt} tokens"
    return ApiError(
        400,
        f"The request needs {wanted} bytes of KV cache ({wants}); this server has {limit} (--kv-cache-bytes, "
        "--memory-bytes). Ask for fewer tokens.",
        param="max_tokens" if job.inputs is None else "input",
        code="kv_cache_exceeded",
    )


def _stopping() -> ApiError:
    return ApiError(503, "The server is shutting down.", type="server_error", headers=retry_headers())
