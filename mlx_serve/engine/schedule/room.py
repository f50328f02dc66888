"""Memory limits: whether a job's KV cache fits beside the running ones, and how much kept prefixes may take.

Kept prefixes and idle models are dropped for jobs. Worker thread, except ``check_alone``. Knows no queue, no MLX.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from mlx_serve.engine.backend import ModelLoader
from mlx_serve.engine.schedule.loaded_models import LoadedModels, Slot
from mlx_serve.values import ApiError, Job


class Room:
    """The memory for KV caches of the loaded models. ``in_line`` returns the waiting jobs in their order."""

    def __init__(self, models: ModelLoader, loaded: LoadedModels, in_line: Callable[[], Sequence[Job]]) -> None:
        self._models = models
        self._loaded = loaded
        self._in_line = in_line
        # The bytes of kept prefixes at the last check.
        self._bounded_bytes = 0

    def has_memory(self, job: Job, slot: Slot) -> bool:
        """Whether the job's KV cache fits once ``make_room`` is called. Raises ApiError 400: it never fits."""
        self.check_alone(job, slot)
        while (limit := self._models.kv_limit(list(self._loaded.slots))) is not None:
            wanted = self._running_bytes() + slot.backend.kv_bytes([*slot.running, job])
            wanted -= slot.backend.kv_bytes(slot.running)
            if wanted <= limit:
                return True
            # Idle models are unloaded only when no running job could make room.
            idle = [name for name, other in self._loaded.slots.items() if other is not slot]
            if not idle or any(other.running for other in self._loaded.slots.values()):
                return False
            self._loaded.unload(idle[0])
        return True

    def check_alone(self, job: Job, slot: Slot) -> None:
        """Refuse a job that would not fit even alone. Raises ApiError 400. Any thread."""
        # Computed without other models in memory, because they can be unloaded.
        limit = self._models.kv_limit([job.model])
        if limit is None or (alone := slot.backend.kv_bytes([job])) <= limit:
            return
        if not (job.sampling.is_limit_default and self._shorten(job, slot, limit)):
            raise _never_fits(job, alone, limit)

    def _shorten(self, job: Job, slot: Slot, limit: int) -> bool:
        """Lower an output limit that the client did not set until the KV cache fits; False: not even one token fits."""
        whole = job.sampling

        def fits(n_output: int) -> bool:
            job.sampling = replace(whole, max_tokens=n_output)
            return slot.backend.kv_bytes([job]) <= limit

        # The first number of tokens that does not fit, minus one.
        most = bisect_left(range(1, whole.max_tokens + 1), True, key=lambda n_output: not fits(n_output))
        job.sampling = replace(whole, max_tokens=most) if most else whole
        return most > 0

    def _running_bytes(self) -> int:
        """The most bytes that all running KV caches can take."""
        return sum(slot.backend.kv_bytes(slot.running) for slot in self._loaded.slots.values() if slot.running)

    def _cached_bytes(self) -> int:
        return sum(slot.backend.cache_bytes for slot in self._loaded.slots.values())

    def bound_caches(self) -> None:
        """Enforce the limit after a step, which may have kept more prefixes."""
        if self._cached_bytes() > self._bounded_bytes:
            self.make_room()

    def make_room(self) -> None:
        """Evict the prefixes that don't fit beside the running jobs. A job that was inserted has claimed its own."""
        limit = self._models.kv_limit(list(self._loaded.slots))
        if limit is not None:
            self._shrink_caches(limit - self._running_bytes())

    def drop_kept(self, n_bytes: int) -> int:
        """Evict so many bytes of prefixes, or all. Returns how many bytes they were."""
        kept = self._cached_bytes()
        self._shrink_caches(kept - n_bytes)
        return kept - self._cached_bytes()

    def _shrink_caches(self, max_bytes: int) -> None:
        """Evict prefixes, those of the least recently used model first, and those that waiting jobs will use last."""
        excess = self._cached_bytes() - max(0, max_bytes)
        if excess > 0:
            waiting = self._in_line()
            for name, slot in self._loaded.slots.items():
                slot.backend.pin([job for job in waiting if job.model == name])
        for pinned, slot in product((False, True), self._loaded.slots.values()):
            if excess <= 0:
                break
            held = slot.backend.cache_bytes
            slot.backend.shrink_cache(max(0, held - excess), pinned=pinned)
            excess -= held - slot.backend.cache_bytes
        self._bounded_bytes = self._cached_bytes()


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
