"""What prefixes that prompts have in common save: in concurrent requests, in a conversation, after a restart.

    python -m benchmarks.prefixes [--model DIR] [--words 1450] [--rounds 3] [--quick] [--json FILE]

- together: eight requests at once with the same beginning of about 1,500 tokens, which neither server has seen; the
  time until all are answered, here over mlx_lm.server.
- turn: the second turn of a conversation whose first had about 1,500 tokens; its time to first text over the first's.
- restart: the same with this server ended and started again between the turns, with ``--prompt-cache-dir``.

Rounds are interleaved and ratios are taken inside a round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import children, machine
from benchmarks.asking import ask, ask_all, first_token_s
from benchmarks.children import OURS, THEIRS, BenchmarkError, Server
from benchmarks.options import parse
from benchmarks.prompts import Messages, Prompts
from benchmarks.report import Ratio, markdown, ratio_table, spread
from mlx_serve.client.answer import Answer
from mlx_serve.commands.bench.progress import note

_QUESTIONS = ("Begin.", "Who is it about?")


@dataclass(frozen=True, slots=True)
class Together:
    """``cached_tokens`` of ``prompt_tokens`` needed no prefill, as the server tells it."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds to the first text of the first turn and of the second, which had so many tokens."""

    first_s: float
    second_s: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def share(self) -> float:
        return self.second_s / self.first_s


@dataclass(frozen=True, slots=True)
class Round:
    """By the server's name, and the restart of ours."""

    together: dict[str, Together]
    turns: dict[str, Turns]
    restart: Turns
    others: float | None


def together(server: Server, beginning: str, options: argparse.Namespace) -> Together:
    requests = [_messages(beginning, f"Request {number}. Begin.") for number in range(options.requests)]
    answers, seconds = ask_all(server, requests, len(requests), options.max_tokens)
    return Together(seconds, sum(a.prompt_tokens for a in answers), sum(a.cached_tokens or 0 for a in answers))


def turns(server: Server, beginning: str, options: argparse.Namespace) -> Turns:
    first = _messages(beginning, _QUESTIONS[0])
    answer = ask(server, first, options.max_tokens)
    return _turns(answer, ask(server, _second(first, answer), options.max_tokens))


def restart(model: Path, beginning: str, warm_up: str, options: argparse.Namespace) -> Turns:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--prompt-cache-dir", folder)
        first = _messages(beginning, _QUESTIONS[0])
        with _ours(model, flags) as server:
            ask(server, _messages(warm_up, _QUESTIONS[0]), 4)
            answer = ask(server, first, options.max_tokens)
        with _ours(model, flags) as server:
            # Its very first request: what a start makes slower is in it.
            return _turns(answer, ask(server, _second(first, answer), options.max_tokens))


def _ours(model: Path, flags: Iterable[str]) -> Any:
    port = children.free_port()
    return children.running(OURS, children.our_command(model, port, *flags), model, port)


def _messages(beginning: str, question: str) -> Messages:
    return [{"role": "system", "content": beginning}, {"role": "user", "content": question}]


def _second(first: Messages, answer: Answer) -> Messages:
    return [*first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": _QUESTIONS[1]}]


def _turns(first: Answer, second: Answer) -> Turns:
    return Turns(first_token_s(first), first_token_s(second), second.prompt_tokens, second.cached_tokens or 0)


def measure_all(model: Path, options: argparse.Namespace) -> list[Round]:
    prompts = Prompts(options.seed)
    with ExitStack() as stack:
        servers = children.both(stack, model)
        for server in servers.values():
            ask_all(server, prompts.take(2, 1), 2, 4)
        rounds = []
        for number in range(1, options.rounds + 1):
            rounds.append(measure(model, servers, prompts, options))
            note(f"round {number}: {rounds[-1]}")
        return rounds


def measure(model: Path, servers: dict[str, Server], prompts: Prompts, options: argparse.Namespace) -> Round:
    def beginning() -> str:
        return f"{prompts.serial()}: a writer of stories in which these occur: {prompts.words(options.words)}."

    share = machine.watch_others([server.process.pid for server in servers.values()])
    shared = beginning()
    at_once = {name: together(server, shared, options) for name, server in servers.items()}
    talked = beginning()
    in_turn = {name: turns(server, talked, options) for name, server in servers.items()}
    others = share()
    return Round(at_once, in_turn, restart(model, beginning(), beginning(), options), others)


def ratios(rounds: Sequence[Round]) -> list[Ratio]:
    at_once = [r.together[OURS].seconds / r.together[THEIRS].seconds for r in rounds]
    return [
        Ratio("together: time, here over mlx_lm.server", at_once, 0.4),
        Ratio("turn: TTFT of the second over the first", [r.turns[OURS].share for r in rounds], 0.1),
        Ratio("restart: TTFT of the second over the first", [r.restart.share for r in rounds], 0.25),
    ]


def table(rounds: Sequence[Round]) -> str:
    rows = []
    for name in (OURS, THEIRS):
        ts = [r.together[name] for r in rounds]
        cells = [spread([t.seconds for t in ts]), "", "", f"{ts[0].cached_tokens} of {ts[0].prompt_tokens}"]
        rows.append([f"together: {name}", *cells])
    for name in (OURS, THEIRS):
        rows.append([f"turn: {name}", *_cells([r.turns[name] for r in rounds])])
    rows.append([f"restart: {OURS}", *_cells([r.restart for r in rounds])])
    return markdown(["", "all s", "first TTFT s", "second TTFT s", "cached tokens"], rows)


def _cells(found: Sequence[Turns]) -> list[str]:
    first, second = spread([t.first_s for t in found]), spread([t.second_s for t in found])
    return ["", first, second, f"{found[0].cached_tokens} of {found[0].prompt_tokens}"]


def as_json(rounds: Sequence[Round]) -> dict[str, Any]:
    return {"rounds": [asdict(r) for r in rounds], "ratios": {ratio.name: ratio.values for ratio in ratios(rounds)}}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--words", type=int, default=1450, help="in common; about a token each (default: 1450)")
    parser.add_argument("--requests", type=int, default=8, help="that come together (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    return parse(parser, words=300, requests=4, max_tokens=6, rounds=1)


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    try:
        rounds = measure_all(model, options)
    except BenchmarkError as error:
        print(f"prefixes: {error}", file=sys.stderr)
        return 1
    print(table(rounds), ratio_table(ratios(rounds)), sep="\n\n")
    for line in machine.warnings([r.others for r in rounds]):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(as_json(rounds), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
