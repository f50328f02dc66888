"""The knowledge about mlx-lm's cache types: how each one grows, is trimmed, is written and is restored.

Worker thread only. A type that mlx-lm adds is described here and nowhere else. Knows no file and no scheduler.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

# The types that may be written to a file and restored from one.
_KINDS = {
    kind.__name__: kind
    for kind in (KVCache, RotatingKVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache, ArraysCache)
}
# The types that, while they can be trimmed, hold their tokens in order from the first one on.
_GROWING = (KVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache)
# The sizes of quantized groups, the one with fewer bytes first.
_GROUPS = (64, 32)
# The types that keep every token, so that they can be trimmed to any of them.
_COMPLETE = (KVCache, QuantizedKVCache, ConcatenateKVCache)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A KV cache gets ``bits`` a number, in groups of ``group_size`` numbers, once it holds ``start`` tokens."""

    bits: int
    group_size: int = 64
    start: int = 5000

    def apply(self, cache: list[Any]) -> None:
        """Quantize those layers of a sequence's cache that are due."""
        maybe_quantize_kv_cache(cache, self.start, self.group_size, self.bits)


def leaves(cache: Iterable[Any]) -> Iterator[Any]:
    """The single caches of a sequence: one for each layer, and the members of lists."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from leaves(layer.caches)
        else:
            yield layer


def with_leaves(cache: Iterable[Any], new: Iterator[Any]) -> list[Any]:
    """The cache with its single caches replaced by ``new`` ones, in the order of ``leaves``."""
    return [
        CacheList(*with_leaves(layer.caches, new)) if isinstance(layer, CacheList) else next(new) for layer in cache
    ]


def holds(cache: Sequence[Any], n_tokens: int) -> bool:
    """Whether the cache holds exactly ``n_tokens`` tokens, by all of its layers that count them.

    A layer that the model does not use counts no tokens. A recurrent state has no count.
    """
    counts = {layer.offset for layer in leaves(cache) if isinstance(getattr(layer, "offset", None), int)}
    return not counts or (counts - {0} or {0}) == {n_tokens}


def can_trim(cache: Sequence[Any]) -> bool:
    """Whether the cache can be trimmed to any number of its tokens."""
    return all(map(_can_trim, leaves(cache)))


def always_trims(cache: Sequence[Any]) -> bool:
    """Whether an empty cache stays trimmable however long it becomes. A window does not, once it is full."""
    return all(isinstance(layer, KVCache) for layer in leaves(cache))


def is_complete(layer: Any) -> bool:
    """Whether a single cache keeps every token. A window forgets the oldest ones, a recurrent state all of them."""
    return isinstance(layer, _COMPLETE)


def snapshot(layer: Any) -> Any:
    """A copy of a single cache that never changes: what the next tokens need, in arrays of its own."""
    copied = copy.deepcopy(layer)
    if isinstance(copied, ArraysCache):
        copied.cache = [mx.contiguous(array) if array is not None else None for array in copied.cache]
    elif not copied.empty():
        keys, values = bare_state(copied)[:2]
        if isinstance(copied, RotatingKVCache) and not copied.keep and keys.shape[2] > copied.max_size:
            # While a prompt is prefilled, a window also holds the last chunk, in the order of the tokens.
            keys, values = (array[..., -copied.max_size :, :] for array in (keys, values))
            copied._idx = copied.max_size
        copied.keys, copied.values = tree_map(mx.contiguous, (keys, values))
    return copied


def take_back(cache: list[Any], n_tokens: int) -> None:
    """Remove the last ``n_tokens`` of a trimmable cache; mlx-lm keeps their space allocated.

    ConcatenateKVCache would keep the tokens too, and append the next ones after them.
    """
    for layer in leaves(cache):
        layer.trim(n_tokens)
        if isinstance(layer, ConcatenateKVCache):
            layer.keys, layer.values = bare_state(layer)[:2]


def cut_back(cache: list[Any], n_tokens: int) -> None:
    """Remove the last ``n_tokens`` of a copied cache, and the spare capacity. If n_tokens > 0, it must be trimmable.

    mlx-lm keeps spare capacity, and the first write to a shared array would copy all of it.
    """
    if n_tokens:
        take_back(cache, n_tokens)
    for layer in leaves(cache):
        if isinstance(layer, _GROWING) and not layer.empty():
            layer.keys, layer.values = bare_state(layer)[:2]


def packed(cache: Sequence[Any], bits: int) -> list[Any]:
    """The cache with its KVCaches quantized, in the largest groups that divide the head dimensions.

    Windows, recurrent states and what is quantized already are the same objects. Raises ValueError where no group fits.
    """
    return with_leaves(cache, (_packed(layer, bits) for layer in leaves(cache)))


def unpacked(cache: Sequence[Any]) -> list[Any]:
    """The cache that was ``packed``, in the data type that it had. What was not quantized is the same object."""
    return with_leaves(cache, (_unpacked(layer) for layer in leaves(cache)))


def kind_of(layer: Any) -> str | None:
    """The name by which ``made`` knows the type of a layer's cache; None: the type is unknown."""
    kind = type(layer)
    return kind.__name__ if kind is CacheList or _KINDS.get(kind.__name__) is kind else None


def parts_of(layer: Any) -> list[Any] | None:
    """The members of a layer's cache that is a list of caches; None: it is a single cache."""
    return list(layer.caches) if type(layer) is CacheList else None


def joined(parts: Sequence[Any]) -> Any:
    """A list cache with these members, the reverse of ``parts_of``."""
    return CacheList(*parts)


def made(kind_name: str, state: Any) -> Any:
    """A single cache of a type, from the ``bare_state`` of another one. Raises KeyError for an unknown type."""
    kind = _KINDS[kind_name]
    if kind is ConcatenateKVCache and state[0] is None:
        # The type's state setter does not accept the state of an empty cache.
        return kind()
    return kind.from_state(state)


def bare_state(layer: Any) -> Any:
    """The state of a layer's cache, with keys and values cut to the tokens in use."""
    if isinstance(layer, ArraysCache) or layer.empty():
        return layer.state
    if isinstance(layer, ConcatenateKVCache):
        return tuple(array[..., : layer.offset, :] for array in layer.state)
    return (*layer.keys_and_values(), *islice(layer.state, 2, None))


def grown(layer: Any, n_tokens: int) -> tuple[Any, list[Any]] | None:
    """The arrays of a layer's cache that grow with the tokens, and its settings; None: it has other state.

    The arrays are keys and values, cut to the tokens in use, with the token axis last but one. Both are None if the
    model does not use the layer. Any first part of these arrays is the cache of the first tokens.
    """
    if not isinstance(layer, _GROWING) or not _can_trim(layer):
        return None
    keys, values, *others = bare_state(layer)
    arrays = [array for _, array in tree_flatten([keys, values]) if array is not None]
    if any(array.ndim < 2 or array.shape[-2] != n_tokens for array in arrays):
        return None
    # The first of the others is the number of tokens.
    return (keys, values), others[1:]


def regrown(kind_name: str, arrays: Any, n_tokens: int, settings: Sequence[Any]) -> Any:
    """A single cache from what ``grown`` has returned. Raises KeyError for an unknown type."""
    if kind_name == ConcatenateKVCache.__name__:
        return made(kind_name, arrays)
    return made(kind_name, (*arrays, n_tokens if arrays[0] is not None else 0, *settings))


def is_quantized(layer: Any) -> bool:
    """Whether a layer's cache is quantized."""
    return isinstance(layer, QuantizedKVCache)


def element_bytes(layer: Any) -> int:
    """Bytes of one number in a layer's cache, before it is quantized."""
    keys = getattr(layer, "keys", None)
    return int(keys.dtype.size) if isinstance(keys, mx.array) else 2


def is_fixed(layer: Any) -> bool:
    """Whether a layer's cache is a state whose size does not depend on the number of tokens."""
    return isinstance(layer, ArraysCache)


def window(layer: Any) -> int | None:
    """The most tokens that a layer's cache keeps; None: all tokens."""
    size = getattr(layer, "max_size", None) or getattr(layer, "chunk_size", None)
    return size if isinstance(size, int) else None


def kind_names(layers: Iterable[Any]) -> str:
    """The types of these layers' caches, for a message."""
    return ", ".join(sorted({type(layer).__name__ for layer in layers}))


def _packed(layer: Any, bits: int) -> Any:
    if not isinstance(layer, KVCache) or layer.empty():
        return layer
    arrays = layer.keys_and_values()
    dims = {array.shape[-1] for array in arrays}
    group = next((group for group in _GROUPS if all(dim % group == 0 for dim in dims)), None)
    if group is None:
        raise ValueError(f"no group of {_GROUPS} divides its dimensions of {sorted(dims)}")
    small = QuantizedKVCache(group, bits)
    small.keys, small.values = (mx.quantize(array, group_size=group, bits=bits) for array in arrays)
    small.offset = layer.offset
    return small


def _unpacked(layer: Any) -> Any:
    if not isinstance(layer, QuantizedKVCache):
        return layer
    plain = KVCache()
    plain.keys, plain.values = (
        mx.dequantize(numbers, scales, biases, group_size=layer.group_size, bits=layer.bits)
        for numbers, scales, biases in layer.keys_and_values()
    )
    plain.offset = layer.offset
    return plain


def _can_trim(layer: Any) -> bool:
    if isinstance(layer, ChunkedKVCache):
        # This cache reports itself as trimmable, but the tokens before its start are gone.
        return bool(layer.start_position == 0)
    return bool(layer.is_trimmable())
