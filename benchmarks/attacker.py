"""One attacker: goes through all hostile requests and connections, again and again, until it is ended.

    python -m benchmarks.attacker --port PORT [--key KEY] [--crowd 600] [--seed 0]

Prints a line of JSON for each attack: its name, how it was answered, the seconds that it took. A program of its own, so
that what it costs its sender is not what its victims see.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks import hostile
from benchmarks.children import HOST, end_on_sigterm
from benchmarks.hostile import Hostile

# What a connection came to: a status, "hung up", "no answer", "refused".
Outcomes: TypeAlias = Sequence[str]

# An answer that has not come by then is not waited for: leaving in the middle of the work is a part of the attack.
_PATIENCE_S = 10.0
_HOLD_S = 3.0
_PAUSE_S = 0.1
# With a linger time of 0 closing sends a reset.
_LINGER_0 = b"\x01\0\0\0\0\0\0\0"
_PIECE = 2**16
_STATUS = re.compile(rb"^HTTP/1\.1 (\d{3})", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to attack. Some attacks come without the key."""

    port: int
    key: str
    n_crowd: int
    dice: random.Random

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=_PATIENCE_S)

    def head(self, *fields: str, path: str = hostile.CHAT, key: bool = True) -> bytes:
        """A request's head without its end."""
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", *fields]
        if key and self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "".join(f"{line}\r\n" for line in lines).encode()


def send(target: Target, request: Hostile) -> Outcomes:
    """A whole request, and its answer if that comes soon."""
    raw = request.body()
    head = target.head(f"Content-Length: {len(raw)}", "Connection: close", path=request.path) + b"\r\n"
    with target.connect() as sock:
        return [exchange(sock, head + raw)]


def exchange(sock: socket.socket, raw: bytes) -> str:
    """The status of the answer, which may come before all was sent."""
    with suppress(ConnectionError):
        sock.sendall(raw)
    return status_of(sock)


def status_of(sock: socket.socket) -> str:
    """Reads to the end of the answer, or for as long as the attacker is patient."""
    deadline, first = time.monotonic() + _PATIENCE_S, b""
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            sock.settimeout(left_s)
            piece = sock.recv(_PIECE)
            if not piece:
                break
            first = (first + piece)[:_PIECE]
    except TimeoutError:
        return status_in(first) or "no answer"
    except ConnectionError:
        pass
    return status_in(first) or "hung up"


def status_in(reply: bytes) -> str:
    """The status of a reply's beginning; an interim one (100) only when nothing came behind it."""
    statuses = _STATUS.findall(reply)
    final = [status for status in statuses if not status.startswith(b"1")]
    return str((final or statuses or [b""])[0], "ascii")


def crowd(target: Target, begin: bytes, drip: bytes, n: int | None = None) -> Outcomes:
    """Many connections at once that begin a request and then send a byte or so each second."""
    outcomes = []
    with ExitStack() as stack:
        socks = []
        for _ in range(n or target.n_crowd):
            try:
                sock = stack.enter_context(target.connect())
                sock.sendall(begin)
                socks.append(sock)
            except OSError as error:
                outcomes.append("refused" if isinstance(error, ConnectionError) else type(error).__name__)
        end = time.monotonic() + _HOLD_S
        while time.monotonic() < end:
            time.sleep(1.0)
            for sock in socks:
                with suppress(OSError):  # evicted, which is what the server should do
                    sock.sendall(drip)
        outcomes += [at_once(sock) for sock in socks]
    return outcomes


def at_once(sock: socket.socket) -> str:
    """What has come by now."""
    sock.setblocking(False)
    try:
        reply = sock.recv(_PIECE)
    except BlockingIOError:
        return "held"
    except OSError:
        return "hung up"
    return status_in(reply) or "hung up"


def slow_heads(target: Target) -> Outcomes:
    return crowd(target, b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a")


def silent(target: Target) -> Outcomes:
    return crowd(target, b"", b"")


def slow_bodies(target: Target) -> Outcomes:
    return crowd(target, target.head("Content-Length: 30000") + b"\r\n{", b" ")


def slow_bodies_without_a_key(target: Target) -> Outcomes:
    return crowd(target, target.head("Content-Length: 30000", key=False) + b"\r\n{", b" ")


def malformed_and_held(target: Target) -> Outcomes:
    return crowd(target, target.head("No Colon Here") + b"\r\n", b"x")


def stranger(target: Target) -> Outcomes:
    return crowd(target, b"\x16\x03\x01\x02\x00\x01\x00", b"\0", n=16)


def tiny_chunks(target: Target) -> Outcomes:
    """Chunks of one byte: six bytes on the wire for each."""
    head = target.head("Transfer-Encoding: chunked", "Connection: close") + b"\r\n"
    with target.connect() as sock:
        return [exchange(sock, head + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n")]


def refused_bodies(target: Target) -> Outcomes:
    """Bodies that no server takes, and megabytes of them all the same."""
    outcomes = []
    for head in (
        target.head("Content-Length: 99999999999"),
        target.head("Content-Length: 20000000", key=False),
        target.head("Content-Length: 20000000", path="/nowhere"),
        target.head("Content-Length: 20000000", "Expect: 100-continue"),
        target.head("Content-Length: 5", "Transfer-Encoding: chunked"),
    ):
        with target.connect() as sock:
            outcomes.append(exchange(sock, head + b"\r\n" + b"x" * 20_000_000))
    return outcomes


def half_open(target: Target) -> Outcomes:
    """The client's side is shut in the middle of the body, or behind it."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}).encode()
    outcomes = []
    for n in (0, len(body) // 2, len(body)):
        with target.connect() as sock:
            sock.sendall(target.head(f"Content-Length: {len(body)}", "Connection: close") + b"\r\n" + body[:n])
            sock.shutdown(socket.SHUT_WR)
            outcomes.append(status_of(sock))
    return outcomes


def hang_ups(target: Target) -> Outcomes:
    """A reset in the head, in the body, and in the answer's stream."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 500, "stream": True}
    ).encode()
    raw = target.head(f"Content-Length: {len(body)}") + b"\r\n" + body
    for _ in range(20):
        with target.connect() as sock:
            n = target.dice.choice([target.dice.randrange(len(raw)), len(raw)])
            sock.sendall(raw[:n])
            if n == len(raw) and target.dice.random() < 0.7:
                sock.recv(_PIECE)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    return ["left"] * 20


def garbled(target: Target) -> Outcomes:
    """Good requests with a few bytes changed, cut or doubled."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
    good = target.head(f"Content-Length: {len(body)}", "Connection: close") + b"\r\n" + body
    outcomes = []
    for _ in range(20):
        raw = bytearray(good)
        for _ in range(target.dice.randint(1, 8)):
            raw[target.dice.randrange(len(raw))] = target.dice.randrange(256)
        with target.connect() as sock:
            with suppress(OSError):  # refused before its end
                sock.sendall(raw)
                sock.shutdown(socket.SHUT_WR)
            outcomes.append(status_of(sock))
    return outcomes


def stored(target: Target) -> Outcomes:
    """A large response is kept, and short requests refer to it again and again."""
    turns = [{"role": "user", "content": "hi"}] * 10_000
    first = Hostile(hostile.RESPONSES, lambda: json.dumps({"input": turns, "max_output_tokens": 16}).encode())
    raw = first.body()
    with target.connect() as sock:
        head = target.head(f"Content-Length: {len(raw)}", "Connection: close", path=hostile.RESPONSES)
        with suppress(ConnectionError):
            sock.sendall(head + b"\r\n" + raw)
        sock.settimeout(_PATIENCE_S)
        try:
            reply = b"".join(iter(lambda: sock.recv(_PIECE), b""))
        except OSError:
            return ["no answer"]
    found = reply.partition(b'"id":')[2].lstrip()[1:].partition(b'"')[0].decode("ascii", "replace")
    again = {"input": "hi", "previous_response_id": found, "max_output_tokens": 16}
    request = Hostile(hostile.RESPONSES, lambda: json.dumps(again).encode())
    return [status_in(reply), *(send(target, request)[0] for _ in range(5))]


CONNECTIONS: dict[str, Callable[[Target], Outcomes]] = {
    "slow heads": slow_heads,
    "silent connections": silent,
    "slow bodies": slow_bodies,
    "slow bodies without a key": slow_bodies_without_a_key,
    "malformed and held open": malformed_and_held,
    "TLS on a plain port": stranger,
    "chunks of one byte": tiny_chunks,
    "refused bodies": refused_bodies,
    "half-open": half_open,
    "hang-ups": hang_ups,
    "garbled requests": garbled,
    "a stored response": stored,
}


def attacks(target: Target) -> Iterator[tuple[str, Callable[[], Outcomes]]]:
    """All of them in a new order, and again."""
    todo: dict[str, Callable[[], Outcomes]] = {}
    for name, connect in CONNECTIONS.items():
        todo[name] = lambda connect=connect: connect(target)  # type: ignore[misc]
    for name, request in hostile.REQUESTS.items():
        todo[name] = lambda request=request: send(target, request)  # type: ignore[misc]
    while True:
        yield from target.dice.sample(list(todo.items()), len(todo))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", default="")
    parser.add_argument("--crowd", type=int, default=600, help="connections at a time of those attacks that need many")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end_on_sigterm()
    # Of this machine's processors the attacker should take what nobody wants.
    os.nice(10)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    target = Target(args.port, args.key, args.crowd, random.Random(args.seed))
    for name, attack in attacks(target):
        start = time.monotonic()
        try:
            outcomes: Outcomes = attack()
        except OSError as error:
            outcomes = [type(error).__name__]
        took_s = time.monotonic() - start
        print(json.dumps({"name": name, "seconds": took_s, "outcomes": Counter(outcomes)}), flush=True)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
