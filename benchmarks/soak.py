"""Good clients of a server for any length of time, without and with an attacker beside them.

    python -m benchmarks.soak [--minutes 15] [--attack] [--rounds 3] [--clients 4] [--model DIR] [--quick] [--json FILE]

The clients ask in all dialects, streaming or not, and some leave. With ``--attack`` each round has as long again with
one attacker (attacker.py), and the ratios say what it did to the good clients: the 99th percentile of the gaps in their
streams, and their first token. Told besides: deaths, answers of 500 and more, and what the server's process and its
children held. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks import children, machine
from benchmarks.attacker import CONNECTIONS
from benchmarks.children import OURS, ROOT, BenchmarkError, Server
from benchmarks.hostile import REQUESTS
from benchmarks.options import parse
from benchmarks.report import Ratio, markdown, ratio_table
from benchmarks.traffic import Traffic, Visit
from mlx_serve.commands.bench.progress import note
from mlx_serve.commands.bench.stats import percentile

KEY = "soak"
QUIET, ATTACKED = "quiet", "attacked"
# What an attacker may at most do to the others.
WANTED = 2.0
_LOOK_S = 0.5
_SETTLE_S = 60.0
_WARM_UP_S = 10.0


@dataclass(slots=True)
class Phase:
    """What was seen with one kind of company. ``peaks``: the most that the server held."""

    kind: str
    visits: list[Visit] = field(default_factory=list)
    attacks: list[dict[str, Any]] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def n_answered(self) -> int:
        return sum(visit.outcome == "answered" for visit in self.visits)

    @property
    def gaps_s(self) -> list[float]:
        return sorted(chain.from_iterable(visit.gaps_s for visit in self.visits))

    @property
    def firsts_s(self) -> list[float]:
        return sorted(visit.first_s for visit in self.visits if visit.first_s is not None)


@dataclass(slots=True)
class Result:
    """All phases in their order; what the server held before, and when all had ended; what its log says."""

    phases: list[Phase]
    before: dict[str, int]
    after: dict[str, int]
    deaths: int = 0
    tracebacks: int = 0
    last_words: str = ""

    def joined(self, kind: str) -> Phase:
        """All rounds of one kind as one."""
        found = [phase for phase in self.phases if phase.kind == kind]
        peaks: dict[str, int] = {}
        for phase in found:
            peaks |= {name: max(value, peaks.get(name, 0)) for name, value in phase.peaks.items()}
        return Phase(
            kind,
            [visit for phase in found for visit in phase.visits],
            [attack for phase in found for attack in phase.attacks],
            [seconds for phase in found for seconds in phase.health_s],
            peaks,
        )


def held(server: Server) -> dict[str, int]:
    """What the server's process holds, and its children together."""
    pid = server.process.pid
    return {**machine.holds(pid), **machine.children(pid)}


class Monitor(Thread):
    """Looks at the server now and then: what it holds, and how long /health takes."""

    def __init__(self, server: Server, phase: Phase) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._phase = phase
        self._ended = Event()

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S) and self._server.process.poll() is None:
            try:
                now = held(self._server)
            except OSError:  # it has ended since
                return
            self._phase.peaks |= {name: max(value, self._phase.peaks.get(name, 0)) for name, value in now.items()}
            start = time.monotonic()
            if children.healthy(self._server.port):
                self._phase.health_s.append(time.monotonic() - start)
            else:
                self._phase.health_s.append(float("inf"))

    def stop(self) -> None:
        self._ended.set()
        self.join()


@contextmanager
def attacker(server: Server, phase: Phase, options: argparse.Namespace, seed: int) -> Iterator[None]:
    """Attacks until the block ends."""
    flags = ["--port", str(server.port), "--key", KEY, "--crowd", str(options.crowd), "--seed", str(seed)]
    command = [sys.executable, "-m", "benchmarks.attacker", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = process.stdout
        reader = Thread(target=lambda: phase.attacks.extend(map(json.loads, lines)), daemon=True)
        reader.start()
        try:
            yield
        finally:
            children.end(process)
            reader.join()


def run_phase(server: Server, kind: str, seconds: float, options: argparse.Namespace, seed: int) -> Phase:
    phase = Phase(kind)
    traffic, monitor = Traffic(server.port, KEY, options.clients, seed), Monitor(server, phase)
    monitor.start()
    traffic.start()
    try:
        if kind == ATTACKED:
            with attacker(server, phase, options, seed):
                wait(server, seconds)
        else:
            wait(server, seconds)
    finally:
        traffic.stop()
        monitor.stop()
        phase.visits = traffic.visits
    return phase


def wait(server: Server, seconds: float) -> None:
    """Until the time is up, or the server has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
        time.sleep(_LOOK_S)


def settled(server: Server, before: Mapping[str, int] | None = None) -> dict[str, int]:
    """What the server holds when nothing more is given back, or the time is up."""
    end = time.monotonic() + _SETTLE_S
    now = held(server)
    while time.monotonic() < end:
        time.sleep(2.0)
        then, now = now, held(server)
        counts = ("threads", "descriptors", "children")
        if before is not None and all(now[name] <= before[name] for name in counts):
            break
        if before is None and all(now[name] == then[name] for name in counts):
            break
    return now


def measure(model: Path, options: argparse.Namespace) -> Result:
    port = children.free_port()
    flags = ("--api-key", KEY, "--log-level", "INFO", *options.flag)
    kinds = [QUIET, ATTACKED] if options.attack else [QUIET]
    with children.running(OURS, children.our_command(model, port, *flags), model, port) as server:
        run_phase(server, QUIET, min(_WARM_UP_S, options.minutes * 60), options, options.seed)
        alive(server)
        before = settled(server)
        result = Result([], before, before)
        try:
            for number in range(options.rounds):
                for kind in kinds:
                    seed = options.seed + number + 1
                    result.phases.append(run_phase(server, kind, options.minutes * 60 / options.rounds, options, seed))
                    alive(server)
                    note(f"round {number + 1}, {kind}: {len(result.phases[-1].visits)} requests")
                    result.after = settled(server, before)
        except (BenchmarkError, OSError) as error:
            result.deaths, result.last_words = 1, str(error)
        result.tracebacks = log_of(server).count(b"Traceback (most recent call last)")
        return result


def alive(server: Server) -> None:
    """Raises BenchmarkError."""
    status = server.process.poll()
    if status is not None:
        raise BenchmarkError(f"status {status}: {log_of(server).decode(errors='replace')[-2000:]}")


def log_of(server: Server) -> bytes:
    """All that the server wrote. The file's place is the server's own: it must not move while that one writes."""
    log = server.log.fileno()
    return os.pread(log, os.fstat(log).st_size, 0)


def table(result: Result, kinds: Sequence[str]) -> str:
    """How the good clients fared."""
    rows = []
    for phase in map(result.joined, kinds):
        outcomes = Counter(visit.outcome for visit in phase.visits)
        bad = sum(visit.status >= 500 for visit in phase.visits)
        times = [(phase.firsts_s, 50), (phase.firsts_s, 99), (phase.gaps_s, 50), (phase.gaps_s, 99)]
        cells = [f"{percentile(values, share):.3f}" if values else "-" for values, share in times]
        slowest = f"{max(phase.health_s, default=0):.2f}"
        counts = [len(phase.visits), outcomes["answered"], outcomes["left"], outcomes["failed"], bad]
        rows.append([phase.kind, *map(str, counts), *cells, slowest])
    heads = ["good clients", "requests", "answered", "left", "failed", "5xx", "first token s, p50", "p99"]
    return markdown([*heads, "gap s, p50", "p99", "/health s, most"], rows)


def ratios(result: Result) -> list[Ratio]:
    """Attacked over quiet, in each round."""
    quiet, attacked = (
        [phase for phase in result.phases if phase.kind == kind and phase.gaps_s] for kind in (QUIET, ATTACKED)
    )
    pairs = list(zip(quiet, attacked, strict=False))
    return [
        Ratio("p99 gap", [percentile(b.gaps_s, 99) / percentile(a.gaps_s, 99) for a, b in pairs], WANTED),
        Ratio("first token, p50", [percentile(b.firsts_s, 50) / percentile(a.firsts_s, 50) for a, b in pairs], WANTED),
        Ratio("first token, p99", [percentile(b.firsts_s, 99) / percentile(a.firsts_s, 99) for a, b in pairs], WANTED),
        Ratio(
            "requests answered, quiet over attacked", [a.n_answered / max(1, b.n_answered) for a, b in pairs], WANTED
        ),
    ]


def held_table(result: Result, kinds: Sequence[str]) -> str:
    """What the server held."""
    peaks = [result.joined(kind).peaks for kind in kinds]
    rows = [
        [name, str(value), *(str(peak.get(name, "-")) for peak in peaks), str(result.after[name])]
        for name, value in result.before.items()
    ]
    return markdown(["the server held", "after the warm-up", *(f"most, {kind}" for kind in kinds), "at the end"], rows)


def attack_table(attacks: Sequence[Mapping[str, Any]]) -> str:
    """How each attack was answered."""
    rows = []
    for name in sorted({attack["name"] for attack in attacks}):
        found = [attack for attack in attacks if attack["name"] == name]
        outcomes: Counter[str] = sum((Counter(attack["outcomes"]) for attack in found), Counter())
        answers = ", ".join(f"{outcome}: {n}" for outcome, n in outcomes.most_common())
        rows.append([name, str(len(found)), f"{max(attack['seconds'] for attack in found):.1f}", answers])
    return markdown(["attack", "times", "s, most", "answers"], rows)


def report(result: Result, *, attacked: bool) -> str:
    kinds = [QUIET, ATTACKED] if attacked else [QUIET]
    parts = [table(result, kinds)]
    if attacked and (found := ratios(result))[0].values:
        parts.append(ratio_table(found))
    parts += [held_table(result, kinds)]
    if attacked:
        attacks = result.joined(ATTACKED).attacks
        outcomes: Counter[str] = sum((Counter(attack["outcomes"]) for attack in attacks), Counter())
        bad = {status: n for status, n in outcomes.items() if status.startswith("5")}
        missing = {*CONNECTIONS, *REQUESTS} - {attack["name"] for attack in attacks}
        parts += [
            attack_table(attacks),
            f"attacks that the time was too short for: {', '.join(sorted(missing)) or 'none'}",
        ]
        parts.append(f"the attacker's 5xx: {bad or 'none'}")
    failed = [visit for phase in result.phases for visit in phase.visits if visit.outcome == "failed"]
    reasons = Counter(f"{visit.status} {re.sub('req_[0-9a-f]+|[0-9]+', 'N', visit.reason[:200])}" for visit in failed)
    parts += [f"failed, {n} times: {reason}" for reason, n in reasons.most_common(10)]
    parts.append(f"deaths: {result.deaths}; tracebacks in the log: {result.tracebacks}")
    if result.last_words:
        parts.append(result.last_words)
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of each kind: without and, if asked for, with it")
    parser.add_argument("--attack", action="store_true", help="as long again with an attacker beside the good clients")
    parser.add_argument("--rounds", type=int, default=3, help="in which the minutes are spent, the kinds in turn")
    parser.add_argument("--clients", type=int, default=4, help="good clients at a time")
    parser.add_argument("--crowd", type=int, default=600, help="connections at a time of the attacks that need many")
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--flag", action="append", default=[], help="a flag of the server, as --flag=--max-queue=8")
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, minutes=0.5, rounds=1)
    children.end_on_sigterm()
    try:
        result = measure(options.model or children.demo_model(), options)
    except BenchmarkError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print(report(result, attacked=options.attack))
    if options.json:
        options.json.write_text(json.dumps(asdict(result)))
    return 1 if result.deaths else 0


if __name__ == "__main__":
    sys.exit(main())
