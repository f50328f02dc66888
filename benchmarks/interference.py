"""What a long prompt does to streams that are being decoded, and how long it waits itself: this server, mlx_lm.server.

    python -m benchmarks.interference [--model DIR] [--words 2950] [--rounds 3] [--quick] [--json FILE]

Four streams decode; when each has had some text, a prompt of about 3,000 tokens arrives. Counted are the gaps between
two texts of a stream, of those that lie at least in part between the long prompt's sending and its first text. Both
servers stay loaded, rounds are interleaved, and ratios are taken inside a round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Semaphore
from typing import Any

from benchmarks import children, machine
from benchmarks.asking import ask, ask_all, first_token_s
from benchmarks.children import OURS, THEIRS, BenchmarkError, Server
from benchmarks.options import parse
from benchmarks.prompts import Messages, Prompts
from benchmarks.report import Ratio, markdown, ratio_table, spread
from mlx_serve.client.answer import Answer
from mlx_serve.commands.bench.progress import note
from mlx_serve.commands.bench.stats import percentile

# Texts that each stream has had when the long prompt is sent.
_LEAD = 8
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Measure:
    """One server in one round; seconds. ``calm_s``: the median gap before the long prompt; ``n_ended``: streams that
    were at their end before its first text, so that the gaps say less."""

    p99_s: float
    max_s: float
    calm_s: float
    ttft_s: float
    long_tokens: int
    n_gaps: int
    n_ended: int
    others: float | None


Round = dict[str, Measure]


def measure(server: Server, prompts: Prompts, options: argparse.Namespace) -> Measure:
    share = machine.watch_others([server.process.pid])
    heard = Semaphore(0)

    def stream(story: Messages) -> list[float]:
        """When each of its texts came."""
        arrivals: list[float] = []

        def hear(now: float) -> None:
            arrivals.append(now)
            heard.release()

        ask(server, story, options.max_tokens, hear)
        return arrivals

    clients = ThreadPoolExecutor(options.streams)
    try:
        streams = [clients.submit(stream, prompts.story(40)) for _ in range(options.streams)]
        for _ in range(options.streams * _LEAD):
            # Whichever streams they came in: they decode in one batch.
            if not heard.acquire(timeout=_PATIENCE_S):
                raise BenchmarkError(f"{server.name}: the streams did not begin")
        start = time.perf_counter()
        long = ask(server, prompts.story(options.words), 1)
        arrivals = [stream.result() for stream in streams]
    finally:
        clients.shutdown(wait=False)
    return _measure(arrivals, start, long, share())


def _measure(arrivals: Sequence[list[float]], start: float, long: Answer, others: float | None) -> Measure:
    ttft_s = first_token_s(long)
    end = start + ttft_s
    pairs = [pair for times in arrivals for pair in pairwise(times)]
    gaps = sorted(b - a for a, b in pairs if b > start and a < end)
    calm = [b - a for a, b in pairs if b <= start]
    if not gaps:
        raise BenchmarkError("no stream was decoding beside the long prompt: give the streams more --max-tokens")
    n_ended = sum(times[-1] < end for times in arrivals)
    return Measure(percentile(gaps, 99), gaps[-1], median(calm), ttft_s, long.prompt_tokens, len(gaps), n_ended, others)


def measure_all(model: Path, options: argparse.Namespace) -> list[Round]:
    prompts = Prompts(options.seed)
    with ExitStack() as stack:
        servers = children.both(stack, model)
        for server in servers.values():
            ask_all(server, prompts.take(options.streams, 1), options.streams, 4)
        rounds = []
        for number in range(1, options.rounds + 1):
            rounds.append({name: measure(server, prompts, options) for name, server in servers.items()})
            for name, m in rounds[-1].items():
                note(f"round {number}: {name}: p99 {m.p99_s:.2f} s, long prompt's first text after {m.ttft_s:.1f} s")
        return rounds


def ratios(rounds: Sequence[Round]) -> list[Ratio]:
    def of(field: str) -> list[float]:
        return [getattr(r[OURS], field) / getattr(r[THEIRS], field) for r in rounds]

    return [
        Ratio("p99 gap of the streams", of("p99_s"), 0.25),
        Ratio("longest gap", of("max_s"), 0.25),
        Ratio("the long prompt's TTFT", of("ttft_s"), 1.5),
    ]


def table(rounds: Sequence[Round]) -> str:
    heads = ["", "p99 gap s", "longest gap s", "gap before s", "long TTFT s", "long tokens", "gaps counted"]
    rows = []
    for name in (OURS, THEIRS):
        ms = [r[name] for r in rounds]
        fields = ("p99_s", "max_s", "calm_s", "ttft_s")
        cells = [spread([getattr(m, field) for m in ms]) for field in fields]
        rows.append([name, *cells, str(ms[0].long_tokens), str(sum(m.n_gaps for m in ms))])
    return markdown(heads, rows)


def faults(rounds: Sequence[Round]) -> list[str]:
    return [
        f"unfair: round {number}: {name}: {m.n_ended} streams ended before the long prompt's first text"
        for number, r in enumerate(rounds, 1)
        for name, m in r.items()
        if m.n_ended
    ]


def as_json(rounds: Sequence[Round]) -> dict[str, Any]:
    return {
        "rounds": [{name: asdict(m) for name, m in r.items()} for r in rounds],
        "ratios": {ratio.name: ratio.values for ratio in ratios(rounds)},
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interference", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument(
        "--words", type=int, default=2950, help="of the long prompt; about a token each (default: 2950)"
    )
    parser.add_argument("--streams", type=int, default=4, help="(default: 4)")
    parser.add_argument("--max-tokens", type=int, default=192, help="of each stream (default: 192)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    return parse(parser, words=400, max_tokens=64, rounds=1)


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    try:
        rounds = measure_all(model, options)
    except BenchmarkError as error:
        print(f"interference: {error}", file=sys.stderr)
        return 1
    print(table(rounds), ratio_table(ratios(rounds)), sep="\n\n")
    shares = [m.others for r in rounds for m in r.values()]
    for line in [*faults(rounds), *machine.warnings(shares)]:
        print(line)
    if options.json:
        options.json.write_text(json.dumps(as_json(rounds), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
