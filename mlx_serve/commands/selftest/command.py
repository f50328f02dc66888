"""``mlx-serve selftest``: starts a server with a model, and proves on this machine that it is correct and fast.

    mlx-lm alone (a child) -> answers
    the server (a child)   -> checks, rounds of load
    mlx-lm alone (a child) -> the same prompts: the upper limit

The processes run one after the other, so that memory holds the model once. Exit status: 0 if every check passed, 1 if
one failed or the server did not start, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_serve import __version__
from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench.ceiling import DEMO, CeilingError, ceiling
from mlx_serve.commands.bench.load import LoadTarget, Round
from mlx_serve.commands.bench.probe import probe
from mlx_serve.commands.bench.stats import Record, Slo, Summary, summarize
from mlx_serve.commands.bench.workload import WorkloadShape, random_prompts
from mlx_serve.commands.selftest import checks
from mlx_serve.commands.selftest.checks import AskedText, CheckResult
from mlx_serve.commands.selftest.server import ServerError, TestedServer, serving
from mlx_serve.commands.terminal import table
from mlx_serve.machine import installed

_INTERRUPTED = 128 + signal.SIGINT
# English sentences, which every model continues in some way.
_BEGINNINGS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Dear customer, we are sorry to hear that",
    "To bake bread at home you need flour, water and",
    "In 1969 two astronauts",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "The difference between a virus and a bacterium is",
    "Once the war was over, the king",
    "A good password is",
    "The shortest proof that there are infinitely many primes",
)
_ANSWER_TOKENS = 64
_LEVELS = (1, 4, 16)
_INPUT_TOKENS, _OUTPUT_TOKENS = 256, 64
# The long prompt's part of the context, at most so many tokens.
_LONG_SHARE, _LONG_TOKENS = 0.5, 16_000
_SEED = 1


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    given, flags = parser().parse_known_args(argv)
    flags += ["--demo"] if given.demo else ["--model", given.model]
    test = SelfTest(DEMO if given.demo else given.model, flags, given.scale, lambda text: print(text, file=sys.stderr))
    try:
        test.run()
    except (ServerError, CeilingError, Failure) as error:
        print(f"mlx-serve selftest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        if test.results:
            test.report(given.json)
    return 0 if all(result.passed is not False for result in test.results) else 1


def parser() -> argparse.ArgumentParser:
    """The command's flags; all others go to the server."""
    top = argparse.ArgumentParser(
        prog="mlx-serve selftest",
        usage="mlx-serve selftest (--model MODEL | --demo) [--json FILE] [FLAGS OF THE SERVER]",
        description="Start a server with a model and test it: its answers against mlx-lm's own, alone and in a batch; "
        "pauses of streams, memory, a killed process; its speed against mlx-lm without a server. Takes some minutes.",
        allow_abbrev=False,
    )
    which = top.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="model to test: a directory or a repository")
    which.add_argument("--demo", action="store_true", help="test with the demo model")
    top.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    top.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="amount of work, compared to usual (default: 1)"
    )
    return top


class SelfTest:
    """One run, with its results so far."""

    def __init__(self, model: str, flags: Sequence[str], scale: float, say: Callable[[str], None]) -> None:
        self.results: list[CheckResult] = []
        self._model = model
        self._flags = flags
        self._scale = scale
        self._say = say
        self._began = time.monotonic()

    def run(self) -> None:
        """All checks. Raises ServerError, CeilingError, Failure, KeyboardInterrupt."""
        asked = self._reference()
        with tempfile.NamedTemporaryFile("w", prefix="mlx-serve-selftest-", suffix=".log", delete=False) as log:
            self._say(f"starting the server; its log is {log.name}")
            with serving(self._flags, log) as server:
                rounds = self._of_server(server, asked)
        self._of_mlx_lm(rounds)

    def _reference(self) -> list[AskedText]:
        self._say("mlx-lm's own answers")
        limits = [max(8, int(self._scale * _ANSWER_TOKENS * (1 + i % 3) / 2)) for i in range(len(_BEGINNINGS))]
        with ceiling(self._model) as mlx_lm:
            texts = mlx_lm.texts(_BEGINNINGS, limits)
        return [AskedText(*each) for each in zip(_BEGINNINGS, limits, texts, strict=True)]

    def _of_server(self, server: TestedServer, asked: Sequence[AskedText]) -> dict[int, tuple[Summary, list[Record]]]:
        with Client(server.where) as client:
            model = client.first_model()
            context = _context(client, model)
        fields = {"temperature": 0}
        target = LoadTarget(server.where, model, chat=False, fields=fields)
        n_long = int(self._scale * min(_LONG_TOKENS, _LONG_SHARE * context))
        long = AskedText(_long_text(n_long), 1, "")
        self._check(checks.alone(target, asked[: len(asked) // 2]))
        self._check(checks.together(target, asked))
        self._check(checks.bodies(target, asked[0]))
        self._check(checks.beside_a_long_prompt(target, asked[1], long))
        rounds = {n: self._round(target, n) for n in _LEVELS}
        self._check(checks.memory(target))
        self._check(checks.after_a_crash(target, asked[0], server.child))
        return rounds

    def _round(self, target: LoadTarget, n_clients: int) -> tuple[Summary, list[Record]]:
        self._say(f"{n_clients} at a time")
        n_input = max(16, int(self._scale * _INPUT_TOKENS))
        n_output = max(4, int(self._scale * _OUTPUT_TOKENS))
        probed = probe(target, None, n_input)
        shape = WorkloadShape(_SEED, max(4, 2 * n_clients), n_input, n_output)
        round_ = Round(probed.target, lambda *_: None)
        round_.closed_loop(random_prompts(shape, probed.sizes, f"selftest {n_clients}"), n_clients)
        if round_.interrupted:
            raise KeyboardInterrupt
        for record in round_.records:
            if record.failure is not None:
                raise record.failure
        return summarize(tuple(round_.records), round_.seconds, Slo()), round_.records

    def _of_mlx_lm(self, rounds: dict[int, tuple[Summary, list[Record]]]) -> None:
        self._say("the same prompts in mlx-lm without a server")
        for n, (summary, records) in rounds.items():
            answered = [(record.prompt, record.answer.output_tokens) for record in records if record.answer]
            with ceiling(self._model) as mlx_lm:
                offline = mlx_lm.run([p for p, _ in answered], n, [max(1, k) for _, k in answered], ignore_eos=True)
            ttft_s = summary.ttft_ms.p50 / 1000 if summary.ttft_ms else 0.0
            ratio = summary.output_tokens_per_s / offline.rate
            found = f"{summary.output_tokens_per_s:.1f} tokens/s, {ratio:.2f} of mlx-lm's; first token {ttft_s:.2f} s"
            figures = asdict(summary) | {"offline_tokens_per_s": offline.rate, "ratio": ratio}
            self._check(CheckResult(f"speed, {n} at a time", found, None, figures))

    def _check(self, result: CheckResult) -> None:
        self.results.append(result)
        self._say(f"{_MARKS[result.passed]:4}  {result.name}: {result.found}")

    def report(self, path: Path | None) -> None:
        """Prints the table and the line for an issue, and writes the JSON file."""
        rows = [(_MARKS[result.passed], result.name, result.found) for result in self.results]
        seconds = time.monotonic() - self._began
        print(table(("", "CHECK", "FOUND"), rows))
        n_failed = sum(result.passed is False for result in self.results)
        about = {
            "mlx_serve": __version__,
            **{name: installed(name) for name in ("mlx", "mlx-lm")},
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "model": self._model,
            "flags": " ".join(self._flags),
        }
        facts = ", ".join(f"{name} {value}" for name, value in about.items())
        print(f"\n{len(self.results)} checks, {n_failed} failed, {seconds:.0f} s: {facts}")
        if path is not None:
            about |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": f"{seconds:.1f}"}
            whole = about | {"results": [asdict(result) for result in self.results]}
            path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


_MARKS = {True: "ok", False: "FAIL", None: "-"}


def _context(client: Client, model: str) -> int:
    """The model's context in tokens; a small one where the server does not tell."""
    found: Any = client.get(f"/models/{model}").get("max_model_len")
    return found if isinstance(found, int) else 2048


def _long_text(n_tokens: int) -> str:
    """About so many tokens of words that no prefix cache has seen."""
    pick = random.Random(_SEED)  # noqa: S311 - no secret
    return " ".join(pick.choice(("river", "stone", "light", "under", "seven", "green")) for _ in range(n_tokens))
