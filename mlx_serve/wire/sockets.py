"""Listening sockets, TCP and Unix, the options of accepted ones, and TLS. Must not know HTTP."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from contextlib import closing, suppress

# How much of a reply the system may hold unsent before a write waits. The default is megabytes; a client that reads
# slowly then looks for minutes as if it read nothing.
_MAX_UNSENT_BYTES = 128 * 1024
# A dead peer that never sent a reset is noticed after about two minutes.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPALIVE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Listening:
    """A socket that listens, not blocking, and the file that a Unix socket has. Raises OSError.

    ``uds``, the path of a Unix socket, replaces ``address``.
    """

    def __init__(self, address: tuple[str, int], uds: str | None, backlog: int) -> None:
        self._uds = uds
        self._inode: tuple[int, int] | None = None
        self.sock = socket.socket(socket.AF_UNIX if uds else _family_of(address), socket.SOCK_STREAM)
        try:
            if uds:
                _bind_uds(self.sock, uds)
                self._inode = _inode_of(uds)
            else:
                _bind_tcp(self.sock, address)
            self.sock.listen(backlog)
        except OSError:
            self.close()
            raise
        # Otherwise a client that resets between select and accept would block the loop.
        self.sock.setblocking(False)

    def close(self) -> None:
        """Closes the socket, and removes its file unless another server now listens there."""
        self.sock.close()
        with suppress(FileNotFoundError):  # somebody has removed it already
            if self._uds and self._inode and _inode_of(self._uds) == self._inode:
                os.unlink(self._uds)


def _family_of(address: tuple[str, int]) -> socket.AddressFamily:
    host, port = address
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


def _bind_tcp(sock: socket.socket, address: tuple[str, int]) -> None:
    # A restart must not wait until the system forgets the connections of the last run.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6 and address[0] == "::":
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(address)


def _bind_uds(sock: socket.socket, path: str) -> None:
    _remove_stale(path)
    # With a later chmod, the socket would be open to everybody for a moment.
    mask = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(mask)


def _remove_stale(path: str) -> None:
    """Removes the socket of a killed run, on which nobody accepts. Anything else stays, and bind reports it."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _inode_of(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def tune(sock: socket.socket) -> None:
    """For an accepted TCP socket: events are sent at once, dead peers and slow readers are noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_NOTSENT_LOWAT", _MAX_UNSENT_BYTES)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def tls_context(cert: str, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["http/1.1"])
    return context
