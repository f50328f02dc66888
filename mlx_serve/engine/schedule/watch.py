"""A thread that fails jobs whose deadlines have passed, and reports a step that hangs.

The MLX thread can do neither, because its steps may take arbitrarily long. Touches no MLX.
"""

from __future__ import annotations

import logging
import sys
import traceback
from threading import Thread

from mlx_serve.engine.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)


class Watch(Thread):
    """Runs until the scheduler is stopped. ``worker`` is the MLX thread, whose stack is logged when it hangs."""

    def __init__(self, scheduler: Scheduler, worker: Thread) -> None:
        super().__init__(name="engine-watch", daemon=True)
        self._scheduler = scheduler
        self._worker = worker
        self._has_reported = False

    def run(self) -> None:
        """Watch until the scheduler is stopped."""
        while not self._scheduler.stopped:
            self._scheduler.expire()
            self._report()
            self._scheduler.wait_for_deadline()

    def _report(self) -> None:
        """Log once that a step hangs, and once that it has ended."""
        overdue = self._scheduler.overdue()
        if overdue is not None and not self._has_reported:
            log.error("%s; /health says 503 until it ends. The thread is at:\n%s", overdue, self._stack())
        elif overdue is None and self._has_reported:
            log.warning("the MLX thread goes on")
        self._has_reported = overdue is not None

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._worker.ident or 0)  # the documented way to another thread's stack
        return "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)"
