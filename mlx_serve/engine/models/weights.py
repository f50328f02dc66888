"""A model's weights: how large they are, and reading them a slice at a time. Worker thread."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

# Read in slices of about so many bytes, so that other models' streams go on between them.
_SLICE_BYTES = 256 * 2**20


def files_bytes(path: Path) -> int:
    """Of the weights in a model's or an adapter's directory."""
    return sum(file.stat().st_size for file in [*path.glob("model*.safetensors"), *path.glob("adapters.safetensors")])


def held_bytes(model: Any) -> int:
    """Of the weights that this process holds of a model."""
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))


def read_weights(model: Any) -> Generator[int, None, None]:
    """Evaluate a lazily loaded model's weights, a slice at a time. Yields the bytes of each slice."""
    batch, n_bytes = [], 0
    for _, weight in tree_flatten(model.parameters()):
        batch.append(weight)
        n_bytes += weight.nbytes
        if n_bytes >= _SLICE_BYTES:
            mx.eval(batch)
            yield n_bytes
            batch, n_bytes = [], 0
    if batch:
        mx.eval(batch)
        yield n_bytes
