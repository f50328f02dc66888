"""The one thread that touches MLX. It steps the scheduler. When it ends, it fails all jobs and informs its owner.

Every mlx array, stream and cache is made, used and dropped here, because MLX streams belong to their thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from mlx_serve.engine.ranks.leader import Leader
from mlx_serve.engine.schedule.scheduler import Scheduler
from mlx_serve.engine.schedule.watch import Watch
from mlx_serve.values import ApiError, internal_error

log = logging.getLogger(__name__)

# The limit of consecutive steps that fail without a job or a model to blame. More would not stop by themselves.
_MOST_UNEXPLAINED = 3


class Worker(Thread):
    """Runs the scheduler until it is stopped, then calls ``release`` to unload all models.

    ``ready`` is done when the first model is loaded or has failed to load. ``fault``: why the thread ended before it
    was stopped. It is not an Exception (a panic in Rust), or a failed recovery, or, with ``peers``, a step that may
    have failed on some ranks only. All jobs then fail, ``on_fault`` is called, and this process can no longer
    generate.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        first_model: str | None,
        release: Callable[[], None],
        *,
        peers: Leader | None = None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="mlx-worker")
        self._scheduler = scheduler
        self._first_model = first_model
        self._release = release
        self._peers = peers
        self._on_fault = on_fault
        self.ready: Future[None] = Future()
        self.fault: BaseException | None = None
        self._n_unexplained = 0

    def run(self) -> None:
        """Load, step until stopped, close. Each part runs even if the one before it failed."""
        for part in (self._live, self._scheduler.close, self._release):
            try:
                part()
            except BaseException as error:  # the thread boundary; a panic in Rust is no Exception
                log.critical("the MLX thread failed and ends", exc_info=error)
                self._give_up(error)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Fail all jobs, and wait until the thread has ended after its current step. False: it took too long."""
        self._scheduler.stop()
        self.join(timeout_s)
        return not self.is_alive()

    def _live(self) -> None:
        Watch(self._scheduler, self).start()
        self._load()
        while not self._scheduler.stopped:
            self._step()

    def _load(self) -> None:
        try:
            if self._first_model is not None:
                self._scheduler.load(self._first_model)
        except Exception as error:  # noqa: BLE001 - the thread boundary: the error goes to ``ready``
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
            self._n_unexplained = 0
        except Exception as error:  # the thread boundary: the error fails requests, not the server
            log.exception("a generation step failed")
            if self._peers is not None and not self._peers.survives(error):
                raise
            if not self._scheduler.recover(internal_error()):
                self._n_unexplained += 1
            if self._n_unexplained > _MOST_UNEXPLAINED:
                raise

    def _rest(self) -> None:
        self._scheduler.wait(None if self._peers is None else self._peers.beat())

    def _give_up(self, error: BaseException) -> None:
        if self._peers is not None:
            self._peers.lose()
        if self.fault is None:
            self.fault = error
        if not self.ready.done():
            self.ready.set_exception(error)
        self._scheduler.stop(internal_error())
        self._on_fault()
