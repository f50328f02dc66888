"""Which job runs when, on which model. HTTP threads submit, poll and cancel; one worker thread steps. Knows no text.

    submit --> waiting --(admit: a loaded model, a place in its batch, memory)--> running --> its events
                  |                                                                |
                  +------------------ cancel, time out, recover, stop -------------+

A job is looked at, inserted and only then taken off the queue: whatever raises in between, it is still in a list, and
its client is told. Only the worker thread touches the slots and their backends; the queue is shared, under the lock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Literal

from mlx_serve.core import ApiError, EngineStats, Event, Failed, Job, ModelStats
from mlx_serve.engine.backend import Backend, Models, Opening, is_last
from mlx_serve.engine.memory import MemoryUse
from mlx_serve.engine.waiting import Waiting

log = logging.getLogger(__name__)

# Told to a refused client: about as long as a short answer takes, so that its retry finds room.
RETRY_AFTER_S = 2
# A step can't be interrupted, and a place is to be free within a second of its client's hanging up.
IDLE_GAP_S = 0.5


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
    """What /health tells. ``models`` are those in memory, the most recently used last."""

    status: Literal["ok", "loading", "stopped"]
    models: tuple[str, ...]
    waiting: int
    running: int


@dataclass(slots=True)
class _Slot:
    """A model in memory."""

    backend: Backend
    running: dict[Job, None] = field(default_factory=dict)
    used_s: float = 0.0

    @property
    def n_prefilling(self) -> int:
        return len(self.running) - self.backend.n_decoding


class Scheduler:
    """First come, first served, but for priorities; several models take turns step by step."""

    def __init__(self, models: Models, limits: Limits = Limits(), clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._limits = limits
        self._clock = clock
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
            elif self._opening is not None and not self._served:
                # Later loads are part of the service: a load balancer that saw "loading" would take the server out.
                status = "loading"
            n_running = sum(len(slot.running) for slot in self._slots.values())
            return Health(status, tuple(self._slots), len(self._waiting), n_running)

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
        return ModelStats(name, n_waiting, len(running), self._models.weights_bytes(name), kv_bytes)

    # Called by the worker thread.

    def step(self) -> bool:
        """Drop what has ended, load and admit what there is room for, go a step on. False: there was nothing to do."""
        self._drop_cancelled()
        self._drop_late()
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
            for job, event in slot.backend.step(gap_s):
                if is_last(event):
                    slot.running.pop(job, None)
                job.events.put(event)
            self._stepping = None
            slot.used_s = self._clock()
        self._bound_caches()
        self._memory = self._models.memory()
        return bool(active) or self._opening is not None

    def wait(self, at_most_s: float | None = None) -> None:
        """Block until there is something to do, or for ``at_most_s`` seconds."""
        self._models.rest()
        self._memory = self._models.memory()
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

    def recover(self, error: ApiError) -> None:
        """After ``step`` raised: fail those whom it concerns, so that the next step can go on.

        A job on its way in fails alone; a model that can't be loaded fails all that wait for it; a step that failed
        fails its model's jobs, and the backend, whose state is unknown, is made anew.
        """
        job, self._admitting = self._admitting, None
        name, self._stepping = self._stepping, None
        if job is not None:
            self._fail(self._take(lambda other: other is job), error)
        elif name is not None:
            with self._changed:
                slot = self._slots.pop(name)
                # It may have failed to let go of some, with those of other models still to come.
                self._cancelled = True
            # Memory may be what was wanting.
            slot.backend.shrink_cache(0)
            self._fail(slot.running, error)
            self._make_anew(name)
        elif self._opening is not None:
            (name, _), self._opening = self._opening, None
            self._fail(self._take(lambda other: other.model == name), error)

    def _make_anew(self, name: str) -> None:
        """A backend on weights that are still in memory."""
        if self._opening is None:
            self._opening = (name, self._models.open(name))
        else:
            self._models.unload(name)

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
        """The worker's last act: nobody is left waiting, and backends are closed on the thread that made them."""
        self.stop()
        if self._opening is not None:
            self._opening[1].close()
            self._opening = None
        for slot in self._slots.values():
            self._fail(slot.running, _stopping())
            slot.running.clear()
        self._fail(self._take(lambda _: True), _stopping())
        with self._changed:
            slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.backend.close()

    # Letting go.

    def _drop_cancelled(self) -> None:
        with self._changed:
            if not self._cancelled:
                return
            self._cancelled = False
            self._waiting.take(lambda job: job.cancelled)
        self._remove(lambda job: job.cancelled)

    def _drop_late(self) -> None:
        """Fail the jobs whose time is over."""
        now = self._clock()
        wait_s, total_s = self._limits.queue_timeout_s, self._limits.request_timeout_s
        if wait_s:
            self._fail(self._take(lambda job: now - job.arrived_s > wait_s), _waited_too_long(wait_s))
        if total_s:
            self._fail(self._take(lambda job: now - job.arrived_s > total_s), _took_too_long(total_s))
            self._remove(lambda job: now - job.arrived_s > total_s, _took_too_long(total_s))

    def _remove(self, unwanted: Callable[[Job], bool], error: ApiError | None = None) -> None:
        """Take running jobs out of their batches, and tell them why. None: nobody listens any more."""
        for name, slot in self._slots.items():
            gone = [job for job in slot.running if unwanted(job)]
            if gone:
                self._stepping = name
                slot.backend.remove(gone)
                self._stepping = None
            for job in gone:
                del slot.running[job]
            if error is not None:
                # At once: the next model's backend may raise.
                self._fail(gone, error)

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
        try:
            next(opening)
        except StopIteration as opened:
            with self._changed:
                self._slots[name] = _Slot(opened.value, used_s=self._clock())
                self._opening = None
                self._served = True

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
            if job.model in held:
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
        self._take(lambda other: other is job)
        with self._changed:
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
        if limit is not None and (alone := self._kv_bytes(slot, [job])) > limit:
            raise _never_fits(job, alone, limit)

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
        headers=_retry(),
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


def _waited_too_long(limit_s: float) -> ApiError:
    return ApiError(
        503,
        f"The request waited {limit_s:g} seconds for its turn (--queue-timeout). Try again later.",
        type="server_error",
        code="queue_timeout",
        headers=_retry(),
    )


def _took_too_long(limit_s: float) -> ApiError:
    return ApiError(
        504,
        f"The request was not done after {limit_s:g} seconds (--request-timeout).",
        type="server_error",
        code="request_timeout",
    )


def _stopping() -> ApiError:
    return ApiError(503, "The server is shutting down.", type="server_error", headers=_retry())


def _retry() -> tuple[tuple[str, str], ...]:
    return (("Retry-After", str(RETRY_AFTER_S)),)
