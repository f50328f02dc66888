"""How large a model's KV cache is for so many tokens: measured once, on caches that hold one token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, make_prompt_cache

# mlx-lm's caches grow by so many tokens at a time.
_STEP = 256
# A window's cache also holds the chunk that is being prefilled.
_MAX_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class KvSize:
    """``fixed`` bytes, and for each kind of layer the bytes per token and the most tokens that it holds (a window)."""

    fixed: int
    layers: tuple[tuple[float, int | None], ...]
    # Of one number in it.
    element_bytes: int = 2

    def bytes(self, n_tokens: int) -> int:
        """Of one sequence."""
        n = -(-n_tokens // _STEP) * _STEP
        return self.fixed + int(
            sum(each * (n if most is None else min(n, most + _MAX_CHUNK)) for each, most in self.layers)
        )


NO_KV = KvSize(0, ())


def measure(models: Sequence[Any]) -> KvSize:
    """Run one token through the models (which also compiles their kernels) and look at what their caches hold."""
    caches: list[Any] = []
    for model in models:
        cache = make_prompt_cache(model)
        model(mx.array([[0]]), cache=cache)
        mx.eval([layer.state for layer in cache])
        caches += cache
    return of_caches(caches)


def quantized(size: KvSize, bits: int, group_size: int) -> KvSize:
    """The same in ``bits`` bits a number, with a scale and a bias for every ``group_size`` of them."""
    share = (bits / 8 + 2 * size.element_bytes / group_size) / size.element_bytes
    return KvSize(size.fixed, tuple((each * share, most) for each, most in size.layers), size.element_bytes)


def of_caches(caches: Iterable[Any]) -> KvSize:
    """What caches that hold one token tell about longer ones."""
    fixed, layers, element_bytes = 0, [], 2
    for cache in _leaves(caches):
        keys = getattr(cache, "keys", None)
        if keys is None:
            fixed += cache.nbytes
        else:
            layers.append((cache.nbytes / keys.shape[2], getattr(cache, "max_size", None)))
            element_bytes = keys.dtype.size
    return KvSize(fixed, tuple(layers), element_bytes)


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache
