"""One server process, as the parent sees it: starts it, reads what it tells, ends it. Decides nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_serve.supervise.child import VARIABLE
from mlx_serve.supervise.messages import LineBuffer, Message, decode
from mlx_serve.supervise.policy import RunningRequest, Silence

_N_LINES = 50
# Figures of the last minute, at one in five seconds.
_N_FIGURES = 13
# The requests that are remembered; the server has far fewer connections.
_MOST_REQUESTS = 10_000
_READ_BYTES = 64 * 1024


@dataclass(slots=True)
class ProcessState:
    """What a server process has told so far. ``ready_at``: on the monotonic clock; None: not yet."""

    serving: bool = False
    ready_at: float | None = None
    overdue_s: float = 0.0
    work: str = ""
    figures: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_N_FIGURES))
    requests: dict[str, RunningRequest] = field(default_factory=dict)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_N_LINES))
    # What it wrote past its log: the message of a C++ exception, faulthandler's stacks.
    stray: deque[str] = field(default_factory=lambda: deque(maxlen=_N_LINES * 4))

    def note(self, message: Message, now: float) -> None:
        """Take in one message. Raises KeyError or TypeError for one that lacks what its kind must have."""
        kind = message.pop("kind")
        if kind == "beat":
            self.overdue_s, self.work = float(message.get("overdue_s", 0.0)), str(message.get("work", ""))
        elif kind == "begin" and len(self.requests) < _MOST_REQUESTS:
            self.requests[message["id"]] = RunningRequest(**message)
        elif kind == "end":
            self.requests.pop(message["id"], None)
        elif kind == "log":
            self.log.append(message["line"])
        elif kind == "memory":
            self.figures.append({"at": round(time.time(), 1), **message})
        elif kind == "serving":
            self.serving = True
        elif kind == "ready":
            self.ready_at = now if self.ready_at is None else self.ready_at
        elif kind == "again":
            self.requests.clear()


class ServerProcess:
    """Runs ``command`` with the listening socket. The descriptors of ``link`` and ``stray`` become readable.

    Raises OSError when the system has no room for a process, or the program is gone.
    """

    def __init__(
        self,
        command: Sequence[str],
        listening: socket.socket,
        now: float,
        silent_step_s: float,
        environ: Mapping[str, str],
    ) -> None:
        self.told = ProcessState()
        self.silence = Silence(now, silent_step_s)
        self.link, theirs = socket.socketpair()
        self.link.setblocking(False)
        self._lines, self._stray_lines = LineBuffer(), LineBuffer()
        own_stderr = -1
        try:
            own_stderr = _own_stderr()
            passed = (listening.fileno(), theirs.fileno(), own_stderr)
            # In a process group of its own, so that Ctrl-C reaches the parent alone, which passes it on.
            self._process = subprocess.Popen(  # noqa: S603  the command that started this process
                command,
                env={**environ, VARIABLE: ",".join(map(str, passed))},
                stderr=subprocess.PIPE,
                pass_fds=passed,
                process_group=0,
            )
        except OSError:
            self.link.close()
            raise
        finally:
            if own_stderr >= 0:
                os.close(own_stderr)
            theirs.close()
        assert self._process.stderr is not None
        self.stray = self._process.stderr
        os.set_blocking(self.stray.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_link(self, now: float) -> bool:
        """Take in its messages. False: it has closed its end, so it is about to be dead."""
        try:
            raw = self.link.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.silence.heard()
        for line in self._lines.feed(raw):
            try:
                self.told.note(decode(line), now)
            except (KeyError, TypeError, ValueError):  # a newer version's message
                continue
        return bool(raw)

    def read_stray(self) -> list[str] | None:
        """The lines that it has written past its log; None: it can write no more."""
        try:
            raw = os.read(self.stray.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        if not raw:
            return None
        lines = [line.decode(errors="backslashreplace") for line in self._stray_lines.feed(raw)]
        self.told.stray.extend(lines)
        return lines

    def signal(self, number: int) -> None:
        """Send a signal; no effect on a process that has ended."""
        self._process.send_signal(number)

    def abort(self) -> None:
        """End a process that hangs so that it writes its stacks first; one that was stopped has to go on for that."""
        self.signal(signal.SIGABRT)
        self.signal(signal.SIGCONT)

    def returncode(self) -> int | None:
        """As of subprocess: negative for a signal; None while it runs. Leaves no zombie."""
        return self._process.poll()

    def close(self) -> None:
        """Give the descriptors back."""
        self.link.close()
        self.stray.close()


def _own_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:  # closed when this process was started
        return os.open(os.devnull, os.O_WRONLY)


def own_command() -> list[str]:
    """The command that started this process, which starts another one like it."""
    return [sys.executable, *sys.orig_argv[1:]]
