"""``mlx-serve selftest``: starts a server with a model, and proves on this machine that it is correct and fast.

    mlx-lm alone (a child) -> the machine's speed, answers
    the server (a child)   -> checks, rounds of load
    mlx-lm alone (a child) -> the same prompts: the upper limit

The processes run one after the other, so that memory holds the model once. Exit status: 0 if every check passed, 1 if
one failed or the server did not start, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from mlx_serve import __version__, neighbours, signals
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench.ceiling import DEMO, CeilingError
from mlx_serve.commands.selftest import server
from mlx_serve.commands.selftest.run import MARKS, Findings, run
from mlx_serve.commands.selftest.server import ServerError
from mlx_serve.commands.selftest.sizes import Budget
from mlx_serve.commands.terminal import table
from mlx_serve.machine import installed
from mlx_serve.settings.config import Config
from mlx_serve.settings.flags import option_of
from mlx_serve.supervise import report

_INTERRUPTED = 128 + signal.SIGINT
_SECONDS = 300.0


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    given, flags = parser().parse_known_args(argv)
    flags += ["--demo"] if given.demo else ["--model", given.model]
    model = DEMO if given.demo else given.model
    budget, found = Budget(given.seconds), Findings()
    say = partial(_say, budget)
    status = 0
    try:
        settings = server.settings_of(flags)
    except ServerError as error:
        print(f"mlx-serve selftest: {error}", file=sys.stderr)
        return 1
    try:
        for neighbour in neighbours.running() if sys.platform == "darwin" else ():
            say(f"{neighbour} may use the GPU too: end it, or the figures are of both")
        with signals.unwinding():
            run(model, flags, budget, found, say)
    except (ServerError, CeilingError, Failure) as error:
        print(f"mlx-serve selftest: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = _INTERRUPTED
    finally:
        if found.results:
            _report(model, settings, found, budget.spent_s, given.json)
    return status or int(any(result.passed is False for result in found.results))


def parser() -> argparse.ArgumentParser:
    """The command's flags; all others go to the server."""
    top = argparse.ArgumentParser(
        prog="mlx-serve selftest",
        usage="mlx-serve selftest (--model MODEL | --demo) [--seconds S] [--json FILE] [FLAGS OF THE SERVER]",
        description="Start a server with a model and test it: its answers against mlx-lm's own, alone and in a batch; "
        "pauses of streams, memory, a killed process; its speed with drafts, and against mlx-lm without a server.",
        allow_abbrev=False,
    )
    which = top.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="model to test: a directory or a repository")
    which.add_argument("--demo", action="store_true", help="test with the demo model")
    top.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    top.add_argument(
        "--seconds",
        type=_seconds,
        default=_SECONDS,
        metavar="S",
        help=f"about how long it may take: on a slow machine, each check does less (default: {_SECONDS:.0f})",
    )
    return top


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")


def _say(budget: Budget, text: str) -> None:
    print(f"{budget.spent_s:5.0f} s  {text}", file=sys.stderr, flush=True)


def _report(model: str, settings: Config, found: Findings, seconds: float, path: Path | None) -> None:
    """Prints the table and the line for an issue, and writes the JSON file."""
    rows = [(MARKS[each.passed], each.name, each.found, f"{each.seconds:.0f}") for each in found.results]
    print(table(("", "CHECK", "FOUND", "SECONDS"), rows, right=frozenset({3})))
    n_failed = sum(result.passed is False for result in found.results)
    others = {name: value for name, value in report.flags(settings).items() if name not in ("demo", "model", "models")}
    about = {
        "mlx_serve": __version__,
        **{name: installed(name) for name in ("mlx", "mlx-lm")},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "model": model,
        "flags": " ".join(f"{option_of(name)}={value}" for name, value in others.items()) or "none",
    }
    facts = ", ".join(f"{name} {value}" for name, value in about.items())
    print(f"\n{len(found.results)} checks, {n_failed} failed, {seconds:.0f} s: {facts}", flush=True)
    if path is not None:
        figures = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "speed": asdict(found.speed) if found.speed is not None else None,
            "results": [asdict(result) for result in found.results],
        }
        path.write_text(json.dumps(about | figures, indent=1) + "\n", encoding="utf-8")
