"""The size of a model's KV cache for a number of tokens. Measured once, at two lengths, without computing anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.cache.checkpoints import N_FREE, N_MOST, SHARE
from mlx_serve.engine.cache.kinds import Quantization, element_bytes, is_fixed, leaves, window

# mlx-lm's caches grow in steps of so many tokens.
_STEP = 256
# The cache of a sliding window also holds the chunk that is being prefilled.
_MAX_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class KvSize:
    """``fixed`` bytes, and for each kind of layer its bytes per token and the most tokens that it holds (a window)."""

    fixed: int
    layers: tuple[tuple[float, int | None], ...]
    # The bytes of one number in the cache.
    element_bytes: int = 2
    # The part of the fixed bytes that each checkpoint has too.
    state: int = 0

    def bytes(self, n_tokens: int) -> int:
        """The bytes for one sequence of ``n_tokens``, with its checkpoints."""
        n = -(-n_tokens // _STEP) * _STEP
        complete = sum(each * n for each, most in self.layers if most is None)
        windows = [(each, most) for each, most in self.layers if most is not None]
        checkpoint = self.state + sum(each * min(n, most) for each, most in windows)
        checkpoints = min(N_MOST * checkpoint, max(N_FREE * checkpoint, SHARE * complete))
        return self.fixed + int(
            complete + sum(each * min(n, most + _MAX_CHUNK) for each, most in windows) + checkpoints
        )


NO_KV = KvSize(0, ())


def measure(models: Sequence[Any]) -> KvSize:
    """Describe passes of two lengths through the models, and compare the sizes of each layer's cache.

    The names of the arrays do not matter. Bytes that grow with the tokens count for each token, all others once.
    """
    shorter, longer = ([layer for model in models for layer in _filled(model, n)] for n in (_STEP, 2 * _STEP))
    fixed, state, layers, n_bytes = 0.0, 0.0, [], 2
    for layer, grown in zip(shorter, longer, strict=True):
        each = (grown.nbytes - layer.nbytes) / _STEP
        rest = max(0.0, layer.nbytes - each * _STEP)
        fixed += rest
        state += rest if is_fixed(layer) else 0
        if each > 0:
            layers.append((each, window(layer)))
            n_bytes = element_bytes(layer)
    return KvSize(int(fixed), tuple(layers), n_bytes, int(state))


def _filled(model: Any, n_tokens: int) -> Iterable[Any]:
    """The caches of a sequence of ``n_tokens``, with their shapes. MLX computes none of their values."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, n_tokens), dtype=mx.int32), cache=cache)
    return leaves(cache)


def bytes_of(size: KvSize, n_tokens: int, quantization: Quantization | None) -> int:
    """The bytes for one sequence whose cache is quantized once it is long enough: the most on the way there."""
    if quantization is None:
        return size.bytes(n_tokens)
    return max(size.bytes(min(n_tokens, quantization.start)), _quantized(size, quantization).bytes(n_tokens))


def _quantized(size: KvSize, quantization: Quantization) -> KvSize:
    """The size of a quantized cache, which has a scale and a bias for each group of numbers."""
    share = (quantization.bits / 8 + 2 * size.element_bytes / quantization.group_size) / size.element_bytes
    return KvSize(size.fixed, tuple((each * share, most) for each, most in size.layers), size.element_bytes, size.state)
