"""Measures mlx-lm without a server on the same prompts, in a child process: the upper limit for a server.

The child (commands/bench/offline.py) imports MLX, and this process does not. A child starts after a round and ends
before the next one, so it never runs while the server is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_serve
from mlx_serve.commands.bench.workload import Message

DEMO = "demo"
_STOP_TIMEOUT_S = 5.0


class CeilingError(Exception):
    """The child ended too early. Its stderr has the reason."""


@dataclass(frozen=True, slots=True)
class Offline:
    """The result of one batch, without the time for loading, chat template and tokenizing. ``n_short``: early ends."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    n_short: int

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Continuation:
    """A greedy answer.

    ``starts``: for each token, the character of the text at which it starts. ``margins``: for each token, its
    log-probability minus that of the next best token.
    """

    text: str
    starts: list[int]
    margins: list[float]


class Ceiling:
    """The child process. It runs one batch after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def run(
        self,
        prompts: Sequence[Sequence[Message] | str],
        batch_size: int,
        max_tokens: int | Sequence[int],
        *,
        ignore_eos: bool = False,
        warm_up: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> Offline:
        """Generates greedily, ``batch_size`` sequences at a time. Raises CeilingError."""
        task = {
            "kind": "rate",
            "prompts": list(prompts),
            "batch_size": batch_size,
            "max_tokens": max_tokens if isinstance(max_tokens, int) else list(max_tokens),
            "ignore_eos": ignore_eos,
            "warm_up": warm_up,
            "template_options": dict(template_options or {}),
        }
        return Offline(**self._ask(task))

    def texts(self, prompts: Sequence[str], max_tokens: Sequence[int]) -> list[Continuation]:
        """The greedy continuation of each prompt, generated alone. Raises CeilingError."""
        found = self._ask({"kind": "texts", "prompts": list(prompts), "max_tokens": list(max_tokens)})
        return [Continuation(**each) for each in found]

    def _ask(self, task: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()  # so that its stderr comes first
            raise CeilingError("the offline process ended early; its error message is above")
        return json.loads(line)


@contextmanager
def ceiling(model: str) -> Iterator[Ceiling]:
    """Starts the child with ``model`` (a directory, or DEMO), and ends it when the block ends."""
    process = subprocess.Popen(  # noqa: S603 - this package's module and a path from the user
        # -P: a file json.py in the current folder must not replace the module json. PYTHONPATH leads to this package.
        [sys.executable, "-P", "-m", "mlx_serve.commands.bench.offline", model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environ(),
        process_group=0,  # Ctrl-C interrupts only this process, which then ends the child
    )
    try:
        yield Ceiling(process)
    finally:
        _end(process)


def child_environ() -> dict[str, str]:
    """The environment in which a child of this process finds this package, installed or not."""
    package = str(Path(mlx_serve.__file__).resolve().parents[1])
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{others}" if others else package}


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
