"""Several short prompts in one pass of the model. Each pass has an overhead, which they then pay once.

The pass is as long as the longest of them, so it also computes padding. It pays if the padding costs less than the
passes that are saved. Only for models whose caches can be cut back: what the padding wrote is cut off. Worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_serve.engine.cache.batch_cache import BatchCache


def chosen(lengths: Sequence[int], n_overhead: float, n_tokens: float) -> list[int]:
    """The indices of the prompts to run in one pass of at most ``n_tokens``; none if passes of their own are quicker.

    ``lengths``: the tokens of each prompt. ``n_overhead``: how many tokens take as long as a pass's overhead.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best: list[int] = []
    total = 0
    for n, index in enumerate(order, start=1):
        total += lengths[index]
        padded = n * lengths[index]
        if padded <= n_tokens and n > 1 and padded - total < (n - 1) * n_overhead:
            best = order[:n]
    return best


def prefill_together(model: Any, caches: Sequence[list[Any]], prompts: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Run whole prompts, whose ``caches`` are empty, in one pass. Returns their caches."""
    longest = max(map(len, prompts))
    padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in prompts]
    with mx.stream(generation_stream):
        batch = BatchCache(caches[0])
        for cache in caches:
            batch.join(cache, 0)
        batch.begin(longest)
        model(mx.array(padded), cache=batch.layers)
        batch.advance([len(tokens) for tokens in prompts])
        filled = batch.leave_all()
        mx.clear_cache()
    return filled
