"""One accepted socket: reading and writing under deadlines, telling whether the peer is there, closing politely.

Knows sockets and clocks; must not know HTTP.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from contextlib import suppress
from typing import Literal, TypeAlias

from mlx_serve.core import ClientGone

Peer: TypeAlias = Literal["open", "eof", "gone"]

_READ_BYTES = 64 * 1024
# Linux tells a peer that finished sending (POLLRDHUP) from one that is wholly gone (POLLHUP). Elsewhere POLLHUP is the
# former, and only an error the latter.
_EOF = getattr(select, "POLLRDHUP", select.POLLHUP)
_GONE = select.POLLERR | select.POLLNVAL | (select.POLLHUP & ~_EOF)


def peer_of(sock: socket.socket) -> Peer:
    """Asked of the descriptor and without reading: pipelined bytes stay unread, and TLS has no flags on recv."""
    if sock.fileno() < 0:
        return "gone"
    poller = select.poll()
    poller.register(sock.fileno(), select.POLLIN | _EOF)
    events = poller.poll(0)
    mask = events[0][1] if events else 0
    if mask & _GONE or (mask and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
        return "gone"
    return "eof" if mask & _EOF or (mask and _at_end(sock)) else "open"


def _at_end(sock: socket.socket) -> bool:
    """For systems whose poll does not tell; blind behind unread bytes, where the next write has to tell."""
    if hasattr(select, "POLLRDHUP"):
        return False
    try:
        # The plain recv, past ssl.SSLSocket's, on the descriptor.
        return socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def hang_up(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Ends the transport under TLS too, from any thread: whoever blocks on the socket wakes up."""
    with suppress(OSError):  # the peer may have ended it already, which is as good
        socket.socket.shutdown(sock, how)


class Channel:
    """``leftover`` holds bytes read past the end of a request; they are the next read."""

    def __init__(self, sock: socket.socket, write_timeout_s: float) -> None:
        self._sock = sock
        self._write_timeout_s = write_timeout_s
        self._gone = False
        self.leftover = b""
        self.n_written = 0

    def handshake(self, timeout_s: float) -> None:
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.settimeout(timeout_s)
            self._sock.do_handshake()

    def read(self, deadline: float) -> bytes:
        """Some bytes, b"" at the end; TimeoutError at the deadline (of time.monotonic), ClientGone on a reset."""
        if self.leftover:
            raw, self.leftover = self.leftover, b""
            return raw
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        try:
            self._sock.settimeout(left_s)
            return self._sock.recv(_READ_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise ClientGone(type(error).__name__) from None

    def write(self, raw: bytes) -> None:
        """All of it, or ClientGone: a client that takes nothing until the time is up counts as gone."""
        try:
            self._sock.settimeout(self._write_timeout_s)
            self._sock.sendall(raw)
        except OSError as error:
            self._gone = True
            raise ClientGone(type(error).__name__) from None
        self.n_written += len(raw)

    def peer(self) -> Peer:
        # Remembered, since the system reports the error of a socket only once.
        self._gone = self._gone or (peer := peer_of(self._sock)) == "gone"
        return "gone" if self._gone else peer

    def finish(self, linger_s: float, max_bytes: int) -> None:
        """Ends our side, then takes in what still comes, within bounds, until the client ends its own.

        Closing with unread bytes makes the system send a reset, which can destroy the reply before the client has
        read it (RFC 9112 9.6).
        """
        with suppress(OSError, ValueError):  # a peer that is gone needs no close_notify
            self._close_notify()
        hang_up(self._sock, socket.SHUT_WR)
        deadline = time.monotonic() + linger_s
        with suppress(OSError):  # time is up, or the peer has reset: either way there is no more to wait for
            while max_bytes > 0 and (left_s := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left_s)
                raw = socket.socket.recv(self._sock, _READ_BYTES)
                if not raw:
                    break
                max_bytes -= len(raw)

    def _close_notify(self) -> None:
        if isinstance(self._sock, ssl.SSLSocket):
            # Not waiting for the peer's own: what it still sends is thrown away unread.
            self._sock.settimeout(0)
            self._sock.unwrap()
