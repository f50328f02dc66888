"""The server with a budget of memory, and a line that tells what MLX holds; or a small model to serve with it.

    python -m benchmarks.budgeted --kv-cache-bytes 128MiB --model DIR [the server's flags]
    python -m benchmarks.budgeted --write-model DIR

Each line on stdin is answered by one of JSON on stdout: what MLX uses, keeps of freed memory, and its peak so far, in
bytes. The model has random weights, a token for each byte, and a KV cache that is large for the work it makes: 16 KiB a
token.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from pathlib import Path

from benchmarks.children import ROOT
from mlx_serve import cli, config, logs
from mlx_serve.blas import preload_openblas

MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
KV_TOKEN_BYTES = 2 * 4 * 8 * 64 * 4  # keys and values, layers, heads, numbers, float32


def write_model(path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "engine"))
    import tinymodel

    tinymodel.write_model(path, **MODEL)


def serve(kv_bytes: int, argv: list[str]) -> None:
    from mlx_serve.engine.catalog import Catalog, read_entry
    from mlx_serve.engine.memory import MemoryBudget
    from mlx_serve.engine.mlx_backend import BatchOptions
    from mlx_serve.engine.models import ModelStore
    from mlx_serve.engine.single_backend import SingleOptions

    settings = config.from_args(argv)
    logs.configure(settings.log_level, "text")
    path = Path(settings.model or "")
    entry = read_entry(path.name, path)
    catalog = Catalog(entry, [str(path), entry.name])
    store = ModelStore(
        catalog,
        tokenizer_config={},
        batch=BatchOptions(settings.decode_concurrency, settings.prompt_concurrency, settings.prefill_step_size),
        single=SingleOptions(settings.prefill_step_size, None, 64, 5000),
        prompt_cache_size=settings.prompt_cache_size,
        prompt_cache_bytes=settings.prompt_cache_bytes,
        budget=MemoryBudget(kv_bytes=kv_bytes),
    )
    threading.Thread(target=tell, daemon=True).start()
    cli.serve(settings, catalog, store)


def tell() -> None:
    import mlx.core as mx

    for _ in sys.stdin:
        held = {"active": mx.get_active_memory(), "kept": mx.get_cache_memory(), "peak": mx.get_peak_memory()}
        print(json.dumps(held), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgeted", description=__doc__.splitlines()[0])
    parser.add_argument("--kv-cache-bytes", type=config.size)
    parser.add_argument("--write-model", type=Path, metavar="DIR")
    options, rest = parser.parse_known_args()
    preload_openblas()
    if options.write_model:
        write_model(options.write_model)
    else:
        serve(options.kv_cache_bytes, rest)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # as cli.run does, and for the same reason


if __name__ == "__main__":
    main()
