"""What the parent of ``--supervise`` costs, and what is left of a server that is killed again and again.

    python -m benchmarks.supervised [--rounds 30] [--clients 4] [--kills 20] [--model DIR] [--quick] [--json FILE]

Two servers, with and without a parent, get the same short rounds of load in turn. The medians of the rounds' ratios say
what the parent costs: tokens per second, time to the first token, and processor time for each token, of which the
machine's other work takes nothing. Then the server process of a parent is killed, by three signals in turn, each time
under streams and while clients connect. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import children, machine
from benchmarks.asking import ask, ask_all
from benchmarks.children import OURS, BenchmarkError, Server
from benchmarks.options import parse
from benchmarks.report import Ratio, markdown, ratio_table, spread
from mlx_serve.commands.bench.progress import note
from mlx_serve.supervise import child

ALONE, SUPERVISED = "without a parent", "with a parent"
WANTED = 1.02
_SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
_STREAMS, _CONNECTING, _ANSWER_TOKENS = 4, 10, 16
_POLL_S = 0.02
_SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Short:
    """A short round of load. ``cpu_s``: of all the server's processes, for each token."""

    tokens_per_s: float
    ttft_s: float
    cpu_s: float


@dataclass(slots=True)
class Kills:
    """What was seen of the deaths. ``seconds``: from each to the next answer; ``held``: by the parent after each."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    held: list[dict[str, int]] = field(default_factory=list)
    zombies: int = 0


def pids(server: Server) -> list[int]:
    """The server's processes."""
    found = [server.process.pid]
    for pid in found:
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text(encoding="ascii").split())
    return found


def short_round(server: Server, number: int, options: argparse.Namespace) -> Short:
    words = [f"{number} {n} " + "word " * 20 for n in range(2 * options.clients)]
    prompts = [[{"role": "user", "content": text}] for text in words]
    clocks: list[Callable[[], float | None]] = [machine.watch_process(pid) for pid in pids(server)]
    answers, seconds = ask_all(server, prompts, options.clients, options.max_tokens)
    n_tokens = sum(answer.output_tokens for answer in answers)
    ttft_s = median(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    return Short(n_tokens / seconds, ttft_s, sum(clock() or 0.0 for clock in clocks) / n_tokens)


def overhead(model: Path, options: argparse.Namespace) -> dict[str, list[Short]]:
    found: dict[str, list[Short]] = {ALONE: [], SUPERVISED: []}
    with (
        children.running(OURS, children.our_command(model, (one := children.free_port())), model, one) as alone,
        children.running(
            OURS, children.our_command(model, (two := children.free_port()), "--supervise"), model, two
        ) as supervised,
    ):
        servers = {ALONE: alone, SUPERVISED: supervised}
        for each in servers.values():
            short_round(each, -1, options)
        for number in range(options.rounds):
            # Each is first in every other round.
            for name in sorted(servers, reverse=bool(number % 2)):
                found[name].append(short_round(servers[name], number, options))
            note(f"round {number + 1}")
    return found


def ratios(found: dict[str, list[Short]]) -> list[Ratio]:
    """With over without a parent, so that more is worse."""
    pairs = list(zip(found[SUPERVISED], found[ALONE], strict=True))
    return [
        Ratio("time of a token", [b.tokens_per_s / a.tokens_per_s for a, b in pairs], WANTED),
        Ratio("first token", [a.ttft_s / b.ttft_s for a, b in pairs], WANTED),
        Ratio("processor time of a token", [a.cpu_s / b.cpu_s for a, b in pairs], WANTED),
    ]


def kills(model: Path, options: argparse.Namespace) -> Kills:
    found = Kills()
    port = children.free_port()
    command = [sys.executable, "-m", "benchmarks.supervised", _SERVE, "--model", str(model), "--port", str(port)]
    with (
        children.running(OURS, command, model, port) as server,
        ThreadPoolExecutor(_STREAMS + _CONNECTING) as pool,
    ):
        for number in range(options.kills):
            streams = [pool.submit(outcome, server, 1000) for _ in range(_STREAMS)]
            time.sleep(_POLL_S)
            began = time.monotonic()
            os.kill(pids(server)[1], _SIGNALS[number % len(_SIGNALS)])
            connecting = [pool.submit(outcome, server, _ANSWER_TOKENS) for _ in range(_CONNECTING)]
            while outcome(server, _ANSWER_TOKENS) != "answered":
                time.sleep(_POLL_S)
            found.seconds.append(time.monotonic() - began)
            found.refused += sum(each.result() == "refused" for each in [*connecting, *streams])
            found.held.append(machine.holds(server.process.pid))
            found.zombies += len(pids(server)) - 2
            note(
                f"death {number + 1}: answered again after {found.seconds[-1]:.1f} s; the parent holds {found.held[-1]}"
            )
    return found


def outcome(server: Server, max_tokens: int) -> str:
    """How a request ended."""
    try:
        ask(server, [{"role": "user", "content": "a word"}], max_tokens)
    except BenchmarkError as error:
        return "refused" if re.search("refused", str(error)) else "cut"
    return "answered"


def kills_table(found: Kills) -> str:
    first, last = found.held[0], found.held[-1]
    rows = [
        ["seconds to the next answer", spread(found.seconds, 1)],
        ["connections refused", str(found.refused)],
        ["zombies", str(found.zombies)],
        *([name, f"{first[name]}, {last[name]}"] for name in ("descriptors", "threads")),
        ["memory, MB", f"{first['rss'] / 1e6:.1f}, {last['rss'] / 1e6:.1f}"],
    ]
    return markdown([f"{len(found.seconds)} deaths", "the parent after the first, and after the last"], rows)


def serve(flags: Sequence[str]) -> int:
    """The command with ``--supervise``, whose parent never gives up. The server process runs this module too."""
    supervisor = child.join()
    if supervisor is not None:
        from mlx_serve import cli

        sys.argv[1:] = flags
        cli.run(supervisor)
    from mlx_serve import logs
    from mlx_serve.settings import config, http
    from mlx_serve.supervise.parent import Parent
    from mlx_serve.supervise.policy import Restarts
    from mlx_serve.supervise.process import own_command

    settings = config.from_args(flags)
    logs.configure("INFO", "text")
    return Parent(settings, http.listen(http.options(settings)), own_command(), restarts=Restarts(0)).run()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=30, help="of each server, in turn; 0: none")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    options = parse(parser, rounds=3, kills=2)
    children.end_on_sigterm()
    model = options.model or children.demo_model()
    figures: dict[str, Any] = {}
    try:
        if options.rounds:
            rounds = overhead(model, options)
            print(ratio_table(ratios(rounds)), flush=True)
            figures["rounds"] = {name: [asdict(each) for each in of_one] for name, of_one in rounds.items()}
        if options.kills:
            seen = kills(model, options)
            print(kills_table(seen))
            figures["kills"] = asdict(seen)
    except BenchmarkError as error:
        print(f"supervised: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2:]) if sys.argv[1:2] == [_SERVE] else main())
