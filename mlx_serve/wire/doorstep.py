"""Refused connections, which stay open for a moment so that their clients can read why."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress

from mlx_serve.wire.channel import hang_up


class Doorstep:
    """Holds refused connections for ``stay_s`` seconds, and closes them then."""

    _MAX = 64

    def __init__(self, stay_s: float) -> None:
        self._stay_s = stay_s
        self._turned_away: deque[tuple[float, socket.socket]] = deque()

    def turn_away(self, sock: socket.socket, reply: bytes) -> None:
        with suppress(OSError):  # the client is gone or does not read: ``sweep`` closes the connection all the same
            sock.setblocking(False)
            if reply:
                sock.send(reply)
        hang_up(sock, socket.SHUT_WR)
        self._turned_away.append((time.monotonic() + self._stay_s, sock))
        if len(self._turned_away) > self._MAX:
            self._close(self._turned_away.popleft()[1])

    def sweep(self) -> float | None:
        """Closes connections whose time is up; returns the seconds until the next one."""
        now = time.monotonic()
        while self._turned_away and self._turned_away[0][0] <= now:
            self._close(self._turned_away.popleft()[1])
        return self._turned_away[0][0] - now if self._turned_away else None

    def clear(self) -> None:
        while self._turned_away:
            self._close(self._turned_away.popleft()[1])

    @staticmethod
    def _close(sock: socket.socket) -> None:
        with suppress(OSError):  # reads what the client sent, since closing with unread bytes would reset the reply
            socket.socket.recv(sock, 64 * 1024)
        sock.close()
