"""Reads heads and bodies from a channel, under deadlines: connects the sans-IO parsers with the clock.

Must not know routes or replies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mlx_serve.wire.body import BodyDecoder
from mlx_serve.wire.channel import Channel
from mlx_serve.wire.framing import FramingLimits, Head, HeadReader, Refusal
from mlx_serve.wire.server_options import ServerOptions


def receive_head(channel: Channel, limits: FramingLimits, raw: bytes, deadline: float) -> Head | Refusal | None:
    """``raw`` is the beginning of the head. None: the client ended without having begun a request."""
    reader = HeadReader(limits)
    try:
        while (head := reader.feed(raw)) is None:
            if not (raw := channel.read(deadline)):
                return _cut(reader, 400, "the connection ended inside the request head")
    except TimeoutError:
        return _cut(reader, 408, "the request head took too long")
    except Refusal as refusal:
        return refusal
    channel.leftover = reader.leftover
    return head


def _cut(reader: HeadReader, status: int, message: str) -> Refusal | None:
    return Refusal(status, message, to_head=reader.is_head) if reader.begun else None


def receive_body(
    channel: Channel, decoder: BodyDecoder, options: ServerOptions, timeout_s: float, hold: Callable[[int], None]
) -> bytes:
    """Calls ``hold`` with a number of bytes before they are kept; ``hold`` may raise."""
    started = time.monotonic()
    body = bytearray()
    n_received = 0
    while True:
        raw = _read(channel, started + min(timeout_s, _patience_s(options, n_received)))
        if not raw:
            raise Refusal(400, "the connection ended inside the request body (RFC 9112 8)")
        n_received += len(raw)
        fed = decoder.feed(raw)
        hold(len(fed.body))
        body += fed.body
        if fed.leftover is not None:
            channel.leftover = fed.leftover
            return bytes(body)


def _patience_s(options: ServerOptions, n_received: int) -> float:
    """How long an upload of that many bytes may have taken; each byte adds its time at the lowest rate."""
    if options.body_min_bytes_per_s <= 0:
        return math.inf
    return options.head_timeout_s + n_received / options.body_min_bytes_per_s


def _read(channel: Channel, deadline: float) -> bytes:
    try:
        return channel.read(deadline)
    except TimeoutError:
        raise Refusal(408, "the request body took too long") from None
