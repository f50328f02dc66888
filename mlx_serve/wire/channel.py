"""One accepted socket: reading and writing under deadlines, whether the peer is there and how slow it is, closing.

Knows sockets and clocks; must not know HTTP.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from contextlib import suppress
from typing import Literal, TypeAlias

from mlx_serve.values import ClientGone

Peer: TypeAlias = Literal["open", "eof", "gone"]

_READ_BYTES = 64 * 1024
# On Linux, POLLRDHUP means that the peer has finished sending, and POLLHUP that the connection is gone. On other
# systems POLLHUP means the former, and only an error means the latter.
_EOF = getattr(select, "POLLRDHUP", select.POLLHUP)
_GONE = select.POLLERR | select.POLLNVAL | (select.POLLHUP & ~_EOF)


def peer_of(sock: socket.socket) -> Peer:
    """Polls the descriptor without reading: pipelined bytes stay unread, and under TLS recv takes no flags."""
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
    """For systems whose poll does not say it. It sees nothing behind unread bytes; then the next write finds out."""
    if hasattr(select, "POLLRDHUP"):
        return False
    try:
        # The plain recv on the descriptor, not that of ssl.SSLSocket.
        return socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def hang_up(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Ends the transport, under TLS too, from any thread: a thread that blocks on the socket wakes up."""
    with suppress(OSError):  # the peer may have ended it already
        socket.socket.shutdown(sock, how)


class Channel:
    """``leftover`` holds bytes read past the end of a request; the next read returns them.

    ``evict`` and ``write_pace`` may be called from any thread, everything else only from the connection's thread.
    """

    def __init__(self, sock: socket.socket, write_timeout_s: float) -> None:
        self.sock = sock
        self._write_timeout_s = write_timeout_s
        self._gone = False
        self._evicted = False
        # When the running write began, and how much had been written then.
        self._write_began: tuple[float, int] | None = None
        self.leftover = b""
        self.n_read = 0
        self.n_written = 0

    def handshake(self, timeout_s: float) -> None:
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.settimeout(timeout_s)
            self.sock.do_handshake()

    def read(self, deadline: float) -> bytes:
        """Some bytes, b"" at the end. Raises TimeoutError at ``deadline`` (time.monotonic), ClientGone on a reset."""
        if self.leftover:
            raw, self.leftover = self.leftover, b""
            return raw
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        try:
            self.sock.settimeout(left_s)
            raw = self.sock.recv(_READ_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._client_gone(error) from None
        if self._evicted:
            raise self._client_gone(None)
        self.n_read += len(raw)
        return raw

    def discard_ready(self, n_bytes: int) -> bool:
        """Drops ``n_bytes`` bytes if all of them are already here; never waits."""
        with suppress(OSError):  # no more is here, or the client is gone, which the next write will find out
            self.sock.settimeout(0)
            while len(self.leftover) < n_bytes and (raw := self.sock.recv(_READ_BYTES)):
                self.n_read += len(raw)
                self.leftover += raw
        if len(self.leftover) < n_bytes:
            return False
        self.leftover = self.leftover[n_bytes:]
        return True

    def write(self, raw: bytes) -> None:
        """Writes all bytes. Raises ClientGone if the client takes nothing for the whole write time-out."""
        unsent = memoryview(raw)
        self._write_began = time.monotonic(), self.n_written
        try:
            # The limit holds for each send: a client that takes something, however little, gets the whole time again.
            self.sock.settimeout(self._write_timeout_s)
            while unsent:
                n_sent = self.sock.send(unsent)
                self.n_written += n_sent
                unsent = unsent[n_sent:]
        except OSError as error:
            self._gone = True
            raise self._client_gone(error) from None
        finally:
            self._write_began = None

    def write_pace(self, now: float, min_s: float) -> float | None:
        """Bytes per second that the client takes of a write that has lasted ``min_s``; None without such a write."""
        began = self._write_began
        if began is None or now - began[0] < min_s:
            return None
        return (self.n_written - began[1]) / (now - began[0])

    def evict(self) -> None:
        """Ends the connection to free its place: its thread gets ClientGone from the call in which it waits."""
        self._evicted = True
        hang_up(self.sock)

    def _client_gone(self, error: OSError | None) -> ClientGone:
        return ClientGone("evicted" if self._evicted else type(error).__name__)

    def peer(self) -> Peer:
        # Kept, since the system reports the error of a socket only once.
        self._gone = self._gone or (peer := peer_of(self.sock)) == "gone"
        return "gone" if self._gone else peer

    def finish(self, silence_s: float, linger_s: float) -> None:
        """Ends this side, then drops what still comes until the client ends its side, is silent, or takes too long.

        Closing with unread bytes makes the system send a reset, which can destroy the reply before the client has read
        it (RFC 9112 9.6). Many clients start reading only after they have sent their whole body. A TLS client takes a
        reset for a violation of the protocol and does not read at all.
        """
        with suppress(OSError, ValueError):  # a peer that is gone needs no close_notify
            self._close_notify()
        hang_up(self.sock, socket.SHUT_WR)
        deadline = time.monotonic() + linger_s
        with suppress(OSError):  # the time is up, or the peer has reset: there is nothing more to wait for
            while (left_s := deadline - time.monotonic()) > 0:
                self.sock.settimeout(min(silence_s, left_s))
                if not socket.socket.recv(self.sock, _READ_BYTES):
                    break

    def _close_notify(self) -> None:
        if isinstance(self.sock, ssl.SSLSocket):
            # Does not wait for the peer's close_notify: what it still sends is thrown away unread.
            self.sock.settimeout(0)
            self.sock.unwrap()
