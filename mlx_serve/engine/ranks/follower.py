"""The ranks other than 0. They execute the actions that rank 0 announces, on their part of the model (protocol.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_serve.engine.backend import ALIKE, EngineLost, StepPlan, is_last
from mlx_serve.engine.ranks.protocol import JointOpening, Store, job_of
from mlx_serve.values import ApiError, Event, Job

if TYPE_CHECKING:  # they import MLX
    from mlx_serve.engine.generate.batch import BatchBackend
    from mlx_serve.engine.ranks.group import Ranks

log = logging.getLogger(__name__)


class Follower:
    """Executes rank 0's actions on another rank."""

    def __init__(self, store: Store, ranks: Ranks) -> None:
        self._store = store
        self._ranks = ranks
        self._opening: JointOpening | None = None
        self._parts: dict[str, _Part] = {}
        self._actions: dict[str, Callable[..., None]] = {
            "rest": time.sleep,
            "open": self._open,
            "read": self._go_on,
            "unload": store.unload,
            "insert": lambda name, *arguments: self._parts[name].insert(*arguments),
            "resume": lambda name, number: self._parts[name].resume(number),
            "pause": lambda name, *arguments: self._parts[name].pause(*arguments),
            "remove": lambda name, *arguments: self._parts[name].remove(*arguments),
            "step": lambda name, *arguments: self._parts[name].step(*arguments),
            "evict": lambda name, numbers: self._store.prefix_cache(name).evict(numbers),
            "failed": self._fail,
            "close": lambda name: self._parts.pop(name).backend.close(),
        }

    def run(self) -> None:
        """Follow until rank 0 announces its end. Raises EngineLost."""
        while (message := self._ranks.receive())[0] != "stop":
            kind, *arguments = message
            self._actions[kind](*arguments)
        for part in self._parts.values():
            part.backend.close()
        self._parts.clear()
        self._store.close()

    def _fail(self, name: str) -> None:
        # Rank 0's scheduler opens a new backend.
        del self._parts[name]
        self._store.prefix_cache(name).clear()

    def _open(self, name: str) -> None:
        self._opening = JointOpening(self._store, self._ranks, name)
        self._go_on(name)

    def _go_on(self, name: str) -> None:
        assert self._opening is not None
        try:
            backend = self._opening.go_on()
        except ApiError as error:
            # Rank 0 has the same error, and its scheduler tells the clients.
            log.warning("%s", error.message)
            self._opening = None
            return
        if backend is not None:
            self._parts[name], self._opening = _Part(backend), None


class _Part:
    """The backend of a rank other than 0, and its jobs by number. Their events are not used."""

    def __init__(self, backend: BatchBackend) -> None:
        self.backend = backend
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}
        self._failed = False

    def insert(self, number: int, data: dict[str, Any]) -> None:
        job = job_of(data)
        try:
            self.backend.insert(job)
        except (ApiError, *ALIKE):
            # Rank 0 has the same error and tells the client.
            return
        self._jobs[number] = job
        self._numbers[job] = number

    def remove(self, numbers: Sequence[int]) -> None:
        jobs = [self._jobs[number] for number in numbers]
        with self._failing_alike():
            self.backend.remove(jobs)
        for job in jobs:
            self._forget(job)

    def resume(self, number: int) -> None:
        with self._failing_alike():
            self.backend.insert(self._jobs[number])

    def pause(self, numbers: Sequence[int]) -> None:
        events: Sequence[tuple[Job, Event]] = []
        with self._failing_alike():
            events = self.backend.pause([self._jobs[number] for number in numbers])
        self._forget_ended(events)

    def step(self, plan: Sequence[Any], late: Sequence[int]) -> None:
        jobs = [self._jobs[number] for number in late]
        events: Sequence[tuple[Job, Event]] = []
        with self._failing_alike():
            self.backend.give_up(jobs)
            events = self.backend.run_step(StepPlan(*plan))
        self._forget_ended(events)

    @contextmanager
    def _failing_alike(self) -> Iterator[None]:
        """A failure here must occur on rank 0 too, which announces it next. Otherwise the ranks are out of step."""
        if self._failed:
            raise EngineLost("a step failed here, but not on rank 0")
        try:
            yield
        except ALIKE:
            log.exception("a generation step failed")
            self._failed = True

    def _forget_ended(self, events: Sequence[tuple[Job, Event]]) -> None:
        for job, event in events:
            if is_last(event):
                self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[self._numbers.pop(job)]
