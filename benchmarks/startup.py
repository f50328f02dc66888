"""Seconds from starting the process to being ready and to the first answer: this server and mlx_lm.server.

    python -m benchmarks.startup [--model DIR] [--runs 5] [--json FILE]

This server is ready when it says so, with the model loaded; mlx_lm.server answers /health before its model is loaded,
so compare the first answers. One start of each comes first, untimed, to have the files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks import children
from benchmarks.asking import ask
from benchmarks.children import OURS, THEIRS, BenchmarkError, Server
from benchmarks.report import spread
from mlx_serve.commands.bench.progress import note

_QUESTION = [{"role": "user", "content": "Say yes."}]
_READY = b" ready: "


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the process was started."""

    ready_s: float
    first_answer_s: float


def our_start(model: Path) -> Start:
    port = children.free_port()
    start = time.perf_counter()
    process = children.spawn(children.our_command(model, port), stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        _await_line(process.stderr, _READY)
        ready_s = time.perf_counter() - start
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
        ask(Server(OURS, port, str(model), process, process.stderr), _QUESTION, 1)
        return Start(ready_s, time.perf_counter() - start)
    finally:
        children.end(process)


def their_start(model: Path) -> Start:
    port = children.free_port()
    start = time.perf_counter()
    with children.running(THEIRS, children.their_command(model, port), model, port) as server:
        ready_s = time.perf_counter() - start
        ask(server, _QUESTION, 1)
        return Start(ready_s, time.perf_counter() - start)


def _await_line(stream: IO[bytes], mark: bytes) -> None:
    seen = []
    for line in stream:
        if mark in line:
            return
        seen.append(line)
    raise BenchmarkError(f"mlx-serve ended: {b''.join(seen).decode(errors='replace')[-1000:]}")


def measure(model: Path, n_runs: int) -> dict[str, list[Start]]:
    starts: dict[str, list[Start]] = {OURS: [], THEIRS: []}
    for number in range(n_runs + 1):
        for name, run in ((OURS, our_start), (THEIRS, their_start)):
            found = run(model)
            note(f"start {number}: {name} {found.first_answer_s:.1f} s")
            if number:
                starts[name].append(found)
    return starts


def table(starts: dict[str, list[Start]]) -> str:
    lines = ["| | ready s | first answer s |", "|---|--:|--:|"]
    for name, found in starts.items():
        cells = (spread([s.ready_s for s in found], 1), spread([s.first_answer_s for s in found], 1))
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--runs", type=int, default=5, help="(default: 5)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    try:
        starts = measure(model, options.runs)
    except BenchmarkError as error:
        print(f"startup: {error}", file=sys.stderr)
        return 1
    print(table(starts))
    if options.json:
        figures = {name: [asdict(s) for s in found] for name, found in starts.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
