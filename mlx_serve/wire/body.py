"""Strict decoders of HTTP/1.1 request bodies: by Content-Length and chunked (RFC 9112 6 and 7).

Both decoders have one interface: ``feed`` takes bytes in pieces of any size and returns the body bytes among them. Once
the body is complete, ``leftover`` has the bytes behind it. Nothing beyond the limits is held or passed on: a chunk that
would exceed a limit is refused at its size line, before its data. Extensions and trailers are checked, counted and
dropped.

Must not know: sockets, clocks, threads, and what a body means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_serve.wire.framing import TOKEN, FramingLimits, Head, Lines, Refusal, parse_field_line

# RFC 9112 7.1: chunk-size [ chunk-ext ]. Sixteen digits are 64 bits, so no longer number reaches int(). With possessive
# quantifiers the time is linear in the length of any line.
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*+"'
_CHUNK_LINE = re.compile(
    rb"([0-9A-Fa-f]{1,16})"
    rb"((?:[ \t]*+;[ \t]*+" + TOKEN + rb"++(?:[ \t]*+=[ \t]*+(?:" + TOKEN + rb"++|" + _QUOTED + rb"))?+)*+)"
)
_CRLF = b"\r\n"


@dataclass(frozen=True, slots=True)
class Fed:
    """Body bytes; ``leftover`` is None until the body has ended."""

    body: bytes
    leftover: bytes | None = None


class BodyDecoder(Protocol):
    def feed(self, raw: bytes) -> Fed: ...


def body_decoder(head: Head, limits: FramingLimits) -> BodyDecoder:
    """The decoder for this head's body; refuses a declared length that is over the limit (RFC 9110 15.5.14)."""
    if head.body == "chunked":
        return ChunkedBody(limits)
    n_bytes = head.body or 0
    if n_bytes > limits.max_body_bytes:
        raise _too_large(limits)
    return LengthBody(n_bytes)


def _too_large(limits: FramingLimits) -> Refusal:
    return Refusal(413, f"request body is larger than {limits.max_body_bytes} bytes")


class LengthBody:
    __slots__ = ("_n_left",)

    def __init__(self, n_bytes: int) -> None:
        self._n_left = n_bytes

    def feed(self, raw: bytes) -> Fed:
        body = raw[: self._n_left]
        self._n_left -= len(body)
        return Fed(body) if self._n_left else Fed(body, raw[len(body) :])


class ChunkedBody:
    """The states of a chunked body: size line, data, the CRLF behind the data, ...; after the size 0, trailers."""

    __slots__ = ("_limits", "_lines", "_n_body", "_n_chunk_left", "_n_extension", "_n_overhead", "_n_trailer", "_state")

    def __init__(self, limits: FramingLimits) -> None:
        self._limits = limits
        self._lines = Lines()
        self._state: Literal["size", "data", "crlf", "trailers", "done"] = "size"
        self._n_body = 0
        self._n_chunk_left = 0
        self._n_extension = 0
        self._n_overhead = 0
        self._n_trailer = 0

    def feed(self, raw: bytes) -> Fed:
        self._lines.add(raw)
        body = bytearray()
        while self._step(body):
            pass
        return Fed(bytes(body), self._lines.take(len(self._lines)) if self._state == "done" else None)

    def _step(self, body: bytearray) -> bool:
        """Advances by one state; False if that needs more bytes."""
        match self._state:
            case "size":
                return self._size()
            case "data":
                return self._data(body)
            case "crlf":
                return self._crlf()
            case "trailers":
                return self._trailer()
            case "done":
                return False

    def _size(self) -> bool:
        limit = self._limits.max_chunk_line
        line = self._lines.next(limit, (400, f"chunk-size line is longer than {limit} bytes"))
        if line is None:
            return False
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise Refusal(400, "malformed chunk-size line (RFC 9112 7.1)")
        size = int(match[1], 16)
        self._count(size, n_line=len(line), n_extension=len(match[2]))
        self._n_chunk_left = size
        self._state = "data" if size else "trailers"
        return True

    def _count(self, size: int, n_line: int, n_extension: int) -> None:
        limits = self._limits
        self._n_body += size
        self._n_extension += n_extension
        self._n_overhead += n_line + 2 * len(_CRLF) + limits.chunk_cost
        if self._n_body > limits.max_body_bytes:
            raise _too_large(limits)
        # RFC 9112 7.1.1: a recipient should limit the total length of chunk extensions.
        if self._n_extension > limits.max_chunk_extension_bytes:
            raise Refusal(400, f"chunk extensions are longer than {limits.max_chunk_extension_bytes} bytes")
        if self._n_overhead - self._n_body > limits.max_chunk_overhead:
            most, cost = limits.max_chunk_overhead, limits.chunk_cost
            raise Refusal(
                400, f"chunks so small that their framing, plus {cost} bytes each, is {most} bytes over the data"
            )

    def _data(self, body: bytearray) -> bool:
        piece = self._lines.take(self._n_chunk_left)
        body += piece
        self._n_chunk_left -= len(piece)
        if self._n_chunk_left:
            return False
        self._state = "crlf"
        return True

    def _crlf(self) -> bool:
        raw = self._lines.first() if len(self._lines) < len(_CRLF) else self._lines.take(len(_CRLF))
        # If the rest of the line were skipped instead, data could be read as framing.
        if not _CRLF.startswith(raw):
            raise Refusal(400, "chunk data is not followed by CRLF (RFC 9112 7.1)")
        if raw != _CRLF:
            return False
        self._state = "size"
        return True

    def _trailer(self) -> bool:
        """Checks and drops a trailer: the request was judged by its head and cannot change (RFC 9110 6.5.1)."""
        limit = self._limits.max_trailer_bytes
        line = self._lines.next(max(0, limit - self._n_trailer), (431, f"trailers are longer than {limit} bytes"))
        if line is None:
            return False
        if line:
            self._n_trailer += len(line) + len(_CRLF)
            parse_field_line(line)
        else:
            self._state = "done"
        return True
