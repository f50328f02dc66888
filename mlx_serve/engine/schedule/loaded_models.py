"""The models in memory with the jobs that each runs, and the model that is being loaded.

Only the worker thread opens, unloads and changes them. Other threads read them under the scheduler's lock, which is
passed in. Knows no queue: the scheduler admits jobs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Condition

from mlx_serve.engine.backend import Backend, ModelLoader, Opening
from mlx_serve.engine.memory import Marks, MemoryState
from mlx_serve.engine.schedule.charges import tokens_expected
from mlx_serve.engine.schedule.heartbeat import Costs
from mlx_serve.engine.schedule.output_lengths import OutputLengths
from mlx_serve.values import EngineStats, Job, ModelStats

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Slot:
    """A model in memory. ``costs``: the durations of its steps so far.

    ``paused``: jobs that were taken out of the batch for lack of memory, and that the backend can continue.
    """

    backend: Backend
    costs: Costs
    used_s: float
    running: dict[Job, None] = field(default_factory=dict)
    paused: dict[Job, None] = field(default_factory=dict)
    outputs: OutputLengths = field(default_factory=OutputLengths)

    @property
    def is_idle(self) -> bool:
        """Whether no job needs the model."""
        return not self.running and not self.paused

    @property
    def n_prefilling(self) -> int:
        """Jobs whose prompts are not finished."""
        return len(self.running) - self.backend.n_decoding


class LoadedModels:
    """``slots`` by name, the least recently used first. ``opening``: the model that is being loaded.

    ``served``: whether any model has been ready. ``new_costs`` makes the record of a new model's step durations.
    """

    def __init__(
        self, models: ModelLoader, lock: Condition, clock: Callable[[], float], new_costs: Callable[[], Costs]
    ) -> None:
        self._models = models
        self._lock = lock
        self._clock = clock
        self._new_costs = new_costs
        self.slots: dict[str, Slot] = {}
        self.opening: tuple[str, Opening] | None = None
        self.served = False
        # The counts of models that are no longer in memory: evictions, drafted and accepted tokens.
        self._before = (0, 0, 0)
        # Evictions that were counted before a model's backend failed. Its new backend has the same prefixes, and counts
        # them again.
        self._n_known: dict[str, int] = {}
        # How often a job was paused.
        self.n_preemptions = 0

    def begun(self) -> list[Job]:
        """All running and paused jobs, except those whose clients already have an error. Any thread, with the lock."""
        # Atomic copies, because the worker thread removes jobs without the lock.
        jobs = [job for slot in self.slots.values() for job in (*list(slot.running), *list(slot.paused))]
        return [job for job in jobs if not job.cancelled]

    def paused(self) -> list[Job]:
        """All paused jobs. Any thread, with the lock."""
        return [job for slot in self.slots.values() for job in list(slot.paused)]

    def open(self, name: str) -> None:
        """Begin to load a model. The models that must be unloaded for it must be idle."""
        # Do not unload others for a model that is too large by itself: opening it raises the error.
        fits_alone = self._models.has_room([name])
        for other in list(self.slots):
            if not fits_alone or self._models.has_room([*self.slots, name]):
                break
            if self.slots[other].is_idle:
                self.unload(other)
        with self._lock:
            self.opening = (name, self._models.open(name))

    def may_open(self, name: str) -> bool:
        """Whether a model fits once the idle ones are unloaded."""
        busy = [other for other, slot in self.slots.items() if not slot.is_idle]
        return self._models.has_room([*busy, name]) or not busy

    def go_on(self, name: str, opening: Opening) -> None:
        """Load the next slice of the model that is being loaded. Raises ApiError."""
        try:
            next(opening)
        except StopIteration as opened:
            with self._lock:
                self.slots[name] = Slot(opened.value, self._new_costs(), self._clock())
                self._before = _sums([self._before, (-self._n_known.pop(name, 0), 0, 0)])
                self.opening = None
                self.served = True

    def make_anew(self, name: str, failed: Slot) -> None:
        """Make a new backend for weights that are still in memory."""
        self._before = _sums([self._before, _counts(failed)])
        if self.opening is None:
            self._n_known[name] = failed.backend.n_evicted
            self.opening = (name, self._models.open(name))
        else:
            self._models.unload(name)

    def unload(self, name: str) -> None:
        """Unload a model and its kept prefixes."""
        with self._lock:
            slot = self.slots.pop(name)
            self._before = _sums([self._before, _counts(slot)])
        slot.backend.close()
        # No other reference may remain, or the old model stays in memory beside the new one.
        del slot
        self._models.unload(name)

    def unload_unused(self, ttl_s: float) -> None:
        """Unload the models that were not used for ``ttl_s`` seconds. 0: never."""
        now = self._clock()
        if not ttl_s:
            return
        for name, slot in list(self.slots.items()):
            if slot.is_idle and now - slot.used_s >= ttl_s:
                log.info("unloading %s: not used for %g s", name, ttl_s)
                self.unload(name)

    def next_expiry_s(self, ttl_s: float) -> float | None:
        """Seconds until ``unload_unused`` may unload a model; None: never."""
        if not ttl_s or not self.slots:
            return None
        first = min(slot.used_s for slot in self.slots.values())
        return max(0.0, first + ttl_s - self._clock())

    def close(self) -> None:
        """Close all backends, and cancel a load in progress."""
        with self._lock:
            opening, self.opening = self.opening, None
            slots = list(self.slots.values())
            self.slots.clear()
        if opening is not None:
            opening[1].close()
        for slot in slots:
            slot.backend.close()

    def marks(self) -> Marks | None:
        """What the process may hold with these models and the one that is being loaded."""
        opening = self.opening
        return self._models.marks({*self.slots, *([opening[0]] if opening is not None else [])})

    def stats(self, slots: dict[str, Slot], waiting: Counter[str], memory: MemoryState) -> EngineStats:
        """The figures for a copy of ``slots``. Any thread."""
        use, marks = memory.use, memory.marks
        models = tuple(self._model_stats(name, slot, waiting[name]) for name, slot in slots.items())
        evictions, drafted, accepted = _sums([self._before, *map(_counts, slots.values())])
        return EngineStats(
            waiting=waiting.total(),
            running=sum(model.running for model in models),
            models=models,
            kv_bytes=sum(model.kv_bytes for model in models),
            prefix_cache_bytes=sum(slot.backend.cache_bytes for slot in slots.values()),
            prefix_cache_entries=sum(slot.backend.n_cached for slot in slots.values()),
            paused=sum(model.paused for model in models),
            preemptions=self.n_preemptions,
            evictions=evictions,
            drafted=drafted,
            accepted=accepted,
            weights_bytes=sum(model.weights_bytes for model in models),
            active_bytes=use.active_bytes,
            peak_bytes=use.peak_bytes,
            cache_bytes=use.cache_bytes,
            wired_limit_bytes=use.wired_limit_bytes,
            footprint_bytes=use.footprint_bytes,
            soft_mark_bytes=0 if marks is None else marks.soft_bytes,
            hard_mark_bytes=0 if marks is None else marks.hard_bytes,
            pressure=memory.pressure,
        )

    def _model_stats(self, name: str, slot: Slot, n_waiting: int) -> ModelStats:
        # An atomic copy, because the worker thread removes jobs without the lock.
        running = list(slot.running)
        backend = slot.backend
        return ModelStats(
            name=name,
            waiting=n_waiting,
            running=len(running),
            paused=len(slot.paused),
            weights_bytes=self._models.weights_bytes(name),
            kv_bytes=backend.kv_bytes({job: tokens_expected(job, slot.outputs.expected) for job in running}),
            capacity=backend.capacity,
            alone=backend.alone,
            undrafted=backend.undrafted,
            idle_s=0.0 if running else round(self._clock() - slot.used_s, 1),
        )


def _counts(slot: Slot) -> tuple[int, int, int]:
    return slot.backend.n_evicted, slot.backend.n_drafted, slot.backend.n_accepted


def _sums(counts: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    evictions, drafted, accepted = map(sum, zip(*counts, strict=True))
    return evictions, drafted, accepted
