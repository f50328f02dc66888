"""Writes responses as bytes: status line, header fields, and the body whole, chunked, or until the connection closes.

Knows how a reply is framed (RFC 9112 6), and closes its iterator however the reply ends; must not know where the
response came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from mlx_serve.values import ClientGone, Response
from mlx_serve.wire import sse
from mlx_serve.wire.channel import Channel
from mlx_serve.wire.framing import Head, Refusal

Fields = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# No CR, LF or other control byte: a value that ends its line could begin a second reply (RFC 9112 11.1).
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
# The beginning of every reply, whatever its status.
_BEGINNING = b"HTTP/1.1 "
_NO_BODY = frozenset({204, 304})
_LAST_CHUNK = b"0\r\n\r\n"
_COMMENT = sse.comment("")
_STREAM_FIELDS: Fields = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))


@dataclass(frozen=True, slots=True)
class Manner:
    """How to send the reply: no body to HEAD, no chunks to HTTP/1.0, and whether the connection is kept after it."""

    is_head: bool = False
    http_1_0: bool = False
    keep: bool = False

    @classmethod
    def of(cls, asked: Head | Refusal, keep: bool) -> Manner:
        if isinstance(asked, Refusal):
            return cls(is_head=asked.to_head)
        return cls(is_head=asked.method == "HEAD", http_1_0=asked.version == "HTTP/1.0", keep=keep)


def head_bytes(status: int, fields: Fields) -> bytes:
    lines = [f"{_BEGINNING.decode()}{status} {_phrase(status)}", f"Date: {formatdate(usegmt=True)}"]
    for name, value in fields:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError("a reply's header field would break its line")
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def whole(response: Response, body: bytes, fields: Fields, manner: Manner) -> bytes:
    """Head and body in one write: a second write would wait for the acknowledgement of the first."""
    # RFC 9110 8.6: no Content-Length with 204; HEAD gets the length that GET would have.
    length: Fields = () if response.status in _NO_BODY else (("Content-Length", str(len(body))),)
    head = head_bytes(response.status, _described(response) + fields + length + _connection(manner))
    return head if manner.is_head or response.status in _NO_BODY else head + body


def _described(response: Response) -> Fields:
    content_type: Fields = () if response.status in _NO_BODY else (("Content-Type", response.content_type),)
    streamed = response.content_type.startswith("text/event-stream")
    return content_type + response.headers + (_STREAM_FIELDS if streamed else ())


def _connection(manner: Manner) -> Fields:
    if not manner.keep:
        return (("Connection", "close"),)
    # RFC 9112 9.3: HTTP/1.0 needs keep-alive in the reply.
    return (("Connection", "keep-alive"),) if manner.http_1_0 else ()


class Reply:
    """Sends one response. ``head_sent`` says whether it is too late for another response."""

    def __init__(self, channel: Channel, alive: Callable[[], bool]) -> None:
        self._channel = channel
        self._alive = alive
        # Text that may be written between two pieces of a stream and that clients skip; b"" if there is none.
        self._filler = b""
        self._n_ahead = 0
        self.head_sent = False
        self.status = 0

    def probe(self) -> None:
        """Writes a few bytes that change nothing: the next one of those that all replies begin with, or a comment.

        If there is nothing to write it does nothing: the next piece will show whether the client is there.
        """
        if self.head_sent:
            ahead = self._filler
        else:
            ahead = _BEGINNING[self._n_ahead : self._n_ahead + 1]
            self._n_ahead += len(ahead)
        if ahead:
            self._channel.write(ahead)

    def send(self, response: Response, fields: Fields, manner: Manner) -> bool:
        """Whether the connection may be kept after it."""
        if isinstance(response.body, bytes):
            self._write(response.status, whole(response, response.body, fields, manner))
            return manner.keep
        try:
            return self._stream(response, response.body, fields, manner)
        finally:
            # Closing cancels the request, whatever happened above.
            if close := getattr(response.body, "close", None):
                close()

    def _stream(self, response: Response, pieces: Iterator[bytes], fields: Fields, manner: Manner) -> bool:
        # HTTP/1.0 has no chunks, so the end of the connection ends the body (RFC 9112 6.3).
        chunked = not manner.http_1_0
        if not chunked:
            manner = Manner(manner.is_head, manner.http_1_0, keep=False)
        coding: Fields = (("Transfer-Encoding", "chunked"),) if chunked else ()
        unsent = head_bytes(response.status, _described(response) + fields + coding + _connection(manner))
        if manner.is_head:
            self._write(response.status, unsent)
            return manner.keep
        # The first piece is sent together with the head: until it is there, a failure still gets its own status.
        for piece in pieces:
            # The first write after a hang-up still succeeds, so the client is checked before each write.
            if not self._alive():
                raise ClientGone("hung up during the stream")
            # An empty chunk would end the body.
            if piece:
                self._write(response.status, unsent + (_chunk(piece) if chunked else piece))
                unsent = b""
                if response.content_type.startswith("text/event-stream"):
                    self._filler = _chunk(_COMMENT) if chunked else _COMMENT
        self._write(response.status, unsent + (_LAST_CHUNK if chunked else b""))
        return manner.keep

    def _write(self, status: int, raw: bytes) -> None:
        if not raw:
            return
        ahead = 0 if self.head_sent else self._n_ahead
        self.head_sent = True
        self.status = status
        self._channel.write(raw[ahead:])


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)
