"""The first layers of a model, with its embeddings and its head, as a draft model that needs no training.

    python -m benchmarks.first_layers MODEL OUT [--layers 2]

It shows that a draft model works. It is right more rarely than one that was trained.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def write(model: Path, out: Path, n_layers: int) -> None:
    """Write a model directory ``out`` with the first layers of ``model``."""
    out.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = {}
    for file in model.glob("*.safetensors"):
        arrays = mx.load(str(file))
        assert isinstance(arrays, dict)
        weights |= {name: array for name, array in arrays.items() if _layer(name) < n_layers}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = n_layers
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in [*model.glob("tokenizer*"), *model.glob("generation_config.json")]:
        shutil.copyfile(file, out / file.name)


def _layer(name: str) -> int:
    """The layer of a weight; -1: it belongs to none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_layers", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("out", type=Path, help="the new model directory")
    parser.add_argument("--layers", type=int, default=2, help="(default: 2)")
    options = parser.parse_args()
    write(options.model, options.out, options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
