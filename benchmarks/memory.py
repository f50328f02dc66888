"""What a server with a small budget for KV caches holds at most, and afterwards: 500 mixed requests.

    python -m benchmarks.memory [--requests 500] [--clients 12] [--kv-cache-bytes 384MiB] [--quick] [--json FILE]

A small model with random weights and a large KV cache makes it quick. Requests have random lengths, prefixes in common,
n, streams and none, log-probabilities, and some hang up. What they would hold all together is several times the budget,
so they have to wait for each other. Told are MLX's own figures and, from outside, the process's: their peaks, and what
is held afterwards. Linux only (/proc).

The model has as many layers as those that people run (48): a batch grows one array of a layer at a time, so what that
takes beside the caches is a 96th of them. Prompts run in slices of 256 tokens: what a pass takes beside the caches is
part of the reserve of 1 GiB, and would be large beside so small a budget.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import children, machine
from benchmarks.asking import figures
from benchmarks.children import OURS, BenchmarkError, Server
from benchmarks.options import parse
from benchmarks.prompts import Prompts
from benchmarks.report import Ratio, markdown, ratio_table
from mlx_serve.commands.bench.progress import note
from mlx_serve.settings.flags import size

# Little to compute, and much to keep of each token.
_MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 48,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
_KV_TOKEN_BYTES = 2 * 48 * 128 * 4  # keys and values, layers, numbers, float32
_STEP_TOKENS = 256
# Another process writes it, so that this one never imports mlx.
_WRITE_MODEL = """
import json, pathlib, sys
from tests.engine import tinymodel
tinymodel.write_model(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2]))
"""
_SETTLE_S = 60.0
_RETURN_S = 3.0
# Characters, each a token.
_PREFIXES = (200, 600, 1000, 1500)
_OWN = (20, 200, 500)
_MAX_TOKENS = (8, 32, 128, 400)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes: what MLX uses, what it keeps of freed memory, its peak use; the process's resident memory and its peak.

    And the process's threads and descriptors.
    """

    active: int
    kept: int
    peak: int
    rss: int
    peak_rss: int
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Result:
    before: Held
    after: Held
    kv_cache_bytes: int
    outcomes: dict[str, int]
    seconds: float
    wanted_bytes: int
    others: float | None


class Asker:
    """Mixed requests, the same for the same seed."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        prompts = Prompts(seed)
        self._prefixes = [prompts.words(n)[:n] for n in _PREFIXES]
        self._prompts = prompts

    def request(self, dice: random.Random) -> dict[str, Any]:
        own = self._prompts.words(dice.choice(_OWN))[: dice.choice(_OWN)]
        prefix = dice.choice(self._prefixes) if dice.random() < 0.7 else ""
        request: dict[str, Any] = {
            "model": self._server.model,
            "prompt": f"{prefix}{self._prompts.serial()} {own}",
            "max_tokens": dice.choice(_MAX_TOKENS),
            "temperature": dice.choice([0, 1]),
            "n": dice.choice([1, 1, 1, 2, 4]),
            "stream": dice.random() < 0.5,
        }
        if dice.random() < 0.1:
            request |= {"logprobs": 3, "echo": dice.random() < 0.5}
        return request

    def ask(self, number: int, request: dict[str, Any]) -> str:
        """What became of a request; every fourth client hangs up at some time."""
        dice = random.Random(number)
        hangs_up_s = dice.uniform(0, 1.5) if dice.random() < 0.25 else None
        connection = http.client.HTTPConnection(children.HOST, self._server.port, timeout=hangs_up_s or 600)
        try:
            connection.request("POST", "/v1/completions", json.dumps(request))
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError:
            return "hung up"
        finally:
            connection.close()
        if response.status != 200 or b'"error"' in raw:
            note(f"request {number}: HTTP {response.status} {raw[-300:]!r}")
            return f"failed with {response.status}"
        return "answered"


@contextmanager
def budgeted(options: argparse.Namespace, folder: str) -> Iterator[Server]:
    path = Path(folder, "small")
    write = [sys.executable, "-c", _WRITE_MODEL, str(path), json.dumps(_MODEL)]
    subprocess.run(write, cwd=children.ROOT, check=True)
    port = children.free_port()
    flags = ["--kv-cache-bytes", str(options.kv_cache_bytes), "--max-queue", "1000"]
    flags += ["--prefill-step-size", str(_STEP_TOKENS)]
    with children.running(OURS, children.our_command(path, port, *flags), path, port) as server:
        yield server


def held(server: Server) -> Held:
    memory = figures(server, "/stats")["memory"]
    own = machine.holds(server.process.pid)
    return Held(memory["active_bytes"], memory["cache_bytes"], memory["peak_bytes"], **own)


def settled(server: Server, before: Held) -> Held:
    """When nothing runs any more, and the threads of the connections have ended."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        health = figures(server, "/health")
        if (
            health["running"] + health["waiting"] == 0
            and machine.holds(server.process.pid)["threads"] <= before.threads
        ):
            break
        time.sleep(0.05)
    # An idle server returns freed memory to the system after a second.
    time.sleep(_RETURN_S)
    return held(server)


def measure(options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder, budgeted(options, folder) as server:
        dice = random.Random(options.seed)
        asker = Asker(server, options.seed)
        # What is loaded and compiled at first use belongs to the start.
        for number in range(20):
            asker.ask(-1, asker.request(dice) | {"max_tokens": 8, "prompt": f"warm {number}"})
        before = settled(server, held(server))
        requests = [asker.request(dice) for _ in range(options.requests)]
        share = machine.watch_others([server.process.pid])
        start = time.perf_counter()
        with ThreadPoolExecutor(options.clients) as clients:
            outcomes = Counter(clients.map(asker.ask, range(len(requests)), requests))
        seconds = time.perf_counter() - start
        others = share()
        wanted = sum((len(r["prompt"]) + r["max_tokens"]) * r["n"] for r in requests) * _KV_TOKEN_BYTES
        wanted = wanted * options.clients // max(1, len(requests))
        after = settled(server, before)
        return Result(before, after, options.kv_cache_bytes, dict(outcomes), seconds, wanted, others)


def ratios(result: Result) -> list[Ratio]:
    before, after, budget = result.before, result.after, result.kv_cache_bytes
    return [
        Ratio("MLX's peak over its start plus the budget", [after.peak / (before.active + budget)], 1.05),
        Ratio(
            "MLX's memory afterwards over its start plus the budget", [after.active / (before.active + budget)], 1.05
        ),
        Ratio("the process's peak over its start plus the budget", [after.peak_rss / (before.rss + budget)], 1.5),
        Ratio(
            "the process's memory afterwards over its start plus the budget", [after.rss / (before.rss + budget)], 1.05
        ),
        Ratio("threads", [after.threads / before.threads], 1),
        Ratio("descriptors", [after.descriptors / before.descriptors], 1),
    ]


def table(result: Result) -> str:
    before, after = asdict(result.before), asdict(result.after)
    rows = []
    for name in before:
        unit = 1 if name in ("threads", "descriptors") else 2**20
        rows.append([name + (" MiB" if unit > 1 else ""), f"{before[name] / unit:.0f}", f"{after[name] / unit:.0f}"])
    return markdown(["", "before", "after"], rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500, help="(default: 500)")
    parser.add_argument("--clients", type=int, default=12, help="at a time (default: 12)")
    parser.add_argument("--kv-cache-bytes", type=size, default=384 * 2**20, help="the budget (default: 384MiB)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    return parse(parser, requests=40)


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    try:
        result = measure(options)
    except BenchmarkError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    outcomes = ", ".join(f"{n} {what}" for what, n in sorted(result.outcomes.items()))
    print(f"{options.requests} requests in {result.seconds:.0f} s: {outcomes}")
    at_once = result.wanted_bytes / 2**20
    print(f"{options.clients} of them want {at_once:.0f} MiB on average, of {result.kv_cache_bytes / 2**20:.0f}\n")
    print(table(result), ratio_table(ratios(result)), sep="\n\n")
    for line in machine.warnings([result.others]):
        print(line)
    if options.json:
        figures = asdict(result) | {"ratios": {ratio.name: ratio.values for ratio in ratios(result)}}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
