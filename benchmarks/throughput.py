"""Output tokens per second: mlx-lm without a server, this server, mlx_lm.server; the same load, in one run.

    python -m benchmarks.throughput [--model DIR] [--clients 1,4,8] [--rounds 3] [--earlier CHECKOUT] [--json FILE]

``--earlier`` adds this server as it is in another checkout, such as ``git worktree add`` makes of an older commit.

All stay loaded; one works while the others idle. Rounds are interleaved (offline, ours, theirs, offline, ...) and
ratios are taken inside a round, so that a machine whose speed drifts still compares neighbours. Absolute figures of
different runs are not comparable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import children, machine
from benchmarks.asking import ask_all
from benchmarks.children import OURS, BenchmarkError, Server
from benchmarks.prompts import PROMPT_WORDS, Messages, Prompts
from benchmarks.report import spread
from mlx_serve.client.answer import Answer
from mlx_serve.commands.bench.ceiling import Ceiling, CeilingError, ceiling
from mlx_serve.commands.bench.progress import note

OFFLINE, EARLIER = "offline", "earlier"
# A server that fails in a round is given another one, so many times. mlx_lm.server resets some of many connections.
_RETRIES = 3


@dataclass(frozen=True, slots=True)
class Measure:
    """What one contestant did in one round.

    ``n_short``: answers that ended before max_tokens; ``cpu_s``: processor time of the measured process;
    ``others``: share of the machine that other programs took.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    n_short: int
    cached_tokens: int = 0
    ttft_s: float | None = None
    cpu_s: float | None = None
    others: float | None = None

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def cpu_ms(self) -> float:
        return 1000 * (self.cpu_s or 0) / self.output_tokens


Contestant = Callable[[list[Messages], int, int], Measure]
Round = dict[str, Measure]
Rounds = list[Round]


def run_offline(offline: Ceiling, prompts: list[Messages], n_clients: int, max_tokens: int) -> Measure:
    return Measure(**asdict(offline.run(prompts, n_clients, max_tokens, warm_up=False)))


def run_server(server: Server, prompts: list[Messages], n_clients: int, max_tokens: int) -> Measure:
    # The answers to random words repeat themselves. Offline nothing is drafted, and drafts have their own benchmark.
    return _measure(*ask_all(server, prompts, n_clients, max_tokens, num_draft_tokens=0), max_tokens)


def _measure(answers: Sequence[Answer], seconds: float, max_tokens: int) -> Measure:
    return Measure(
        seconds,
        sum(a.prompt_tokens for a in answers),
        sum(a.output_tokens for a in answers),
        sum(a.output_tokens < max_tokens for a in answers),
        sum(a.cached_tokens or 0 for a in answers),
        median(a.ttft_s for a in answers if a.ttft_s is not None),
    )


class Arena:
    """The contestants, loaded, and what they are asked. A round that others disturbed is run again."""

    def __init__(self, contestants: dict[str, Contestant], pids: dict[str, int], options: argparse.Namespace) -> None:
        self._contestants = contestants
        self._pids = pids
        self._options = options
        self._prompts = Prompts(options.seed)
        self._n_discards = options.discards

    def warm_up(self) -> None:
        for name, contestant in self._contestants.items():
            note(f"warming up {name}")
            contestant(self._prompts.take(2, 1), 2, 8)

    def rounds(self, n_clients: int) -> Rounds:
        rounds: Rounds = []
        while len(rounds) < self._options.rounds:
            measures = {name: self._measure(name, n_clients) for name in self._contestants}
            if self._n_discards and others(measures) > self._options.max_others:
                self._n_discards -= 1
                note(f"discarded: other programs took {others(measures):.0%} of the machine")
                continue
            rounds.append(measures)
        return rounds

    def _measure(self, name: str, n_clients: int) -> Measure:
        for n_left in reversed(range(1 + _RETRIES)):
            prompts = self._prompts.take(n_clients, self._options.requests)
            share = machine.watch_others(list(self._pids.values()))
            used = machine.watch_process(self._pids[name])
            try:
                measure = self._contestants[name](prompts, n_clients, self._options.max_tokens)
                break
            except BenchmarkError as error:
                if not n_left:
                    raise
                note(f"clients {n_clients}: again, after {error}")
        measure = replace(measure, cpu_s=used(), others=share())
        note(f"clients {n_clients}: {name} {measure.rate:.1f} token/s, others {measure.others or 0:.0%}")
        return measure


def others(measures: Round) -> float:
    return max(m.others or 0 for m in measures.values())


def measure_all(model: Path, options: argparse.Namespace) -> dict[int, Rounds]:
    with ExitStack() as stack:
        contestants, pids = start(stack, model, options.earlier)
        arena = Arena(contestants, pids, options)
        arena.warm_up()
        return {n: arena.rounds(n) for n in options.clients}


def start(stack: ExitStack, model: Path, earlier: Path | None) -> tuple[dict[str, Contestant], dict[str, int]]:
    """Start all, in the order in which they work in a round; and their process ids."""
    offline = stack.enter_context(ceiling(str(model)))
    contestants: dict[str, Contestant] = {OFFLINE: partial(run_offline, offline)}
    pids = {OFFLINE: offline.pid}
    servers = children.both(stack, model)
    if earlier is not None:
        servers[EARLIER] = children.ours(stack, model, EARLIER, root=earlier)
    for name, server in servers.items():
        contestants[name] = partial(run_server, server)
        pids[name] = server.process.pid
    return contestants, pids


def ratios(rounds: Rounds, under: str) -> list[float]:
    """This server's rates over another contestant's, neighbours in a round."""
    return [measures[OURS].rate / measures[under].rate for measures in rounds]


def names_in(results: dict[int, Rounds]) -> list[str]:
    return list(next(iter(results.values()))[0])


def table(results: dict[int, Rounds]) -> str:
    """Markdown: medians of token/s and of the time to first text, and each ratio as median (least to greatest)."""
    names = names_in(results)
    others_names = [name for name in names if name != OURS]
    served = [name for name in names if name != OFFLINE]
    heads = ["clients", *(f"{n} token/s" for n in names), *(f"{OURS} / {n}" for n in others_names)]
    heads += [*(f"{n} TTFT s" for n in served), *(f"{n} CPU ms/token" for n in names), "others at most"]
    lines = [" | ".join(heads), " | ".join("--:" for _ in heads)]
    for n_clients, rounds in results.items():
        cells = [str(n_clients), *(f"{median(m[n].rate for m in rounds):.1f}" for n in names)]
        cells += [spread(ratios(rounds, under)) for under in others_names]
        cells += [f"{median(m[n].ttft_s or 0 for m in rounds):.2f}" for n in served]
        cells += [f"{median(m[n].cpu_ms for m in rounds):.1f}" for n in names]
        cells.append(f"{max(map(others, rounds)):.0%}")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def faults(results: dict[int, Rounds]) -> list[str]:
    """What would make the comparison unfair: answers that ended early, prompts of unlike length."""
    found = []
    for n_clients, rounds in results.items():
        for number, measures in enumerate(rounds, 1):
            where = f"clients {n_clients}, round {number}"
            if len({m.prompt_tokens for m in measures.values()}) > 1:
                counts = ", ".join(f"{name} {m.prompt_tokens}" for name, m in measures.items())
                found.append(f"{where}: prompt tokens differ: {counts}")
            for name, m in measures.items():
                if m.n_short:
                    found.append(f"{where}: {name}: {m.n_short} answers ended before max_tokens")
    return found


def as_json(model: Path, options: argparse.Namespace, results: dict[int, Rounds]) -> dict[str, Any]:
    return {
        "model": model.name,
        "max_tokens": options.max_tokens,
        "requests_per_client": options.requests,
        "prompt_words": PROMPT_WORDS,
        "clients": {
            str(n): {
                "rounds": [{name: {**asdict(m), "rate": m.rate} for name, m in row.items()} for row in rounds],
                "ratios": {f"{OURS} / {n}": ratios(rounds, n) for n in names_in(results) if n != OURS},
            }
            for n, rounds in results.items()
        },
        "faults": faults(results),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--clients", type=_numbers, default=[1, 4, 8], help="numbers of clients (default: 1,4,8)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--requests", type=int, default=3, help="requests of a client in a round (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a request (default: 64)")
    parser.add_argument("--max-others", type=float, default=0.1, help="share of the machine (default: 0.1)")
    parser.add_argument(
        "--discards", type=int, default=0, help="so many rounds with more than --max-others are run again (default: 0)"
    )
    parser.add_argument("--earlier", type=Path, metavar="CHECKOUT", help="another checkout of this server, to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    try:
        results = measure_all(model, options)
    except (BenchmarkError, CeilingError) as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 1
    print(table(results))
    for fault in faults(results):
        print(f"unfair: {fault}")
    if options.json:
        options.json.write_text(json.dumps(as_json(model, options, results), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
