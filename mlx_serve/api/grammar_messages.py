"""The messages between the server and the program that compiles its grammars, on a socket. Knows no grammar."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

# A message on the control socket: its kind, what it is about, and the length of what follows.
_HEADER = struct.Struct("!cQQ")
VOCABULARY, TASK = b"v", b"t"


def send(to: socket.socket, kind: bytes, number: int, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send a message. Raises OSError."""
    # Descriptors go with the first bytes.
    socket.send_fds(to, [_HEADER.pack(kind, number, len(data))], fds)
    to.sendall(data)


def receive(source: socket.socket) -> tuple[bytes, int, bytes, list[int]] | None:
    """A message: kind, number, data and descriptors. None when the other end has closed."""
    header, fds, _, _ = socket.recv_fds(source, _HEADER.size, 1)
    if len(header) < _HEADER.size:
        return None
    kind, number, n_bytes = _HEADER.unpack(header)
    data = bytearray()
    while len(data) < n_bytes:
        piece = source.recv(min(n_bytes - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return kind, number, bytes(data), fds
