"""``mlx-serve ps``: the models that a running server has in memory, and what runs on each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from mlx_serve.client.connection import Client, objects
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import add_options, given_place
from mlx_serve.commands.terminal import bytes_text, table

_HEAD = ("NAME", "WEIGHTS", "KV", "RUNNING", "WAITING", "IDLE")
_RIGHT = frozenset({1, 2, 3, 4, 5})


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if the server did not answer."""
    given = parser().parse_args(argv)
    try:
        with Client(given_place(given)) as client:
            models = objects(client.get("/stats").get("models"))
    except (ValueError, Failure) as error:
        print(f"mlx-serve ps: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(models, indent=2))
    else:
        print(table(_HEAD, [_row(model) for model in models], _RIGHT) if models else "No model is loaded.")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    top = argparse.ArgumentParser(prog="mlx-serve ps", description="List the models that a running server has loaded.")
    add_options(top)
    top.add_argument("--json", action="store_true", help="print JSON")
    return top


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    weights, kv, idle_s = (_number(model.get(name)) for name in ("weights_bytes", "kv_bytes", "idle_s"))
    counts = (str(model.get(name, "?")) for name in ("running", "waiting"))
    return (str(model.get("name")), bytes_text(int(weights)), bytes_text(int(kv)), *counts, f"{idle_s:.0f} s")


def _number(value: Any) -> float:
    """What should be a number: any server may answer, and anything."""
    return value if isinstance(value, int | float) else 0.0
