"""A model's weights: how large they are, and reading them a slice at a time. Worker thread."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_serve.engine.load_errors import LoadError

# Weights are read in slices of about so many bytes, so that other models' streams continue between them.
_SLICE_BYTES = 256 * 2**20
# The names that mlx-lm's models give to the token embedding.
_EMBEDDINGS = frozenset(
    [
        "embed_tokens",
        "embed_in",
        "embedding",
        "embeddings",
        "token_embeddings",
        "tok_embeddings",
        "word_embeddings",
        "wte",
    ]
)


def files_bytes(path: Path) -> int:
    """The bytes of the weight files in a model's or an adapter's directory."""
    return sum(file.stat().st_size for file in [*path.glob("model*.safetensors"), *path.glob("adapters.safetensors")])


def held_bytes(model: Any) -> int:
    """The bytes of a model's weights in this process."""
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))


def id_bound(model: Any, path: Path | None, vocab_size: int | None, n_tokens: int) -> int:
    """The bound of token ids: ``vocab_size`` of config.json, else the tokenizer's, at most the embedding's rows.

    Raises LoadError when the embedding has fewer rows than ``vocab_size``. MLX does not check indices: an id past the
    last row ends the process.
    """
    n_rows = _embedding_rows(model)
    if vocab_size is None:
        return n_tokens if n_rows is None else min(n_tokens, n_rows)
    if n_rows is not None and n_rows < vocab_size:
        raise LoadError(f"the embedding of {path} has {n_rows} rows for a vocab_size of {vocab_size}")
    return vocab_size


def _embedding_rows(model: Any) -> int | None:
    """The rows of the token embedding. None: the model has no embedding of a known name and type."""
    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] in _EMBEDDINGS]
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    return max((module.weight.shape[0] for module in modules if isinstance(module, kinds)), default=None)


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
