"""The one thread that touches MLX. It steps the scheduler, and it never dies silently.

Every mlx array, stream and cache is made, used and dropped here: MLX streams belong to the thread that made them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Protocol

from mlx_serve.core import ApiError, internal_error
from mlx_serve.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class Peers(Protocol):
    """Other processes that take part in each step."""

    def beat(self) -> float:
        """Tell them that there is nothing to do. Seconds until they want to hear it again."""

    def survives(self, error: Exception) -> bool:
        """Whether a step that raised this has done no harm but to its own model's jobs."""

    def lose(self) -> None:
        """Say nothing to them any more."""


class Worker(Thread):
    """Runs the scheduler until it is stopped, then calls ``release`` to let all models go.

    ``ready`` is done when the first model is loaded, or could not be. With ``peers`` a step may fail in a way that
    can't be repaired, for nobody knows whether it failed for all of them: ``fault`` is then set, ``on_fault`` called,
    and the thread ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        first_model: str | None,
        release: Callable[[], None],
        *,
        peers: Peers | None = None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="mlx-worker")
        self._scheduler = scheduler
        self._first_model = first_model
        self._release = release
        self._peers = peers
        self._on_fault = on_fault
        self.ready: Future[None] = Future()
        self.fault: Exception | None = None

    def run(self) -> None:
        """The thread's life: load, step until stopped, close."""
        try:
            self._load()
            while not self._scheduler.stopped:
                self._step()
        finally:
            self._scheduler.close()
            self._release()

    def stop(self) -> None:
        """End the thread after the step that is running, and wait for it."""
        self._scheduler.stop()
        self.join()

    def _load(self) -> None:
        try:
            if self._first_model is not None:
                self._scheduler.load(self._first_model)
        except Exception as error:  # noqa: BLE001 - the thread boundary: whoever waits for ``ready`` gets it
            if self._peers is not None and not isinstance(error, ApiError):
                self._peers.lose()
            self.ready.set_exception(error)
            self._scheduler.stop()
        else:
            self.ready.set_result(None)

    def _step(self) -> None:
        try:
            if not self._scheduler.step():
                self._rest()
        except Exception as error:  # the thread boundary: what went wrong concerns the requests, not the server
            log.exception("a generation step failed")
            if self._peers is None or self._peers.survives(error):
                self._scheduler.recover(internal_error())
            else:
                self._give_up(self._peers, error)

    def _rest(self) -> None:
        self._scheduler.wait(None if self._peers is None else self._peers.beat())

    def _give_up(self, peers: Peers, error: Exception) -> None:
        peers.lose()
        self.fault = error
        self._scheduler.stop()
        self._on_fault()
