"""Clients that hang up at random points: how long until each one's place is free, and what is left of them at the end.

    python -m benchmarks.disconnects [--model DIR] [--clients 1000] [--quick] [--json FILE]

One client at a time asks for long answers and goes, with a FIN or a reset, at a random moment: while its request is
being tokenized, waits, is prefilled or decoded, streamed or not. Others stream meanwhile; in every other block they
take all places, so that those who hang up were waiting. A place is free when the request's line is in the server's log
and /health counts no more than the others. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import children, machine
from benchmarks.asking import figures
from benchmarks.children import OURS, BenchmarkError, Server
from benchmarks.options import parse
from benchmarks.prompts import Prompts
from benchmarks.report import Ratio, markdown, ratio_table
from mlx_serve.commands.bench.progress import note
from mlx_serve.commands.bench.stats import percentile

PLACES = 4
# Streams that go on beside those who hang up; as many as there are places: those wait in the queue.
_BESIDE = {"beside others": 2, "behind others": PLACES}
_BLOCK = 25
_POLL_S = 0.01
_PATIENCE_S = 120.0
_LINGER_0 = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Departure:
    """``after_s``: from sending the request to hanging up; ``n_bytes`` had come; ``free_s``: from then until free."""

    where: str
    after_s: float
    n_bytes: int
    free_s: float


@dataclass(frozen=True, slots=True)
class Result:
    departures: list[Departure]
    before: dict[str, int]
    after: dict[str, int]
    others: float | None


class Log:
    """What the server wrote, without moving the place at which it writes: the file is shared with it."""

    def __init__(self, server: Server) -> None:
        self._file = server.log.fileno()
        self._at = os.fstat(self._file).st_size
        self._text = b""

    def tells_of(self, request_id: str) -> bool:
        while piece := os.pread(self._file, 1 << 16, self._at):
            self._at += len(piece)
            self._text = (self._text + piece)[-(1 << 17) :]
        return f"id={request_id} ".encode() in self._text


class Leaver:
    """Sends requests and hangs up."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server = server
        self._dice = random.Random(options.seed)
        self._prompts = Prompts(options.seed)
        self._options = options
        self._log = Log(server)

    def leave(self, where: str, n_beside: int) -> Departure:
        dice = self._dice
        request_id = f"leaver-{self._prompts.serial()}"
        body = {
            "messages": self._prompts.story(dice.choice([20, 200, self._options.words])),
            "max_tokens": 512,
            "ignore_eos": True,
            "stream": dice.random() < 0.5,
            "n": dice.choice([1, 1, 2]),
        }
        start = time.perf_counter()
        with opened(self._server, body, request_id) as client:
            n_bytes = read_until(client, start + dice.uniform(0, self._options.stay))
            if dice.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        gone = time.perf_counter()
        wait_until(
            lambda: self._log.tells_of(request_id) and occupied(self._server) <= n_beside, f"{request_id} to be gone"
        )
        return Departure(where, gone - start, n_bytes, time.perf_counter() - gone)


@contextmanager
def opened(server: Server, body: dict[str, Any], request_id: str) -> Iterator[socket.socket]:
    """A connection on which a request was sent."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {request_id}\r\n"
    with socket.create_connection((children.HOST, server.port), timeout=_PATIENCE_S) as client:
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        yield client


def read_until(client: socket.socket, deadline: float) -> int:
    """How many bytes came."""
    n_bytes = 0
    while (left_s := deadline - time.perf_counter()) > 0:
        client.settimeout(left_s)
        try:
            data = client.recv(65536)
        except TimeoutError:
            break
        if not data:
            raise BenchmarkError("the server hung up first")
        if not n_bytes and b" 200 " not in data[:20]:
            raise BenchmarkError(f"the server answered {data[:500]!r}")
        n_bytes += len(data)
    return n_bytes


def occupied(server: Server) -> int:
    health = figures(server, "/health")
    return int(health["running"]) + int(health["waiting"])


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"waited {_PATIENCE_S:g} s for {what}")
        time.sleep(_POLL_S)


@contextmanager
def beside(server: Server, prompts: Prompts, n_streams: int) -> Iterator[list[socket.socket]]:
    """So many streams, decoding."""
    with ExitStack() as stack:
        clients = []
        for _ in range(n_streams):
            body = {"messages": prompts.story(20), "max_tokens": 4000, "ignore_eos": True, "stream": True}
            client = stack.enter_context(opened(server, body, f"beside-{prompts.serial()}"))
            if not client.recv(65536):
                raise BenchmarkError("the server hung up on a stream")
            clients.append(client)
        yield clients
    wait_until(lambda: occupied(server) == 0, "the other streams to end")


def drain(clients: Sequence[socket.socket]) -> None:
    """Take what has come, or the server would hang up on them for not reading."""
    for client in clients:
        client.setblocking(False)
        with suppress(BlockingIOError):
            while data := client.recv(65536):
                if data.endswith(b"0\r\n\r\n"):
                    raise BenchmarkError("the other streams ended too early")


def depart(server: Server, leaver: Leaver, options: argparse.Namespace, n_clients: int) -> list[Departure]:
    prompts = Prompts(options.seed + 1)
    departures: list[Departure] = []
    while len(departures) < n_clients:
        for where, n_beside in _BESIDE.items():
            n = min(_BLOCK, n_clients - len(departures))
            if not n:
                break
            with beside(server, prompts, n_beside) as others:
                for _ in range(n):
                    departures.append(leaver.leave(where, n_beside))
                    drain(others)
            note(f"{len(departures)} clients have left, the last {n} {where}")
    return departures


def settled(server: Server) -> dict[str, int]:
    """What the process holds when for a second no thread or descriptor has come or gone, or the time is up."""
    deadline = time.monotonic() + _PATIENCE_S
    now = machine.holds(server.process.pid)
    while time.monotonic() < deadline:
        time.sleep(1)
        then, now = now, machine.holds(server.process.pid)
        if (then["threads"], then["descriptors"]) == (now["threads"], now["descriptors"]):
            break
    return now


def measure(model: Path, options: argparse.Namespace) -> Result:
    port = children.free_port()
    # Without kept prefixes, whose memory could not be told from a leak.
    flags = ("--decode-concurrency", str(PLACES), "--prompt-cache-size", "0")
    with children.running(OURS, children.our_command(model, port, *flags), model, port) as server:
        leaver = Leaver(server, options)
        depart(server, leaver, options, min(2 * _BLOCK, options.clients))
        before = settled(server)
        share = machine.watch_others([server.process.pid])
        departures = depart(server, leaver, options, options.clients)
        others = share()
        return Result(departures, before, settled(server), others)


def table(result: Result) -> str:
    rows = []
    for where in _BESIDE:
        found = sorted(d.free_s for d in result.departures if d.where == where)
        if found:
            cells = [f"{value:.2f}" for value in (median(found), percentile(found, 99), found[-1])]
            rows.append([where, str(len(found)), *cells])
    return markdown(["", "clients", "free after s, median", "p99", "most"], rows)


def leaks(result: Result) -> str:
    rows = [[name, str(value), str(result.after[name])] for name, value in result.before.items()]
    return markdown(["held", "after the warm-up", "at the end"], rows)


def ratios(result: Result) -> list[Ratio]:
    times = sorted(d.free_s for d in result.departures)
    before, after = result.before, result.after
    wanted = (("threads", 1), ("descriptors", 1), ("rss", 1.05))
    return [
        Ratio("p99 of the time until a place is free, over 1 s", [percentile(times, 99)], 1),
        *(Ratio(f"{name} at the end, over before", [after[name] / before[name]], most) for name, most in wanted),
    ]


def as_json(result: Result) -> dict[str, Any]:
    return asdict(result) | {"ratios": {ratio.name: ratio.values for ratio in ratios(result)}}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disconnects", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--clients", type=int, default=1000, help="that hang up (default: 1000)")
    parser.add_argument("--stay", type=float, default=1.5, help="seconds that they stay at most (default: 1.5)")
    parser.add_argument("--words", type=int, default=1500, help="of the longest prompts (default: 1500)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    return parse(parser, clients=30, stay=0.5, words=300)


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    try:
        result = measure(model, options)
    except BenchmarkError as error:
        print(f"disconnects: {error}", file=sys.stderr)
        return 1
    print(table(result), leaks(result), ratio_table(ratios(result)), sep="\n\n")
    for line in machine.warnings([result.others]):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(as_json(result), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
