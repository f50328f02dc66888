"""Handles SIGINT, SIGTERM and SIGHUP, before the server runs and while it runs. Must not know the server.

A signal that was ignored when the process started (SIGHUP under nohup) stays ignored. SIGINT is the exception: shells
start every background job with SIGINT ignored.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# The end that the C handler writes to. It has to stay open, and there is one for a process.
_theirs: socket.socket | None = None


@contextmanager
def unwinding() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise SystemExit, so that the main thread cleans up (a child, a folder).

    The same signal a second time ends the process at once. Outside of such blocks, until the server runs, the first one
    does: while MLX's own code runs (such as waiting for other ranks), an exception would be raised only after it.
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


def deliveries() -> socket.socket:
    """A socket from which the number of each SIGINT, SIGTERM and SIGHUP can be read, a byte each, from now on.

    Call it on the main thread. Python's C handler writes the bytes.
    """
    global _theirs
    ours, _theirs = socket.socketpair()
    _theirs.setblocking(False)
    signal.set_wakeup_fd(_theirs.fileno())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return ours


def stop_on_signals(stop: threading.Event, reload: Callable[[], None]) -> None:
    """SIGINT and SIGTERM set ``stop``; after that, another one ends the process at once. SIGHUP calls ``reload``.

    If SIGHUP comes because the terminal was closed, it sets ``stop``, and never ends the process: the system and the
    shell may both send it. ``reload`` must return at once.

    A thread handles the signals by reading what Python's C handler writes. A Python handler would run in the main
    thread, and a signal that arrives just before that thread blocks on a lock does not wake it.
    """
    numbers = deliveries()
    had_terminal = has_terminal()
    args = (numbers, stop, reload, had_terminal)
    threading.Thread(target=_watch, args=args, name="signals", daemon=True).start()


def _watch(numbers: socket.socket, stop: threading.Event, reload: Callable[[], None], had_terminal: bool) -> None:
    was_told = False
    while True:
        number = numbers.recv(1)[0]
        if number != signal.SIGHUP:
            if was_told:
                os._exit(128 + number)
            was_told = True
            stop.set()
        elif had_terminal and not has_terminal():
            stop.set()
        else:
            reload()


def has_terminal() -> bool:
    """Whether the process has a controlling terminal. If it closes, nobody is left to end the process by hand."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
