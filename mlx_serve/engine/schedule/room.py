"""Memory limits: whether a job's KV cache fits beside the running ones, which job to pause, what prefixes may be kept.

A job is admitted by what it is expected to use (charges.py). When the running ones have grown to the limit, kept
prefixes go first, those of paused jobs last; then jobs are paused. Worker thread, except ``check_alone``. Knows no MLX.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from mlx_serve.engine.backend import ModelLoader
from mlx_serve.engine.schedule.charges import tokens_expected, tokens_now, tokens_to_return
from mlx_serve.engine.schedule.loaded_models import LoadedModels, Slot
from mlx_serve.engine.schedule.queue import rank
from mlx_serve.values import ApiError, Job

# A 32nd of the limit is kept free of prefixes that no job in line will use. It is needed when a sequence that ends is
# copied beside the others, when arrays grow beside the old ones, and for free rows.
_SLACK = 32
# Most agents come back within so many seconds, with the result of a tool.
_SOON_S = 120.0
# A job continues a kept prefix if at most this share of its prompt is missing there.
_CONTINUES = 0.5
# Computing prompts that displace kept prefixes may take this share of the time.
_PART = 0.25


class Room:
    """The memory for KV caches of the loaded models. ``in_line`` returns the paused and waiting jobs in order."""

    def __init__(
        self,
        models: ModelLoader,
        loaded: LoadedModels,
        in_line: Callable[[], Sequence[Job]],
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._loaded = loaded
        self._in_line = in_line
        self._clock = clock
        # When a job may displace prefixes again.
        self._displaces_s = -math.inf

    def has_memory(self, job: Job, slot: Slot) -> bool:
        """Whether the job's KV cache fits once ``make_room`` is called. Raises ApiError 400: its prompt never fits.

        A job that would run alone always fits, or it would wait for ever.
        """
        if job not in slot.paused:
            self.check_alone(job, slot)
        while (limit := self._models.kv_limit(list(self._loaded.slots))) is not None:
            if self._expected_bytes(job) <= limit:
                return True
            # Idle models are unloaded only when no running job could make room.
            if any(other.running for other in self._loaded.slots.values()):
                return False
            if not self._unload_idle(slot):
                return True
        return True

    def displacing_s(self, job: Job, slot: Slot) -> float:
        """How long a job's prompt takes if prefixes must be evicted for it that others are likely to use soon; else 0.

        Where not all conversations fit, each turn would evict the prefix of another, and all of them would be computed
        again at every turn. So conversations whose prefixes are kept go first. Another one may take the place of one of
        them as soon as all such computations together have taken no more than a share of the time.
        """
        limit = self._models.kv_limit(list(self._loaded.slots))
        if limit is None or job in slot.paused:
            return 0.0
        room = limit - limit // _SLACK - self._expected_bytes(job)
        if self._cached_bytes() <= room:
            return 0.0
        self._pin()
        n_missing, seconds = slot.backend.missing(job)
        if n_missing <= len(job.prompt.tokens) * _CONTINUES:
            return 0.0
        wanted = sum(other.backend.wanted_bytes(_SOON_S) for other in self._loaded.slots.values())
        return 0.0 if wanted <= room else seconds

    @property
    def may_displace(self) -> bool:
        """Whether prefixes that others are likely to use soon may be evicted now."""
        is_idle = not any(slot.running for slot in self._loaded.slots.values())
        return is_idle or self._clock() >= self._displaces_s

    def displaced(self, seconds: float) -> None:
        """A job began whose prompt takes so long, and for which such prefixes are evicted."""
        self._displaces_s = self._clock() + seconds / _PART

    def check_alone(self, job: Job, slot: Slot) -> None:
        """Lower a job's output limit to what fits even alone. Raises ApiError 400: its prompt does not. Any thread."""
        # Computed without other models in memory, because they can be unloaded.
        limit = self._models.kv_limit([job.model])
        n_prompt, whole = len(job.prompt.tokens), job.sampling
        if limit is None or self._fits(job, n_prompt + whole.max_tokens, slot, limit):
            return
        # The first number of tokens that does not fit, minus one.
        outputs = range(1, whole.max_tokens + 1)
        most = bisect_left(outputs, True, key=lambda n: not self._fits(job, n_prompt + n, slot, limit))
        if not most:
            least = min(1, whole.max_tokens)
            prompts = range(1, n_prompt + 1)
            fits = bisect_left(prompts, True, key=lambda n: not self._fits(job, n + least, slot, limit))
            raise _never_fits(job, fits)
        job.sampling = replace(whole, max_tokens=most)

    def _fits(self, job: Job, n_tokens: int, slot: Slot, limit: int) -> bool:
        return slot.backend.kv_bytes({job: n_tokens}) <= limit

    def _expected_bytes(self, more: Job) -> int:
        """The bytes that all running jobs and one more will take if their outputs come to what is usual."""
        total = 0
        for name, slot in self._loaded.slots.items():
            usual = slot.outputs.expected
            tokens = {job: tokens_expected(job, usual) for job in slot.running}
            if name == more.model:
                tokens[more] = (tokens_to_return if more in slot.paused else tokens_expected)(more, usual)
            total += slot.backend.kv_bytes(tokens)
        return total

    def _bytes_now(self) -> int:
        """The bytes that all running jobs may take soon."""
        slots = self._loaded.slots.values()
        return sum(slot.backend.kv_bytes({job: tokens_now(job) for job in slot.running}) for slot in slots)

    def _unload_idle(self, slot: Slot | None = None) -> bool:
        """Unload an idle model other than that of ``slot``, if there is one."""
        idle = [name for name, other in self._loaded.slots.items() if other.is_idle and other is not slot]
        if idle:
            self._loaded.unload(idle[0])
        return bool(idle)

    def _cached_bytes(self) -> int:
        return sum(slot.backend.cache_bytes for slot in self._loaded.slots.values())

    def make_room(self) -> None:
        """Evict the prefixes that don't fit beside the running jobs. A job that was inserted has claimed its own."""
        limit = self._models.kv_limit(list(self._loaded.slots))
        if limit is not None:
            self._shrink_caches(limit - self._bytes_now(), limit // _SLACK)

    def allow_spare(self, active: Sequence[Slot]) -> None:
        """Tell the backends that will step how much memory is left, for rows that are free."""
        limit = self._models.kv_limit(list(self._loaded.slots))
        for slot in active:
            left = None if limit is None else max(0, limit - self._bytes_now() - self._cached_bytes())
            slot.backend.max_spare = left if left is None else left // len(active)

    def to_pause(self) -> Job | None:
        """Make room for what the running jobs have grown by. Returns the job to pause if prefixes are not enough.

        It is the one that is last in line, so that the others end sooner. A job that runs alone goes on.
        """
        while (limit := self._models.kv_limit(list(self._loaded.slots))) is not None:
            wanted = self._bytes_now()
            if wanted <= limit or not self._unload_idle():
                break
        else:
            return None
        self._shrink_caches(limit - wanted, limit // _SLACK)
        return None if wanted <= limit else self.last_in_line()

    def last_in_line(self) -> Job | None:
        """The running job that pauses first. None: fewer than two run."""
        running = [job for slot in self._loaded.slots.values() for job in slot.running if job.inputs is None]
        # Of equal ones the last.
        return max(reversed(running), key=rank) if len(running) > 1 else None

    def drop_kept(self, n_bytes: int) -> int:
        """Evict so many bytes of prefixes, or all. Returns how many bytes they were."""
        kept = self._cached_bytes()
        self._shrink_caches(kept - n_bytes)
        return kept - self._cached_bytes()

    def _pin(self) -> None:
        waiting = self._in_line()
        for name, slot in self._loaded.slots.items():
            slot.backend.pin([job for job in waiting if job.model == name])

    def _shrink_caches(self, max_bytes: int, slack: int = 0) -> None:
        """Evict prefixes, those of the least recently used model first, and those that jobs in line will use last.

        Of the others, ``slack`` bytes more are evicted.
        """
        most = {False: max(0, max_bytes - slack), True: max(0, max_bytes)}
        if self._cached_bytes() > most[False]:
            self._pin()
        for pinned, slot in product((False, True), self._loaded.slots.values()):
            excess = self._cached_bytes() - most[pinned]
            if excess > 0:
                slot.backend.shrink_cache(max(0, slot.backend.cache_bytes - excess), pinned=pinned)


def _never_fits(job: Job, n_fitting: int) -> ApiError:
    which, param = ("The prompt", "prompt") if job.inputs is None else ("The request's longest input", "input")
    return ApiError(
        400,
        f"{which} has {len(job.prompt.tokens)} tokens; {n_fitting} would fit into the memory for KV caches "
        "(--kv-cache-bytes, --memory-bytes).",
        param=param,
        code="kv_cache_exceeded",
    )
