"""The parent: holds the listening socket, runs the server process, and starts it again when it dies or hangs.

    starting --(it accepts)--> serving --(it dies)--> down, for a pause --> starting
                                  |  hang: SIGABRT, then SIGKILL

Connections wait in the socket's queue while nothing accepts them. After ``--restart-grace`` seconds the parent answers
them with 503 itself; under TLS, for which it would need the key, they go on waiting. One thread; imports no MLX.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from mlx_serve import logs, signals
from mlx_serve.settings import http
from mlx_serve.settings.config import Config
from mlx_serve.supervise import report, start, systemd
from mlx_serve.supervise.doorway import Doorway
from mlx_serve.supervise.policy import Restarts, Suspects, hang
from mlx_serve.supervise.process import ServerProcess, own_command
from mlx_serve.values import StartError
from mlx_serve.wire.sockets import Listening

log = logging.getLogger("mlx_serve")

# The longest pause between two looks at the process.
_LOOK_S = 1.0
# How often a process that has closed its descriptors is asked whether it has ended.
_REAP_S = 0.02
# After SIGABRT a process that hangs may write its stacks for so long; one that is ending may take so long.
_LAST_WORDS_S = 5.0
# The signals that end a process which was told to end. They are no death to report.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What it wrote before its end is read in so many pieces: more than the system keeps.
_LAST_READS = 16


class Parent:
    """Runs one server process after the other until a signal comes, or until they die too quickly.

    ``command`` starts a server process. ``environ`` is its environment.
    """

    def __init__(
        self,
        settings: Config,
        listening: Listening,
        command: Sequence[str],
        environ: Mapping[str, str] = os.environ,
        restarts: Restarts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._listening = listening
        self._command = command
        self._environ = environ
        self._clock = clock
        self._restarts = restarts or Restarts()
        self._suspects = Suspects()
        self._doorway = Doorway(listening.sock)
        self._selector = selectors.DefaultSelector()
        self._process: ServerProcess | None = None
        # Since when nothing accepts; None: something does. When the next process starts, if none runs.
        self._down_since: float | None = clock()
        self._start_at = clock()
        # Why the process was ended by force, and when it is killed if it does not end.
        self._hang = ""
        self._kill_at: float | None = None
        self._ending = False
        self._stopping = False
        self._has_served = False
        self._status: int | None = None
        self._had_terminal = signals.has_terminal()

    def run(self) -> int:
        """Returns the exit status: the server process's own; negative for a signal, as in subprocess."""
        numbers = signals.deliveries()
        self._selector.register(numbers, selectors.EVENT_READ, lambda: self._on_signal(numbers.recv(1)[0]))
        try:
            while self._status is None:
                self._turn()
        finally:
            self._doorway.close()
            self._listening.close()
            self._selector.close()
        return self._status

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            key.data()
        self._doorway.sweep()
        now = self._clock()
        if self._process is not None:
            self._look_after(self._process, now)
        elif self._status is None and now >= self._start_at:
            self._start(now)
        self._open_or_close(now)

    def _wait_s(self) -> float:
        if self._ending:
            return _REAP_S
        now = self._clock()
        if self._process is None and self._start_at <= now:
            return 0.0
        due = [self._start_at, self._grace_at, *([self._kill_at] if self._kill_at is not None else [])]
        # What is past has been done, or lasts.
        waits = [at - now for at in due if at > now]
        return min(_LOOK_S, self._doorway.sweep() or _LOOK_S, *waits)

    # The process.

    def _start(self, now: float) -> None:
        try:
            process = ServerProcess(self._command, self._listening.sock, now, 2 * _LOOK_S, self._environ)
        except OSError as error:
            log.warning("cannot start a server process: %s", error)
            self._start_later(self._restarts.pause_s(0.0), now)
            return
        self._process, self._ending, self._hang, self._kill_at = process, False, "", None
        self._selector.register(process.link, selectors.EVENT_READ, partial(self._on_message, process))
        self._selector.register(process.stray, selectors.EVENT_READ, partial(self._on_stray, process))
        log.info("the server process is %d", process.pid)

    def _on_message(self, process: ServerProcess) -> None:
        was_ready = process.told.ready_at is not None
        if not process.read_link(self._clock()):
            self._selector.unregister(process.link)
            self._ending = True
            self._kill_at = self._kill_at or self._clock() + _LAST_WORDS_S
        if process.told.serving and self._down_since is not None and not self._ending:
            self._down_since = None
        if process.told.ready_at is not None and not was_ready:
            self._has_served = True
            systemd.notify("READY=1", self._environ)

    def _on_stray(self, process: ServerProcess) -> None:
        lines = process.read_stray()
        if lines is None:
            self._selector.unregister(process.stray)
        _log_stray(lines)

    def _look_after(self, process: ServerProcess, now: float) -> None:
        code = process.returncode()
        if code is not None:
            self._on_death(process, code, now)
            return
        told, timeout_s = process.told, self._settings.hang_timeout
        silent_s = process.silence.pass_to(now)
        why = hang(told.overdue_s, told.work, silent_s, timeout_s, is_ending=self._stopping)
        if self._kill_at is not None:
            if now >= self._kill_at:
                process.signal(signal.SIGKILL)
        elif why:
            log.error("the server process hangs: %s (--hang-timeout %g); ending it", why, timeout_s)
            self._hang, self._kill_at = why, now + _LAST_WORDS_S
            process.abort()

    def _on_death(self, process: ServerProcess, code: int, now: float) -> None:
        for each in (process.link, process.stray):
            with suppress(KeyError):  # its end was seen before
                self._selector.unregister(each)
        for _ in range(_LAST_READS):
            process.read_link(now)
            _log_stray(process.read_stray())
        process.close()
        self._process, self._ending, self._kill_at = None, False, None
        if self._stopping or (code >= 0 and not self._has_served):
            # As without a parent: a server that could not start, or was told to end, has its own exit status.
            self._status = code
            if code < 0 and -code not in _ENDING_SIGNALS:
                self._tell_of_death(process, code)
            return
        self._down_since = now
        self._tell_of_death(process, code)
        ready_at = process.told.ready_at
        self._start_later(self._restarts.pause_s(0.0 if ready_at is None else now - ready_at), now)

    def _tell_of_death(self, process: ServerProcess, code: int) -> None:
        suspects = self._suspects.at_death(process.told.requests.values())
        log.error("the server process %d died: %s", process.pid, ended(code))
        for request in suspects:
            log.error("this request was running at the death before, too: %s", request)
        self._write_report(process, code, [str(request) for request in suspects])

    def _start_later(self, pause_s: float | None, now: float) -> None:
        if pause_s is None:
            log.critical("it died %d times within a minute of its start: giving up", self._restarts.n_quick)
            self._status = 1
        else:
            self._start_at = now + pause_s

    def _write_report(self, process: ServerProcess, code: int, suspects: list[str]) -> None:
        told, at = process.told, time.time()
        facts = {
            "at": at,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)),
            "process": process.pid,
            "ended": ended(code),
            "hang": self._hang,
            "ready_s": None if told.ready_at is None else round(self._clock() - told.ready_at, 1),
            "last_words": next((line for line in told.stray if line.strip()), ""),
            "suspects": suspects,
            "requests": [str(request) for request in told.requests.values()],
            "memory": list(told.figures),
            "versions": report.versions(),
            "flags": report.flags(self._settings),
            "stray": list(told.stray),
            "log": list(told.log),
        }
        folder = report.folder(self._environ)
        try:
            path = report.write(folder, facts)
        except OSError as error:
            log.warning("cannot write a report of the death to %s: %s", folder, error.strerror)
        else:
            log.error("what is known of its death is in %s", path)

    # The socket.

    @property
    def _grace_at(self) -> float:
        return (self._down_since or 0.0) + self._settings.restart_grace

    def _open_or_close(self, now: float) -> None:
        """Answer connections here from the end of the grace until a process accepts them."""
        late = self._down_since is not None and now >= self._grace_at and self._settings.tls_cert is None
        registered = self._listening.sock in self._selector.get_map()
        if late and not registered and self._status is None:
            self._selector.register(self._listening.sock, selectors.EVENT_READ, self._doorway.turn_away)
        elif registered and not late:
            self._selector.unregister(self._listening.sock)

    # Signals.

    def _on_signal(self, number: int) -> None:
        """Pass on the first SIGINT or SIGTERM; the next one ends all at once, as in a server without a parent."""
        if number == signal.SIGHUP and not (self._had_terminal and not signals.has_terminal()):
            # A process that starts reads everything anyway, and would be ended by the signal.
            if self._process is not None and self._process.told.serving:
                self._process.signal(number)
            return
        if self._stopping and number != signal.SIGHUP:
            if self._process is not None:
                self._process.signal(signal.SIGKILL)
            self._status = 128 + number
            return
        self._stopping = True
        systemd.notify("STOPPING=1", self._environ)
        if self._process is None:
            self._status = 0
        else:
            self._process.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def _log_stray(lines: Sequence[str] | None) -> None:
    for line in lines or ():
        if line.strip():
            log.warning("the server process: %s", line)


def ended(code: int) -> str:
    """An exit status of subprocess in words."""
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def run(settings: Config) -> NoReturn:
    """Be the parent of a server with these settings, and end as it ends."""
    logs.configure(settings.log_level, "json" if settings.log_format == "json" else "text")
    try:
        start.check_alone(os.environ)
        status = Parent(settings, http.listen(http.options(settings)), own_command()).run()
    except StartError as error:
        logs.say(f"mlx-serve: {error}")
        status = 1
    logging.shutdown()
    if -status in (*_ENDING_SIGNALS, signal.SIGHUP):
        # A server that a signal ends while it starts is ended by the signal, and so is its parent.
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)
