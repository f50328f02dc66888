"""Events per second through the whole server, and its processor time for each: no model, 64 streams.

    python -m benchmarks.events [--streams 64] [--tokens 400] [--rounds 3] [--quick] [--json FILE]

A fake backend gives each stream a token at every step, so everything counted is the server's: scheduling, detokenizing,
splitting, JSON, SSE, sockets. The client is another process, whose time is not counted. Once flat out (a step takes no
time, so the streams are served as fast as can be), once with a step of 50 ms as of a model, where the time that each
event costs says how much a model's own work is disturbed. Beside it runs a bare loop: threads that write the same bytes
and do nothing else. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import children, machine
from benchmarks.children import OURS, BenchmarkError
from benchmarks.options import parse
from benchmarks.report import markdown, spread
from mlx_serve.commands.bench.progress import note

BARE = "bare writes"
_MARK = b"data: {"
_END = b"0\r\n\r\n"
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Measure:
    """``cpu_s``: processor time of the server process alone, over the whole run."""

    seconds: float
    n_events: int
    n_bytes: int
    cpu_s: float
    others: float | None

    @property
    def rate(self) -> float:
        return self.n_events / self.seconds

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / self.n_events


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    step_ms: float


CASES = (Case("flat out", 0), Case("a step of 50 ms", 50))
Round = dict[str, Measure]


class Stream:
    """What came on one connection. The end of one piece may be the beginning of the next mark."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.n_events = 0
        self.n_bytes = 0
        self.status = b""
        self._tail = b""

    def take(self) -> bool:
        """Read what is there. False: that was all."""
        data = self.sock.recv(65536)
        if not data:
            raise BenchmarkError(f"a stream broke off after {self.n_events} events")
        if not self.status:
            self.status = data.split(b"\r\n", 1)[0]
            if b" 200 " not in self.status:
                raise BenchmarkError(f"the server answered {data[:500]!r}")
        text = self._tail + data
        self.n_bytes += len(data)
        self.n_events += text.count(_MARK)
        self._tail = text[-(len(_MARK) - 1) :]
        return not text.endswith(_END)


def run(command: list[str], options: argparse.Namespace) -> Measure:
    port = children.free_port()
    with children.running("fakeserver", [*command, "--port", str(port)], Path("fake"), port) as server:
        load(port, options.streams, 20)
        share = machine.watch_others([server.process.pid])
        cpu = machine.watch_process(server.process.pid)
        start = time.perf_counter()
        streams = load(port, options.streams, options.tokens)
        seconds = time.perf_counter() - start
        cpu_s = cpu()
        if cpu_s is None:
            raise BenchmarkError("processor time is known on Linux only")
        n_events = sum(stream.n_events for stream in streams)
        return Measure(seconds, n_events, sum(stream.n_bytes for stream in streams), cpu_s, share())


def load(port: int, n_streams: int, n_tokens: int) -> list[Stream]:
    """All streams at once, to their ends."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": n_tokens}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    selector = selectors.DefaultSelector()
    streams = [Stream(socket.create_connection((children.HOST, port))) for _ in range(n_streams)]
    try:
        for stream in streams:
            stream.sock.sendall(head + body)
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(_PATIENCE_S)
            if not ready:
                raise BenchmarkError(f"nothing came for {_PATIENCE_S:g} s")
            for key, _ in ready:
                if not key.data.take():
                    selector.unregister(key.fileobj)
    finally:
        selector.close()
        for stream in streams:
            stream.sock.close()
    return streams


def measure(case: Case, options: argparse.Namespace) -> Round:
    program = [sys.executable, "-m", "benchmarks.fakeserver", "--step-ms", str(case.step_ms)]
    ours = run([*program, "--streams", str(options.streams)], options)
    n_each = ours.n_events // options.streams
    each = ours.n_bytes // ours.n_events
    bare = run([*program, "--bare", str(each), "--tokens", str(n_each)], options)
    note(f"{case.name}: {ours.rate:.0f} events/s, {ours.cpu_us:.0f} us; bare {bare.rate:.0f}, {bare.cpu_us:.0f} us")
    return {OURS: ours, BARE: bare}


def table(results: dict[str, list[Round]]) -> str:
    rows = []
    for case, rounds in results.items():
        for name in (OURS, BARE):
            ms = [r[name] for r in rounds]
            size = f"{median(m.n_bytes / m.n_events for m in ms):.0f}"
            rows.append([f"{case}: {name}", spread([m.rate for m in ms], 0), spread([m.cpu_us for m in ms], 0), size])
        rows.append([f"{case}: ratio", "", spread(ratios(rounds)), ""])
    return markdown(["", "events/s", "CPU us/event", "bytes/event"], rows)


def ratios(rounds: list[Round]) -> list[float]:
    """Of processor time per event, over the bare loop's."""
    return [r[OURS].cpu_us / r[BARE].cpu_us for r in rounds]


def as_json(results: dict[str, list[Round]]) -> dict[str, Any]:
    return {
        case: {"rounds": [{n: asdict(m) for n, m in r.items()} for r in rounds], "cpu_ratios": ratios(rounds)}
        for case, rounds in results.items()
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.events", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="(default: 64)")
    parser.add_argument("--tokens", type=int, default=400, help="of a stream (default: 400)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    return parse(parser, tokens=100, rounds=1)


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    try:
        rounds = [{case.name: measure(case, options) for case in CASES} for _ in range(options.rounds)]
    except BenchmarkError as error:
        print(f"events: {error}", file=sys.stderr)
        return 1
    results = {case.name: [r[case.name] for r in rounds] for case in CASES}
    print(table(results))
    for line in machine.warnings([m.others for found in results.values() for r in found for m in r.values()]):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(as_json(results), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
