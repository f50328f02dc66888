"""``mlx-serve stop``: unloads a model of a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import add_options, given_place


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if the model is not loaded or in use, or no server answered."""
    given = parser().parse_args(argv)
    try:
        with Client(given_place(given)) as client:
            done = client.post("/models/unload", {"model": given.model})
    except (ValueError, Failure) as error:
        print(f"mlx-serve stop: {error}", file=sys.stderr)
        return 1
    if not done.get("unloaded"):
        print(f"mlx-serve stop: {given.model} is not loaded", file=sys.stderr)
        return 1
    print(f"{given.model} is unloaded.")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    text = "Unload a model of a running server, if nobody uses it. The next request for it loads it again."
    top = argparse.ArgumentParser(prog="mlx-serve stop", description=text)
    top.add_argument("model", help="name of the model, as in mlx-serve ps")
    add_options(top)
    return top
