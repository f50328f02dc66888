"""The flags of ``mlx-serve bench``. A wrong flag ends the process with a usage line that names it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_serve.client.place import Place, place
from mlx_serve.commands.bench.ceiling import DEMO
from mlx_serve.commands.bench.stats import Slo
from mlx_serve.settings.flags import json_object

DEFAULT_CONCURRENCY = (1, 4, 16)
DEFAULT_REQUESTS = 32
DEFAULT_OUTPUT_TOKENS = 128
# Each connection needs a thread.
_MAX_CONNECTIONS = 4096
WORKLOADS = ("random", "shared-prefix", "multi-turn", "file")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. None means: decided by the server, by the file, or by the default above."""

    server: Place
    model: str | None
    chat: bool
    concurrency: tuple[int, ...]
    request_rates: tuple[float, ...]
    n_requests: int | None
    warmup: int
    seed: int
    workload: str
    dataset: Path | None
    input_tokens: int
    output_tokens: int | None
    range_ratio: float
    n_groups: int
    prefix_tokens: int
    n_turns: int
    ignore_eos: bool | None
    fields: Mapping[str, Any]
    slo: Slo
    json: Path | None
    plot: Path | None
    offline: str | None
    max_connections: int


def parser() -> argparse.ArgumentParser:
    """The argument parser, with one group for each topic."""
    top = argparse.ArgumentParser(
        prog="mlx-serve bench",
        description="Send load to a server with OpenAI's API and measure what its clients see. docs/bench.md defines "
        "the results.",
    )
    _add_server(top.add_argument_group("server"))
    _add_load(top.add_argument_group("load"))
    _add_workload(top.add_argument_group("workload"))
    _add_output(top.add_argument_group("goals and output"))
    return top


def _add_server(group: Any) -> None:
    group.add_argument(
        "--base-url",
        "--url",
        default="http://127.0.0.1:8080/v1",
        metavar="URL",
        help="base URL of the server (default: %(default)s)",
    )
    group.add_argument("--model", help="model to ask for (default: the first that the server lists)")
    group.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help="API key (default: $OPENAI_API_KEY)"
    )
    group.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="route of the requests (default: chat)"
    )
    group.add_argument(
        "--timeout",
        type=_number(0.001),
        default=600.0,
        metavar="S",
        help="a request fails after this many seconds without a byte from the server (default: 600)",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--concurrency",
        type=_list(_whole(1, _MAX_CONNECTIONS)),
        default=(),
        metavar="N,N",
        help="closed loop: one round for each number of clients (default: 1,4,16 unless --request-rate is given)",
    )
    group.add_argument(
        "--request-rate",
        type=_list(_number(1e-6, math.inf)),
        default=(),
        metavar="R,R",
        help="open loop: one round for each rate in requests/s, sent as a Poisson process; inf sends all at once",
    )
    group.add_argument(
        "--num-prompts",
        type=_whole(1),
        metavar="N",
        help=f"requests per round (default: {DEFAULT_REQUESTS}; with --dataset, the number of prompts in the file)",
    )
    group.add_argument(
        "--warmup",
        type=_whole(0),
        default=2,
        metavar="N",
        help="requests sent before each round and not measured (default: 2)",
    )
    group.add_argument("--seed", type=int, default=0, help="seed for texts, lengths and arrival times (default: 0)")
    group.add_argument(
        "--max-connections",
        type=_whole(1, _MAX_CONNECTIONS),
        default=512,
        metavar="N",
        help="open loop: most connections at a time; requests beyond this are sent late (default: 512)",
    )


def _add_workload(group: Any) -> None:
    group.add_argument("--workload", choices=WORKLOADS, help="kind of prompts (default: random; with --dataset: file)")
    group.add_argument("--dataset", type=Path, metavar="PATH", help="file of prompts: JSONL or ShareGPT's JSON")
    group.add_argument("--input-len", type=_whole(1), default=256, metavar="N", help="tokens per prompt (default: 256)")
    group.add_argument(
        "--output-len",
        type=_whole(1),
        metavar="N",
        help=f"tokens per answer (default: the file's lengths, or {DEFAULT_OUTPUT_TOKENS})",
    )
    group.add_argument(
        "--range-ratio",
        type=_number(0, 0.999),
        default=0.0,
        metavar="R",
        help="draw lengths uniformly from (1 - R) to (1 + R) times the given lengths (default: 0)",
    )
    group.add_argument(
        "--num-groups",
        type=_whole(1),
        default=4,
        metavar="N",
        help="shared-prefix: number of different prefixes (default: 4)",
    )
    group.add_argument(
        "--prefix-len",
        type=_whole(1),
        default=512,
        metavar="N",
        help="shared-prefix: tokens of the prefix, added to --input-len (default: 512)",
    )
    group.add_argument(
        "--turns", type=_whole(1), default=4, metavar="N", help="multi-turn: requests per conversation (default: 4)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="make answers continue to their full length (default: if the server accepts the field)",
    )
    group.add_argument(
        "--temperature", type=_number(0), default=0.0, metavar="T", help="sampling temperature (default: 0)"
    )
    group.add_argument(
        "--extra-body",
        type=_json,
        default={},
        metavar="JSON",
        help="JSON object of fields to add to every request; null removes a field",
    )


def _add_output(group: Any) -> None:
    for name, what in (
        ("ttft", "the first text comes within MS"),
        ("itl", "no gap between pieces of text exceeds MS"),
        ("tpot", "the time per token after the first does not exceed MS"),
        ("e2e", "the answer is complete within MS"),
    ):
        group.add_argument(f"--slo-{name}", type=_number(0), metavar="MS", help=f"goodput: {what}")
    group.add_argument("--json", type=_output_file, metavar="FILE", help="write all results and requests as JSON")
    group.add_argument("--plot", type=_output_file, metavar="FILE", help="write a plot as PNG; needs matplotlib")
    group.add_argument(
        "--offline",
        metavar="DIR|demo",
        help="after each round run the same prompts with mlx-lm without a server, and report the ratio",
    )


def from_args(argv: Sequence[str]) -> Options:
    """Parses a command line. Wrong flags end the process with a usage line."""
    top = parser()
    given = top.parse_args(argv)
    try:
        server = place(given.base_url, given.api_key, given.timeout)
    except ValueError as error:
        top.error(f"argument --base-url: {error}")
    workload = given.workload or ("file" if given.dataset else "random")
    if (workload == "file") != (given.dataset is not None):
        top.error("--workload file requires --dataset, and --dataset requires --workload file")
    if given.plot is not None and importlib.util.find_spec("matplotlib") is None:
        top.error("argument --plot: matplotlib is not installed (pip install matplotlib)")
    if given.offline not in (None, DEMO) and not Path(given.offline, "config.json").is_file():
        top.error(f"argument --offline: {given.offline} is not a model directory: it has no config.json")
    return Options(
        server=server,
        model=given.model,
        chat=given.endpoint == "chat",
        concurrency=given.concurrency or (() if given.request_rate else DEFAULT_CONCURRENCY),
        request_rates=given.request_rate,
        n_requests=given.num_prompts,
        warmup=given.warmup,
        seed=given.seed,
        workload=workload,
        dataset=given.dataset,
        input_tokens=given.input_len,
        output_tokens=given.output_len,
        range_ratio=given.range_ratio,
        n_groups=given.num_groups,
        prefix_tokens=given.prefix_len,
        n_turns=given.turns,
        ignore_eos=given.ignore_eos,
        fields={"temperature": given.temperature, **given.extra_body},
        slo=Slo(*(_seconds(getattr(given, f"slo_{name}")) for name in ("ttft", "itl", "tpot", "e2e"))),
        json=given.json,
        plot=given.plot,
        offline=given.offline,
        max_connections=given.max_connections,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        _check(value, low, high)
        return value

    return parse


def _number(low: float, high: float = 1e9) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        _check(value, low, high)
        return value

    return parse


def _check(value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN too
        raise argparse.ArgumentTypeError(
            f"{value} is not at least {low:g}" if math.isinf(high) else f"{value} is not between {low:g} and {high:g}"
        )


def _list(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(parse(part.strip()) for part in text.split(","))


def _json(text: str) -> dict[str, Any]:
    try:
        return json_object(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _output_file(text: str) -> Path:
    # Checked before the measurement, so that its results are not lost.
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(
            f"cannot write {text}: its directory does not exist, or it is a directory itself"
        )
    return path
