"""The one thread that touches MLX. It steps the scheduler, and it never dies silently.

Every mlx array, stream and cache is made, used and dropped here: MLX streams belong to the thread that made them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from mlx_serve.core import internal_error
from mlx_serve.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class Worker(Thread):
    """Runs the scheduler until it is stopped, then calls ``release`` to let all models go.

    ``ready`` is done when the first model is loaded, or could not be.
    """

    def __init__(self, scheduler: Scheduler, first_model: str | None, release: Callable[[], None]) -> None:
        super().__init__(name="mlx-worker")
        self._scheduler = scheduler
        self._first_model = first_model
        self._release = release
        self.ready: Future[None] = Future()

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
            self.ready.set_exception(error)
            self._scheduler.stop()
        else:
            self.ready.set_result(None)

    def _step(self) -> None:
        try:
            if not self._scheduler.step():
                self._scheduler.wait()
        except Exception:  # the thread boundary: whatever went wrong in a step concerns its requests, not the server
            log.exception("a generation step failed")
            self._scheduler.recover(internal_error())
