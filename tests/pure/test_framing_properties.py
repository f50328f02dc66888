"""What must hold for any bytes, cut anywhere: one verdict, only Refusal raised, nothing held above the limits."""

from __future__ import annotations

import sys
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.wire.body import ChunkedBody, body_decoder
from mlx_serve.wire.framing import FramingLimits, HeadReader, Refusal

LIMITS = FramingLimits(
    max_request_line=80,
    max_header_bytes=160,
    max_header_fields=5,
    max_body_bytes=64,
    max_chunk_line=40,
    max_chunk_extension_bytes=50,
    max_trailer_bytes=40,
)

# Pieces that come near to a request, so that more than the first rule is met.
PIECES = st.sampled_from([
    b"GET ", b"POST ", b"/", b"/%2F", b"%", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"Host: a\r\n", b"Content-Length: ",
    b"5\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"\r\n", b"\r", b"\n", b" ", b"\t", b":",
    b"0\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b";a=b", b';a="', b"\0", b"\xff", b"X: y\r\n",
])  # fmt: skip
NEAR_REQUESTS = st.lists(PIECES | st.binary(max_size=4), max_size=30).map(b"".join)
BODIES = st.builds(
    lambda head, rest: head + rest,
    st.sampled_from([
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n",
    ]),
    NEAR_REQUESTS,
)  # fmt: skip
CUTS = st.lists(st.integers(1, 12), max_size=40)


def pieces(raw: bytes, cuts: list[int]) -> list[bytes]:
    cut = []
    for n_bytes in cuts:
        cut.append(raw[:n_bytes])
        raw = raw[n_bytes:]
    return [piece for piece in [*cut, raw] if piece]


def verdict(fed: list[bytes]) -> object:
    """What a server would make of these bytes: a status, or all requests in them and whether more is awaited."""
    requests: list[object] = []
    waiting = list(fed)
    while waiting:
        reader = HeadReader(LIMITS)
        try:
            head = None
            while head is None:
                if not waiting:
                    return requests, "in head"
                head = reader.feed(waiting.pop(0))
            decoder = body_decoder(head, LIMITS)
            waiting.insert(0, reader.leftover)
            body, leftover = b"", None
            while leftover is None:
                if not waiting:
                    return requests, head, body, "in body"
                got = decoder.feed(waiting.pop(0))
                body, leftover = body + got.body, got.leftover
        except Refusal as refusal:
            return requests, refusal.status, refusal.message
        assert len(body) <= LIMITS.max_body_bytes
        requests.append((head, body))
        waiting = [leftover, *waiting] if leftover else waiting
    return requests, "done"


@given(NEAR_REQUESTS | BODIES, CUTS)
def test_any_cut_gives_the_same_verdict(raw: bytes, cuts: list[int]) -> None:
    if raw:
        assert verdict(pieces(raw, cuts)) == verdict([raw])


@given(st.binary(max_size=400), st.integers(1, 50))
def test_arbitrary_bytes_raise_nothing_but_a_refusal(raw: bytes, step: int) -> None:
    fed = [raw[at : at + step] for at in range(0, len(raw), step)]
    verdict(fed)
    chunked = ChunkedBody(LIMITS)
    with suppress(Refusal):
        for piece in fed:
            chunked.feed(piece)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=10), st.integers(1, 30))
def test_what_is_encoded_in_chunks_comes_back(parts: list[bytes], step: int) -> None:
    limits = FramingLimits()
    raw = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\nrest"
    decoder, body, leftover = ChunkedBody(limits), b"", b""
    for at in range(0, len(raw), step):
        fed = decoder.feed(raw[at : at + step])
        body += fed.body
        if fed.leftover is not None:
            leftover = fed.leftover + raw[at + step :]
            break
    assert (body, leftover) == (b"".join(parts), b"rest")


def held_bytes(reader: HeadReader | ChunkedBody) -> int:
    return sys.getsizeof(reader._lines._raw)


@given(st.sampled_from([b"a", b"\r", b"X: y\r\n", b"0", b";"]), st.integers(1, 64))
def test_a_reader_holds_no_more_than_its_limit_and_a_piece(filler: bytes, n_fillers: int) -> None:
    head, chunked = HeadReader(LIMITS), ChunkedBody(LIMITS)
    piece = filler * n_fillers
    for reader, opening in ((head, b"GET / HTTP/1.1\r\nX: "), (chunked, b"1")):
        with suppress(Refusal):
            reader.feed(opening)
            for _ in range(200):
                reader.feed(piece)
                # A bytearray grows by an eighth more than it needs.
                assert held_bytes(reader) < 2 * (LIMITS.max_header_bytes + len(piece)) + 100
