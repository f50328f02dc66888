"""What SIGINT, SIGTERM and SIGHUP do, before the server runs and while it does. Must not know the server.

A signal that the process was started to ignore (SIGHUP under nohup) stays ignored; SIGINT alone does not, since shells
have whatever they start in the background ignore it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger("mlx_serve")


@contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in here, so that what the main thread holds (a child, a folder) is tidied up.

    Elsewhere before the server runs they end the process at once: in MLX's own code, as where it waits for other
    ranks, an exception would come only after it. The second one ends the process at once here too.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def stop_on_signals(stop: threading.Event) -> None:
    """``stop`` is set by SIGINT and SIGTERM, the second of which ends the process at once.

    SIGHUP is for reloading, of which there is nothing yet. When it says that the terminal was closed it sets ``stop``,
    and never does more: it may come twice then, from the system and from the shell.

    By a thread that reads what the C handler writes: a signal that comes just before the main thread blocks on a lock
    does not wake it, and its Python handler would wait with it.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    had_terminal = _has_terminal()
    args = (ours, theirs, stop, had_terminal)
    threading.Thread(target=_watch, args=args, name="signals", daemon=True).start()


def _watch(ours: socket.socket, _theirs: socket.socket, stop: threading.Event, had_terminal: bool) -> None:
    was_told = False
    while True:
        number = ours.recv(1)[0]
        if number != signal.SIGHUP:
            if was_told:
                os._exit(128 + number)
            was_told = True
            stop.set()
        elif had_terminal and not _has_terminal():
            stop.set()
        else:
            _log.warning("SIGHUP changes nothing: settings, keys and certificates are read at the start alone")


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal; with it goes whoever would end the process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
