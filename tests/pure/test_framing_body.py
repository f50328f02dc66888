"""Request bodies: each row is fed whole and one byte at a time, and must give the same verdict."""

from __future__ import annotations

import pytest

from mlx_serve.wire.body import BodyDecoder, ChunkedBody, LengthBody, body_decoder
from mlx_serve.wire.framing import FramingLimits, HeadReader, Refusal

LIMITS = FramingLimits(
    max_body_bytes=100,
    max_chunk_line=60,
    max_chunk_extension_bytes=80,
    max_trailer_bytes=50,
    max_chunk_overhead=400,
    chunk_cost=0,
)
ONE = b"5\r\nhello\r\n"
LAST = b"0\r\n\r\n"


def read(decoder: BodyDecoder, raw: bytes, step: int) -> tuple[bytes, bytes | None] | int:
    body = b""
    for at in range(0, len(raw), step):
        try:
            fed = decoder.feed(raw[at : at + step])
        except Refusal as refusal:
            return refusal.status
        body += fed.body
        if fed.leftover is not None:
            return body, fed.leftover + raw[at + step :]
    return body, None


def read_both_ways(raw: bytes) -> tuple[bytes, bytes | None] | int:
    whole, by_byte = read(ChunkedBody(LIMITS), raw, len(raw)), read(ChunkedBody(LIMITS), raw, 1)
    assert whole == by_byte
    return whole


ACCEPTED = [
    ("empty", LAST, b"", b""),
    ("one", ONE + LAST, b"hello", b""),
    ("two", ONE + b"1\r\n!\r\n" + LAST, b"hello!", b""),
    ("upper-case", b"A\r\n0123456789\r\n" + LAST, b"0123456789", b""),
    ("leading-zeros", b"0005\r\nhello\r\n000\r\n\r\n", b"hello", b""),
    ("sixteen-digits", b"0000000000000005\r\nhello\r\n0000000000000000\r\n\r\n", b"hello", b""),
    ("crlf-in-data", b"4\r\n\r\n\r\n\r\n" + LAST, b"\r\n\r\n", b""),
    ("pipelined", ONE + LAST + b"GET /", b"hello", b"GET /"),
    ("extension", b"5;a=b;flag\r\nhello\r\n0;last\r\n\r\n", b"hello", b""),
    ("quoted-extension", b'5;a="x;y \\" z"\r\nhello\r\n' + LAST, b"hello", b""),
    ("blanks-in-extension", b"5 ; a = b\r\nhello\r\n" + LAST, b"hello", b""),
    ("trailers", ONE + b"0\r\nX-A: b\r\nContent-Length: 7\r\n\r\nrest", b"hello", b"rest"),
    ("trailer-like-request", ONE + b"0\r\nX:POST / HTTP/1.1\r\n\r\n", b"hello", b""),
    ("exactly-the-limit", b"64\r\n" + b"a" * 100 + b"\r\n" + LAST, b"a" * 100, b""),
    ("of-one-byte", b"1\r\na\r\n" * 60 + LAST, b"a" * 60, b""),
]


@pytest.mark.parametrize(("raw", "body", "leftover"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_accepted(raw: bytes, body: bytes, leftover: bytes) -> None:
    assert read_both_ways(raw) == (body, leftover)


@pytest.mark.parametrize(
    "raw",
    [b"5", b"5\r", b"5\r\n", b"5\r\nhell", ONE[:-1], ONE, ONE + b"0\r\n", ONE + b"0\r\nX: y\r\n", ONE + b"0\r\n\r"],
)
def test_needs_more(raw: bytes) -> None:
    body, leftover = read(ChunkedBody(LIMITS), raw, 1)  # type: ignore[misc]  # a status would fail right here
    assert b"hello".startswith(body)
    assert leftover is None


REFUSED = [
    *[
        (f"size-{size!r}", ONE + size + b"\r\n     \r\n" + LAST, 400)
        for size in (
            b"",
            b"+5",
            b"-5",
            b"0x5",
            b"5_0",
            b" 5",
            b"\t5",
            b"5 ",
            b"5\t",
            b"5g",
            b"5.0",
            b"5,",
            b"5 5",
            b"5\0",
            b"--1",
            b"$5",
        )
    ],
    ("size-full-width", "\uff15\r\nhello\r\n".encode(), 400),
    ("size-17-digits", b"00000000000000005\r\nhello\r\n" + LAST, 400),
    ("size-64-bits", b"ffffffffffffffff\r\n", 413),
    ("negative-rewinds", ONE + b"-1\r\n\r\n" + LAST, 400),
    ("empty-line-first", b"\r\n" + ONE + LAST, 400),
    ("lf-after-size", b"5\nhello\r\n" + LAST, 400),
    ("lf-after-data", b"5\r\nhello\n" + LAST, 400),
    ("lf-after-last", ONE + b"0\n\n", 400),
    ("cr-after-size", b"5\rhello\r\n0\r\n", 400),
    ("cr-cr", ONE + b"5\r\r;abc\r\n", 400),
    ("nul-in-extension", b"5;a=\0\r\n", 400),
    ("cr-in-extension", b"5;a=b\rc\r\n", 400),
    ("lf-in-extension", b"5;\nxx\r\n", 400),
    ("extension-without-name", b"5;\r\n", 400),
    ("extension-without-value", b"5;a=\r\n", 400),
    ("extension-open-quote", b'5;a="b\r\n', 400),
    ("extension-semicolons", b"5;;;  ;\r\n", 400),
    ("data-too-long", b"4\r\nhello\r\n" + LAST, 400),
    ("data-too-short", b"6\r\nhello\r\n" + LAST, 400),
    ("junk-after-data", b"5\r\nhelloXX" + LAST, 400),
    ("trailer-without-colon", ONE + b"0\r\nnonsense\r\n\r\n", 400),
    ("trailer-blank-before-colon", ONE + b"0\r\nX : y\r\n\r\n", 400),
    ("trailer-fold", ONE + b"0\r\nX: y\r\n z\r\n\r\n", 400),
    ("trailer-nul", ONE + b"0\r\nX: a\0b\r\n\r\n", 400),
    ("trailer-cr", ONE + b"0\r\nX: a\rb\r\n\r\n", 400),
    ("trailer-lf", ONE + b"0\r\nX: y\n\n", 400),
    # limits
    ("chunk-over-the-limit", b"65\r\n", 413),
    ("chunks-over-the-limit", b"50\r\n" + b"a" * 80 + b"\r\n15\r\n", 413),
    ("endless-size-line", b"0" * 70, 400),
    ("long-extension", b"1;a=" + b"b" * 60 + b"\r\n", 400),
    ("extensions-in-sum", b"1;a=bbbbbbbb\r\nx\r\n" * 9 + LAST, 400),
    ("small-chunks", b"1;a\r\nx\r\n" * 99, 400),
    ("endless-trailer", ONE + b"0\r\nX: " + b"y" * 60, 431),
    ("many-trailers", ONE + b"0\r\n" + b"X: y\r\n" * 20 + b"\r\n", 431),
]


@pytest.mark.parametrize(("raw", "status"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(raw: bytes, status: int) -> None:
    assert read_both_ways(raw) == status


def test_many_tiny_chunks_cost_a_refusal_not_the_machine() -> None:
    limits = FramingLimits(max_chunk_overhead=1000, chunk_cost=0)
    assert read(ChunkedBody(limits), b"1\r\na\r\n" * 1000, 4096) == 400


@pytest.mark.parametrize("size", [1, 6, 60])
def test_small_chunks_cost_more_than_their_bytes(size: int) -> None:
    """Without it, chunks longer than their framing could be as many as the body has room for."""
    limits = FramingLimits(max_chunk_overhead=100_000)
    chunk = b"%x\r\n%b\r\n" % (size, b"a" * size)
    assert read(ChunkedBody(limits), chunk * 600, 4096) == 400
    few = read(ChunkedBody(limits), chunk * 300 + LAST, 4096)
    assert few == (b"a" * size * 300, b"")


def test_chunks_of_a_usual_size_cost_nothing() -> None:
    limits = FramingLimits(max_chunk_overhead=1000)
    chunk = b"400\r\n%b\r\n" % (b"a" * 1024)
    assert read(ChunkedBody(limits), chunk * 2000 + LAST, 65536) == (b"a" * 1024 * 2000, b"")


@pytest.mark.parametrize(
    ("n_bytes", "raw", "expected"),
    [
        (0, b"GET", (b"", b"GET")),
        (3, b"abc", (b"abc", b"")),
        (3, b"abcGET", (b"abc", b"GET")),
        (3, b"ab", (b"ab", None)),
    ],
)
def test_by_length(n_bytes: int, raw: bytes, expected: tuple[bytes, bytes | None]) -> None:
    assert read(LengthBody(n_bytes), raw, len(raw)) == read(LengthBody(n_bytes), raw, 1) == expected


def test_a_declared_length_over_the_limit_is_refused_before_the_body() -> None:
    head = HeadReader(LIMITS).feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 101\r\n\r\n")
    assert head is not None
    with pytest.raises(Refusal, match="100 bytes") as raised:
        body_decoder(head, LIMITS)
    assert raised.value.status == 413
