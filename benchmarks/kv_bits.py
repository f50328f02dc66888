"""What ``--kv-bits`` does in the batch: speed, memory, and how far the answers agree with those of a plain KV cache.

    python -m benchmarks.kv_bits [--model DIR] [--bits 8] [--clients 8] [--rounds 3] [--tokens 96] [--quick]
                                 [--json FILE]

The caches are quantized from their first token on. Two servers get the same questions about passages of this project's
pages, all clients at once, a round each in turn.

- tokens/s: with quantized caches over without, in each round.
- KV memory: the greatest ``kv_bytes`` of ``/stats`` in a round.
- agreement: the share of an answer's characters before the first difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks import children
from benchmarks.asking import ask, figures
from benchmarks.children import Server
from benchmarks.kept_bits import passages
from benchmarks.machine import warnings, watch_others
from benchmarks.options import parse
from benchmarks.prompts import Messages
from benchmarks.report import spread
from mlx_serve.commands.bench.progress import note
from mlx_serve.engine.generate.drafts import n_common

_POLL_S = 0.05


@dataclass(slots=True)
class Result:
    """Of each round: the ratios of tokens per second and KV bytes, quantized over plain. Of each answer: agreement."""

    speed: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)


def questions(n: int) -> list[Messages]:
    texts = passages(n)
    return [[{"role": "user", "content": f"{text}\n\nSummarize this text in a few sentences."}] for text in texts]


def measure(quantized: Server, plain: Server, n_rounds: int, n_clients: int, n_tokens: int) -> Result:
    result = Result()
    asked = questions(n_rounds * n_clients)
    for i in range(n_rounds):
        prompts = asked[i * n_clients : (i + 1) * n_clients]
        servers = (quantized, plain) if i % 2 else (plain, quantized)
        rounds = {server.name: _round(server, prompts, n_tokens) for server in servers}
        (texts, rate, n_bytes), (plain_texts, plain_rate, plain_bytes) = rounds[quantized.name], rounds[plain.name]
        result.speed.append(rate / plain_rate)
        result.memory.append(n_bytes / plain_bytes)
        result.agreement += [_agreement(*pair) for pair in zip(texts, plain_texts, strict=True)]
        note(f"round {i + 1} of {n_rounds}: {result.speed[-1]:.2f} of the speed, {result.memory[-1]:.2f} of the memory")
    return result


def _round(server: Server, prompts: Sequence[Messages], n_tokens: int) -> tuple[list[str], float, int]:
    """The answers, the tokens per second and the most bytes of running KV caches."""
    with _watched(server) as most, ThreadPoolExecutor(len(prompts)) as threads:
        began = time.perf_counter()
        answers = list(threads.map(partial(ask, server, max_tokens=n_tokens), prompts))
        seconds = time.perf_counter() - began
    return [answer.text for answer in answers], sum(answer.output_tokens for answer in answers) / seconds, max(most)


@contextmanager
def _watched(server: Server) -> Iterator[list[int]]:
    seen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            seen.append(int(figures(server, "/stats")["memory"]["kv_bytes"]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def _agreement(text: str, other: str) -> float:
    return n_common(text, other) / max(1, len(text), len(other))


def report(result: Result, bits: int, n_clients: int) -> str:
    n_equal = sum(share == 1 for share in result.agreement)
    return "\n".join(
        [
            f"--kv-bits {bits} over plain, {n_clients} clients:",
            f"- tokens/s {spread(result.speed)}",
            f"- KV memory {spread(result.memory)}",
            f"- {n_equal} of {len(result.agreement)} answers equal, {mean(result.agreement):.0%} before a difference",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_bits", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8, help="(default: 8)")
    parser.add_argument("--clients", type=int, default=8, help="(default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (default: 96)")
    options = parse(parser, rounds=1, clients=2, tokens=8)
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    with ExitStack() as stack:
        flags = ("--kv-bits", str(options.bits), "--quantized-kv-start", "0")
        quantized = children.ours(stack, model, "quantized", *flags)
        plain = children.ours(stack, model, "plain")
        others = watch_others([quantized.process.pid, plain.process.pid])
        result = measure(quantized, plain, options.rounds, options.clients, options.tokens)
        busy = warnings([others()])
    print(report(result, options.bits, options.clients))
    for line in busy:
        print(line)
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
