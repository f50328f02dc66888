"""Prompt tokens into a sequence's KV cache. Lives on the worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_serve.engine.cache.kinds import Quantization


def prefill(model: Any, cache: list[Any], tokens: Sequence[int], quantization: Quantization | None = None) -> None:
    """Run a chunk of one prompt through the model: the cache grows by so many tokens. No logits are computed."""
    with mx.stream(generation_stream):
        model(mx.array(list(tokens))[None], cache=cache)
        if quantization is not None:
            quantization.apply(cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
