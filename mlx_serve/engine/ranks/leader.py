"""Rank 0 of several: the scheduler's model loader and backends, which announce each action first (protocol.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from mlx_serve.engine.backend import ALIKE, Opening, is_last
from mlx_serve.engine.ranks.protocol import JointOpening, Store, job_data
from mlx_serve.values import Event, Job

if TYPE_CHECKING:  # they import MLX
    from mlx_serve.engine.cache.prefixes import PrefixCache
    from mlx_serve.engine.generate.batch import BatchBackend
    from mlx_serve.engine.ranks.group import Ranks

# How long all ranks sleep at a time when idle, because MLX waits for a message in a busy loop. A request that comes
# meanwhile waits until the others wake up. The sleep grows with the length of the pause.
FIRST_REST_S = 0.005
LONGEST_REST_S = 0.1


class Leader:
    """The scheduler's ModelLoader on rank 0. All ranks repeat its actions.

    ``on_leave`` is called when another rank was told to end.
    ``cache_bytes``: the limit for the kept prefixes of one model. None: limited by the memory alone.
    """

    def __init__(
        self, store: Store, ranks: Ranks, on_leave: Callable[[], None], cache_bytes: int | None = None
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._on_leave = on_leave
        self.cache_bytes = cache_bytes
        self._rest_s = FIRST_REST_S
        # Called by any thread; concerns this rank alone.
        self.tokenizer = store.tokenizer
        self.vocabulary = store.vocabulary
        self.weights_bytes = store.weights_bytes
        self.has_room = store.has_room
        self.kv_limit = store.kv_limit
        self.marks = store.marks
        self.memory = store.memory
        self.rest = store.rest
        self.release = store.release

    def open(self, name: str) -> Opening:
        self._store.check_room(name)
        self.post("open", name)
        opening = JointOpening(self._store, self._ranks, name)
        while (backend := opening.go_on()) is None:
            yield
            self.post("read", name)
        return LedBackend(self, name, backend, self._store.prefix_cache(name))

    def unload(self, name: str) -> None:
        self.post("unload", name)
        self._store.unload(name)

    def beat(self) -> float:
        """Tell idle ranks to wait, which also checks that they are alive. Returns the seconds until the next call."""
        rest_s = self._rest_s
        self.post("rest", rest_s)
        self._rest_s = min(2 * rest_s, LONGEST_REST_S)
        return rest_s

    def survives(self, error: Exception) -> bool:
        """Whether all ranks failed alike, so that they can go on."""
        return isinstance(error, ALIKE) and not self.lost

    def lose(self) -> None:
        """Stop sending: a rank is gone or out of step."""
        self._ranks.lost = True

    @property
    def lost(self) -> bool:
        """Whether the other ranks are lost."""
        return self._ranks.lost

    def close(self) -> None:
        """Unload all models, and end the other ranks."""
        if not self.lost:
            self.post("stop")
        self._store.close()

    def post(self, kind: str, *arguments: Any) -> None:
        """Announce the next action. Raises EngineLost."""
        self._rest_s = FIRST_REST_S
        if self._ranks.post([kind, *arguments]):
            self._on_leave()


class LedBackend:
    """Rank 0's Backend, which announces its actions. Messages refer to jobs by number; all figures are this rank's."""

    def __init__(self, leader: Leader, name: str, part: BatchBackend, kept: PrefixCache) -> None:
        self.capacity = part.capacity
        self._leader = leader
        self._name = name
        self._part = part
        self._kept = kept
        self._numbers: dict[Job, int] = {}
        self._n_jobs = 0

    @property
    def alone(self) -> str:
        return self._part.alone

    @property
    def undrafted(self) -> str:
        return self._part.undrafted

    @property
    def max_spare(self) -> int | None:
        return self._part.max_spare

    @max_spare.setter
    def max_spare(self, n_bytes: int | None) -> None:
        self._part.max_spare = n_bytes

    @property
    def n_decoding(self) -> int:
        return self._part.n_decoding

    @property
    def cache_bytes(self) -> int:
        return self._part.cache_bytes

    @property
    def n_cached(self) -> int:
        return self._part.n_cached

    @property
    def n_evicted(self) -> int:
        return self._part.n_evicted

    @property
    def n_drafted(self) -> int:
        return self._part.n_drafted

    @property
    def n_accepted(self) -> int:
        return self._part.n_accepted

    def kv_bytes(self, tokens: Mapping[Job, int]) -> int:
        """The bytes of the KV caches on this rank, which has the most layers of a pipeline."""
        return self._part.kv_bytes(tokens)

    def insert(self, job: Job) -> None:
        if job in self._numbers:
            self._leader.post("resume", self._name, self._numbers[job])
            self._part.insert(job)
            return
        self._n_jobs += 1
        self._leader.post("insert", self._name, self._n_jobs, job_data(job))
        self._part.insert(job)
        self._numbers[job] = self._n_jobs

    def remove(self, jobs: Collection[Job]) -> None:
        self._leader.post("remove", self._name, self._numbers_of(jobs))
        with self._failing_alike():
            self._part.remove(jobs)
        for job in jobs:
            self._numbers.pop(job, None)
        self._bound_cache()

    def pause(self, jobs: Collection[Job]) -> Sequence[tuple[Job, Event]]:
        self._leader.post("pause", self._name, self._numbers_of(jobs))
        with self._failing_alike():
            events = self._part.pause(jobs)
        self._forget_ended(events)
        self._bound_cache()
        return events

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        plan, late = self._part.plan_step(gap_s), self._part.late()
        self._leader.post("step", self._name, astuple(plan), self._numbers_of(late))
        with self._failing_alike():
            self._part.give_up(late)
            events = self._part.run_step(plan)
        self._forget_ended(events)
        self._bound_cache()
        return events

    def pin(self, jobs: Sequence[Job]) -> None:
        self._part.pin(jobs)

    def missing(self, job: Job) -> tuple[int, float]:
        return self._part.missing(job)

    def wanted_bytes(self, within_s: float) -> int:
        return self._part.wanted_bytes(within_s)

    def shrink_cache(self, max_bytes: int, *, pinned: bool = True) -> None:
        """Evict prefixes. The others then evict the same ones: their bytes differ, and they know no jobs in line."""
        if numbers := self._kept.shrink(max_bytes, pinned=pinned):
            self._leader.post("evict", self._name, numbers)

    def close(self) -> None:
        """Close the backends of all ranks."""
        if self._leader.lost:
            # The running MLX work never ends.
            return
        self._leader.post("close", self._name)
        self._part.close()

    @contextmanager
    def _failing_alike(self) -> Iterator[None]:
        """A failure ends this backend on all ranks; the scheduler opens a new one."""
        try:
            yield
        except ALIKE:
            self._kept.clear()
            self._leader.post("failed", self._name)
            raise

    def _forget_ended(self, events: Sequence[tuple[Job, Event]]) -> None:
        for job, event in events:
            if is_last(event):
                self._numbers.pop(job, None)

    def _bound_cache(self) -> None:
        max_bytes = self._leader.cache_bytes
        if max_bytes is not None and self.cache_bytes > max_bytes:
            self.shrink_cache(max_bytes)

    def _numbers_of(self, jobs: Collection[Job]) -> list[int]:
        return [self._numbers[job] for job in jobs if job in self._numbers]
