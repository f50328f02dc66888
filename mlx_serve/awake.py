"""Keeps a Mac awake while requests run, and lets it sleep otherwise: through ``caffeinate``, which comes with macOS."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from threading import Condition, Thread

from mlx_serve.metrics import Trace
from mlx_serve.values import Job

log = logging.getLogger("mlx_serve")

# Prevents idle sleep until it is ended, or until this process has ended.
_COMMAND = ("caffeinate", "-i", "-w", str(os.getpid()))
# An agent's next request comes soon: the program is not started anew for each.
_LINGER_S = 60.0


class KeepAwake:
    """An observer of requests. ``command`` runs while there are some and ``linger_s`` seconds longer, or ``always``."""

    def __init__(self, *, always: bool = False, command: Sequence[str] = _COMMAND, linger_s: float = _LINGER_S) -> None:
        self._always = always
        self._command = command
        self._linger_s = linger_s
        self._requests: set[Trace] = set()
        self._changed = Condition()
        self._is_closed = False
        self._thread = Thread(target=self._run, name="keep-awake", daemon=True)
        self._thread.start()

    def entered(self, trace: Trace, jobs: Sequence[Job]) -> None:
        """A request begins."""
        with self._changed:
            self._requests.add(trace)
            self._changed.notify_all()

    def left(self, trace: Trace) -> None:
        """A request has ended."""
        with self._changed:
            self._requests.discard(trace)
            self._changed.notify_all()

    def close(self) -> None:
        """Let the Mac sleep."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while self._wait(wanted=True):
            try:
                with subprocess.Popen(self._command, stdin=subprocess.DEVNULL) as process:  # noqa: S603
                    try:
                        while self._wait(wanted=False) and self._lingers():
                            pass
                    finally:
                        process.terminate()
            except OSError as error:
                log.warning("cannot keep the Mac awake: %s: %s", self._command[0], error.strerror)
                return

    def _wait(self, *, wanted: bool) -> bool:
        """Wait until the Mac has to be awake, or need not be. False: there is nothing to wait for any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_wanted == wanted)
            return not self._is_closed

    def _lingers(self) -> bool:
        """Whether another request comes before it is time to sleep."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_wanted, self._linger_s)
            return self._is_wanted and not self._is_closed

    @property
    def _is_wanted(self) -> bool:
        return self._always or bool(self._requests)
