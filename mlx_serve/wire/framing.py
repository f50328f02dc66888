"""A strict parser of HTTP/1.1 request heads (RFC 9112).

``feed`` takes bytes in pieces of any size. None means that more bytes are needed; an error is a Refusal with its
status. Lines are judged in the order in which they come, and a line's length before its content, so that the cuts
between pieces never change the result. Where the RFC allows a recipient to be lenient, a proxy and a server can see two
different requests in the same bytes (RFC 9112 11.2). So everything doubtful is refused, and nothing is repaired.

Must not know: sockets, clocks, threads, routes, JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import unquote

# RFC 9110 5.6.2. Kept as bytes: methods of str strip and fold more characters (\xa0, \x85) than HTTP allows.
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"

_REQUEST_LINE = re.compile(rb"(" + TOKEN + rb"+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
# No space before the colon (RFC 9112 5.1), no control byte except HTAB in the value (RFC 9110 5.5).
_FIELD_LINE = re.compile(rb"(" + TOKEN + rb"+):([\t\x20-\x7e\x80-\xff]*)")
# Narrower than RFC 3986's reg-name: no sub-delims and no userinfo, so "a,b" or "a@b" is never a host.
# A port may be empty (RFC 3986 3.2.3).
_HOST = re.compile(r"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ABSOLUTE_FORM = re.compile(r"(https?)://([^/?]*)([^?]*)(?:\?.*)?", re.IGNORECASE)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Escaped "/" and "%" stay escaped in a path.
_KEPT_ESCAPE = re.compile(r"%(2[Ff5])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# int() also accepts signs, blanks, underscores and non-ASCII digits, so only text that matches this reaches it.
_LENGTH = re.compile(r"0*([0-9]+)")
_MAX_LENGTH_DIGITS = 18
_CODING_LIST = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?:[ \t]*,[ \t]*[!#$%&'*+\-.^_`|~0-9A-Za-z]+)*")

Version: TypeAlias = Literal["HTTP/1.0", "HTTP/1.1"]
# How the end of the body is found: no body, a number of bytes, or chunked (RFC 9112 6.3).
BodyFraming: TypeAlias = int | Literal["chunked"] | None
Fields: TypeAlias = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FramingLimits:
    """What one request may make the server hold or read."""

    max_request_line: int = 16 * 1024
    max_header_bytes: int = 64 * 1024
    max_header_fields: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    # Limits of one chunk-size line, of all extensions of a body, of the trailer section, and of how much larger the
    # framing of all chunks may be than the data. Parsing a chunk takes as long as copying thousands of bytes, so each
    # chunk counts ``chunk_cost`` bytes besides its own framing. Otherwise a body in tiny chunks would cost more to
    # parse than to answer.
    max_chunk_line: int = 4 * 1024
    max_chunk_extension_bytes: int = 16 * 1024
    max_trailer_bytes: int = 8 * 1024
    max_chunk_overhead: int = 16 * 1024 * 1024
    chunk_cost: int = 256


class Refusal(Exception):
    """Bytes that are not an acceptable request. The message names the rule or limit and never repeats client bytes.

    The following bytes of the connection may not begin a request: answer, then close. ``to_head``: the request was a
    HEAD, so the answer has no content (RFC 9110 9.3.2).
    """

    def __init__(self, status: int, message: str, *, to_head: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.to_head = to_head


@dataclass(frozen=True, slots=True)
class Head:
    """A request head that breaks no rule.

    ``path`` is without the query and percent-decoded ("*" for ``OPTIONS *``), except that "%2F" and "%25" stay: an
    escaped slash separates nothing. Otherwise a proxy's rules for paths would see another route than the server.
    ``authority`` is the host that the client meant: the target's in absolute-form, else that of the Host field; None
    only in HTTP/1.0. ``scheme`` is the target's in absolute-form, else "". ``headers`` has lower-case names; a repeated
    field is joined with ", ". ``expect`` is lower-case, and None without an expectation and in HTTP/1.0.
    """

    method: str
    target: str
    path: str
    version: Version
    scheme: str
    authority: str | None
    headers: Mapping[str, str]
    body: BodyFraming
    keep_alive: bool
    expect: str | None


@dataclass(frozen=True, slots=True)
class RequestLine:
    method: str
    target: str
    version: Version


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The parts of a request target; ``scheme`` and ``authority`` only in absolute-form."""

    path: str
    scheme: str = ""
    authority: str | None = None


class Lines:
    """Splits bytes at CRLF. Of an unfinished line it holds no more than the limit that its reader gives."""

    __slots__ = ("_raw", "_scanned")

    def __init__(self) -> None:
        self._raw = bytearray()
        self._scanned = 0

    def __len__(self) -> int:
        return len(self._raw)

    def add(self, raw: bytes) -> None:
        self._raw += raw

    def first(self, n_bytes: int = 1) -> bytes:
        return bytes(self._raw[:n_bytes])

    def take(self, n_bytes: int) -> bytes:
        taken = bytes(self._raw[:n_bytes])
        del self._raw[:n_bytes]
        self._scanned = 0
        return taken

    def next(self, limit: int, too_long: tuple[int, str]) -> bytes | None:
        """The next line without its CRLF, None if it is incomplete; ``limit`` does not count the CRLF."""
        end = self._raw.find(b"\n", self._scanned)
        complete = end >= 0
        if not complete:
            end = self._scanned = len(self._raw)
        if end - self._raw.endswith(b"\r", 0, end) > limit:
            raise Refusal(*too_long)
        if not complete:
            return None
        line = self.take(end + 1)
        # A bare LF or CR ends a line for some parsers and not for others (RFC 9112 2.2), so it is refused.
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise Refusal(400, "lines end with CRLF, and a CR or LF alone is not allowed (RFC 9112 2.2)")
        return line[:-2]


class HeadReader:
    """Reads one head. ``feed`` returns the Head once it is complete; ``leftover`` then has the bytes behind it."""

    __slots__ = ("_fields", "_limits", "_lines", "_n_header_bytes", "_request_line", "_skipped_empty_line", "is_head")

    def __init__(self, limits: FramingLimits) -> None:
        self._limits = limits
        self._lines = Lines()
        self._request_line: RequestLine | None = None
        self._fields: Fields = []
        self._n_header_bytes = 0
        self._skipped_empty_line = False
        # Set before the request line is complete, because the rest of the line may be refused.
        self.is_head = False

    def feed(self, raw: bytes) -> Head | None:
        try:
            return self._feed(raw)
        except Refusal as refusal:
            refusal.to_head = self.is_head
            raise

    def _feed(self, raw: bytes) -> Head | None:
        self._lines.add(raw)
        while (line := self._next_line()) is not None:
            if self._request_line is None:
                self._begin(line)
            elif line:
                self._add_field(line)
            else:
                return judge(self._request_line, self._fields)
        return None

    @property
    def begun(self) -> bool:
        """Whether any part of a request has arrived; an empty line before a request is not a part of it."""
        return self._request_line is not None or len(self._lines) > 0

    @property
    def leftover(self) -> bytes:
        return self._lines.take(len(self._lines))

    def _next_line(self) -> bytes | None:
        limits = self._limits
        if self._request_line is not None:
            left = max(0, limits.max_header_bytes - self._n_header_bytes)
            return self._lines.next(left, (431, f"header fields are longer than {limits.max_header_bytes} bytes"))
        # Other protocols, such as a TLS ClientHello, may have no line end: refuse at the first byte, not at a time-out.
        if self._lines and not re.match(rb"\r|" + TOKEN, self._lines.first()):
            raise Refusal(400, "request line does not begin with a method (RFC 9112 3)")
        self.is_head = self._lines.first(5) == b"HEAD "
        limit = limits.max_request_line
        return self._lines.next(limit, (414, f"request line is longer than {limit} bytes"))

    def _begin(self, line: bytes) -> None:
        # RFC 9112 2.2: at least one empty line before the request line should be ignored. This ignores one.
        if not line and not self._skipped_empty_line:
            self._skipped_empty_line = True
        else:
            self._request_line = parse_request_line(line)

    def _add_field(self, line: bytes) -> None:
        self._n_header_bytes += len(line) + 2
        if len(self._fields) >= self._limits.max_header_fields:
            raise Refusal(431, f"more than {self._limits.max_header_fields} header fields")
        self._fields.append(parse_field_line(line))


def parse_request_line(line: bytes) -> RequestLine:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise Refusal(400, "malformed request line (RFC 9112 3)")
    method, target, major, minor = (group.decode("ascii") for group in match.groups())
    if major != "1":
        raise Refusal(505, "only HTTP/1.0 and HTTP/1.1 are supported (RFC 9110 15.6.6)")
    # RFC 9110 2.5: a request with a higher minor version is handled as the highest known version.
    return RequestLine(method, target, "HTTP/1.0" if minor == "0" else "HTTP/1.1")


def parse_field_line(line: bytes) -> tuple[str, str]:
    """A header or trailer line. A leading blank (obs-fold) is not a token and so is refused (RFC 9112 5.2)."""
    match = _FIELD_LINE.fullmatch(line)
    if match is None:
        raise Refusal(400, "malformed header field (RFC 9112 5)")
    name, value = match.groups()
    return name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")


def judge(line: RequestLine, fields: Fields) -> Head:
    """Applies the rules that need the whole head. Their order decides which error is sent."""
    if line.method == "CONNECT":
        raise Refusal(501, "CONNECT is not implemented: this server is not a proxy (RFC 9110 9.3.6)")
    target = parse_target(line)
    # Host is required and checked even if the target has an authority of its own (RFC 9112 3.2).
    host = _host(line, fields)
    body = body_framing(line, fields)
    headers = _joined(fields)
    return Head(
        method=line.method,
        target=line.target,
        path=target.path,
        version=line.version,
        scheme=target.scheme,
        authority=host if target.authority is None else target.authority,
        headers=headers,
        body=body,
        keep_alive=_keep_alive(line.version, headers.get("connection", "")),
        # In HTTP/1.0, Expect must be ignored.
        expect=_expectation(headers.get("expect", "")) if line.version == "HTTP/1.1" else None,
    )


def parse_target(line: RequestLine) -> RequestTarget:
    """RFC 9112 3.2."""
    target = line.target
    if "#" in target:
        raise Refusal(400, "a request target has no fragment (RFC 9112 3.2)")
    if target == "*" and line.method == "OPTIONS":
        return RequestTarget("*")
    if target.startswith("/"):
        return RequestTarget(_decoded(target.partition("?")[0]))
    # A server must accept absolute-form; then the target's authority counts, not the Host field (RFC 9112 3.2.2).
    match = _ABSOLUTE_FORM.fullmatch(target)
    if match is None or not _HOST.fullmatch(match[2]):
        raise Refusal(400, "malformed request target (RFC 9112 3.2)")
    return RequestTarget(_decoded(match[3] or "/"), match[1].lower(), match[2].removesuffix(":"))


def _decoded(path: str) -> str:
    if _BAD_ESCAPE.search(path):
        raise Refusal(400, "malformed percent-escape in the path (RFC 3986 2.1)")
    try:
        text = unquote(_KEPT_ESCAPE.sub(lambda escape: "%25" + escape[1].upper(), path), errors="strict")
    except UnicodeDecodeError:
        raise Refusal(400, "the path is not UTF-8") from None
    if _CONTROL.search(text):
        raise Refusal(400, "control character in the path")
    return text


def _host(line: RequestLine, fields: Fields) -> str | None:
    """RFC 9112 3.2: a request without Host (HTTP/1.1), with two of them, or with an invalid one gets 400."""
    values = _values(fields, "host")
    if not values and line.version == "HTTP/1.0":
        return None
    if len(values) != 1:
        raise Refusal(400, "exactly one Host field is required (RFC 9112 3.2)")
    # An http URI with an empty host is invalid (RFC 9110 4.2.1).
    if not _HOST.fullmatch(values[0]):
        raise Refusal(400, "invalid Host field (RFC 9112 3.2)")
    return values[0].removesuffix(":")


def _expectation(value: str) -> str | None:
    """RFC 9110 10.1.1: a list, which may be empty or repeat a member; members are case-insensitive."""
    members = {member.strip(" \t") for member in value.lower().split(",")} - {""}
    return ", ".join(sorted(members)) or None


def body_framing(line: RequestLine, fields: Fields) -> BodyFraming:
    """RFC 9112 6.3. A repeated field is refused even if both are equal: another server may have read the other one."""
    lengths, codings = _values(fields, "content-length"), _values(fields, "transfer-encoding")
    if lengths and codings:
        raise Refusal(400, "Content-Length and Transfer-Encoding together (RFC 9112 6.1)")
    if len(lengths) > 1 or len(codings) > 1:
        raise Refusal(400, "repeated Content-Length or Transfer-Encoding (RFC 9112 6.3)")
    if codings:
        return _chunked(line, codings[0])
    if lengths:
        return _length(lengths[0])
    return None


def _chunked(line: RequestLine, coding: str) -> Literal["chunked"]:
    if line.version == "HTTP/1.0":
        raise Refusal(400, "Transfer-Encoding in an HTTP/1.0 request (RFC 9112 6.1)")
    if coding.lower() == "chunked":
        return "chunked"
    # RFC 9112 6.1: an unknown coding gets 501. A value that is not a list of codings, or has chunked twice, gets 400.
    if _CODING_LIST.fullmatch(coding) and coding.lower().count("chunked") < 2:
        raise Refusal(501, "chunked is the only transfer coding that is supported (RFC 9112 6.1)")
    raise Refusal(400, "malformed Transfer-Encoding field (RFC 9112 6.1)")


def _length(text: str) -> int:
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise Refusal(400, "Content-Length is not a decimal number (RFC 9110 8.6)")
    if len(match[1]) > _MAX_LENGTH_DIGITS:
        raise Refusal(413, "Content-Length is larger than any body limit")
    return int(match[1])


def _keep_alive(version: Version, connection: str) -> bool:
    """RFC 9112 9.3; "close" wins over all other members."""
    options = {option.strip(" \t") for option in connection.lower().split(",")}
    return "close" not in options and (version == "HTTP/1.1" or "keep-alive" in options)


def _values(fields: Fields, name: str) -> list[str]:
    return [value for field, value in fields if field == name]


def _joined(fields: Fields) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in fields:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
