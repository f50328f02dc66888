"""Answers connections while no server process accepts them: 503 in OpenAI's shape, with Retry-After."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

from mlx_serve.wire import sockets
from mlx_serve.wire.doorstep import Doorstep

# How long a client may take to read the answer before its connection is closed.
_STAY_S = 2.0
# The most connections answered at a time, so that the signals' turn comes.
_MOST = 64
_RETRY_S = 5


def unavailable() -> bytes:
    """The whole reply. The request is not read: it is the same for all."""
    message = "The server process has ended and is being started again."
    error = {"message": message, "type": "server_error", "param": None, "code": "restarting"}
    body = json.dumps({"error": error}).encode()
    fields = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Retry-After: {_RETRY_S}",
        "Connection: close",
    ]
    return "\r\n".join(fields).encode() + b"\r\n\r\n" + body


class Doorway:
    """Accepts what waits at the listening socket, and turns it away."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._doorstep = Doorstep(_STAY_S)
        self._reply = unavailable()

    def turn_away(self) -> None:
        """Answer the connections that wait now."""
        for _ in range(_MOST):
            try:
                sock, _address = self._listening.accept()
            except OSError:  # none waits any more, or it left again
                return
            with suppress(OSError):  # a Unix socket has no such options, and a client may be gone
                sockets.tune(sock)
            self._doorstep.turn_away(sock, self._reply)

    def sweep(self) -> float | None:
        """Close the connections whose time is up; returns the seconds until the next one."""
        return self._doorstep.sweep()

    def close(self) -> None:
        """Close them all."""
        self._doorstep.clear()
