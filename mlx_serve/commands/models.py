"""``mlx-serve models``: lists the models that this machine could serve, or those of a running server.

Accepts the server's flags, and lists the models that a server with these flags would find.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from mlx_serve.client.connection import Client, objects
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import add_options, given_place
from mlx_serve.commands import model_list
from mlx_serve.commands.model_list import Found
from mlx_serve.commands.terminal import bytes_text, printable, table
from mlx_serve.settings import config
from mlx_serve.settings import models as model_options
from mlx_serve.values import StartError

_HEAD = ("NAME", "TYPE", "WEIGHTS", "SIZE", "CONTEXT", "FROM")
_RIGHT = frozenset({3, 4})


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if the flags are wrong or the server did not answer."""
    top = parser()
    given, flags = top.parse_known_args(argv)
    if given.url is not None:
        if flags:
            top.error(f"cannot be combined with --url: {' '.join(flags)}")
        return _of_server(given)
    try:
        settings = config.from_args(flags)
        model_options.directories(settings)
        models = model_list.models(settings)
    except StartError as error:
        print(f"mlx-serve models: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps([_as_object(model) for model in models], indent=2))
    else:
        _print(models)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's own flags; all others are the server's."""
    top = argparse.ArgumentParser(
        prog="mlx-serve models",
        usage="mlx-serve models [--url URL] [--api-key KEY] [--json] [FLAGS OF THE SERVER]",
        description="List the models that this machine could serve, or those of a running server.",
        epilog="Server flags that affect the list: --model-dir (or $MLX_MODEL_PATH), --model, --served-model-name.",
        allow_abbrev=False,
    )
    add_options(top, has_default=False)
    top.add_argument("--json", action="store_true", help="print JSON")
    return top


def _print(models: Sequence[Found]) -> None:
    good = [model for model in models if model.files.servable]
    if good:
        print(table(_HEAD, [_row(model) for model in good], _RIGHT))
    else:
        print("No model found. Name the folder of your models with --model-dir, or try mlx-serve --demo.")
    for model in models:
        if not model.files.servable:
            faults = "; ".join(fault.text for fault in model.files.faults if fault.fatal)
            print(f"cannot be served: {model.name} ({model.source}): {faults}", file=sys.stderr)


def _row(model: Found) -> tuple[str, ...]:
    files = model.files
    context = str(files.context_tokens) if files.context_tokens else "?"
    weights, size = files.quantization or "?", bytes_text(files.weight_bytes)
    return (model.name, files.model_type or "?", weights, size, context, model.source)


def _as_object(model: Found) -> dict[str, Any]:
    files = model.files
    return {
        "name": model.name,
        "source": model.source,
        "path": str(files.path),
        "model_type": files.model_type,
        "quantization": files.quantization,
        "weight_bytes": files.weight_bytes,
        "context_tokens": files.context_tokens,
        "chat_template": files.has_chat_template,
        "servable": files.servable,
        "faults": [fault.text for fault in files.faults],
    }


def _of_server(given: argparse.Namespace) -> int:
    try:
        where = given_place(given)
        with Client(where) as client:
            entries = objects(client.get("/models").get("data"))
            state = client.get("/health", ok=(200, 503))
    except (ValueError, Failure) as error:
        print(f"mlx-serve models: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps({"models": entries, "health": state}, indent=2))
        return 0
    rows = [(str(entry.get("id")), _loaded(entry, state)) for entry in entries]
    print(table(("NAME", "STATE"), rows))
    known = {key: printable(str(state.get(key, "?"))) for key in ("status", "running", "waiting")}
    print(f"\n{where}: {known['status']}, {known['running']} running, {known['waiting']} waiting")
    return 0


def _loaded(entry: dict[str, Any], state: dict[str, Any]) -> str:
    in_memory = state.get("models")
    is_there = isinstance(in_memory, list) and entry.get("id") in in_memory
    return "loaded" if entry.get("loaded") or is_there else "on request"
