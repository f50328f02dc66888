"""Two thousand clients of every bad sort, with good ones among them: nothing may be left of them."""

from __future__ import annotations

import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from mlx_serve.wire.framing import FramingLimits
from tests.sockets.wirekit import Running, chunked, get, post, post_head, serving
from tests.waiting import until

N_CLIENTS = 2000
REQUESTS = (
    get(),
    post(b"/echo", b"x" * 5000),
    chunked(b"/echo", b"x" * 3000, b"y" * 3000),
    post_head(b"/echo", b"Expect: 100-continue", b"Content-Length: 10") + b"0123456789",
    post_head(b"/echo", b"Content-Length: 999999999"),
    post_head(b"/nope", b"Content-Length: 100000") + b"x" * 100000,
    post(b"/flood"),
    b"GET /hello HTTP/1.1\r\nHost: a\r\nX Y: z\r\n\r\n",
    b"\x16\x03\x01\x02",
)


def n_descriptors() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    pytest.skip("descriptors cannot be counted here")


def misbehave(running: Running, dice: random.Random) -> None:
    """Sends a part of a request in dribbles, perhaps reads a little, and leaves in one of three ways."""
    raw = dice.choice(REQUESTS)
    raw = raw[: dice.randint(0, len(raw))] if dice.random() < 0.7 else raw
    client = running.connect()
    with suppress(OSError):  # the server may be done with us before we are with it
        for _ in range(dice.randint(1, 4)):
            cut = dice.randint(0, len(raw))
            client.send(raw[:cut])
            raw = raw[cut:]
        if dice.random() < 0.3:
            client.half_close()
            client.sock.settimeout(0.05)
            client.sock.recv(1000)
    client.reset() if dice.random() < 0.5 else client.sock.close()


def behave(running: Running, number: int) -> None:
    body = b"%d" % number * 100
    with running.connect() as client:
        assert client.send(post(b"/echo", body)).reply().body == body
        assert client.send(chunked(b"/echo", body, body)).reply().body == body * 2


def one_client(running: Running, number: int) -> None:
    if number % 10 == 0:
        behave(running, number)
    else:
        misbehave(running, random.Random(number))


@pytest.mark.slow
def test_nothing_is_left_of_two_thousand_bad_clients() -> None:
    n_threads = threading.active_count()
    options = {"head_timeout_s": 3.0, "body_timeout_s": 3.0, "write_timeout_s": 1.0, "linger_s": 0.1}
    with serving(limits=FramingLimits(max_body_bytes=200_000), max_connections=400, **options) as running:
        behave(running, 1)
        running.empty()
        before = n_descriptors()
        with ThreadPoolExecutor(32) as pool:
            for done in [pool.submit(one_client, running, number) for number in range(N_CLIENTS)]:
                done.result(timeout=60)
        running.empty()
        behave(running, 1)
        running.empty()
        # Those that were turned away are closed a moment later.
        until(lambda: n_descriptors() <= before, "no open file more than before")
        # The loop, and nothing else.
        until(lambda: threading.active_count() <= n_threads + 1, "no thread more than before")
    assert socket.getdefaulttimeout() is None
