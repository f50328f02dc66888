"""All that the project knows of mlx-lm's kinds of caches: how each grows, is cut back, is written and is made again.

Worker thread only. A kind that mlx-lm adds is described here and nowhere else. Knows no file and no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    trim_prompt_cache,
)

# All that may be written to a file and made of what a file says.
_KINDS = {
    kind.__name__: kind
    for kind in (KVCache, RotatingKVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache, ArraysCache)
}
# Those whose tokens stand in their order, from the first one on, if they can be trimmed.
_GROWING = (KVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache)


def leaves(cache: Iterable[Any]) -> Iterator[Any]:
    """The single caches of a sequence: those of each layer, and those in lists."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from leaves(layer.caches)
        else:
            yield layer


def holds(cache: Sequence[Any], n_tokens: int) -> bool:
    """Whether the cache holds exactly so many tokens, by all of its layers that count them.

    A layer that the model does not use counts none. A recurrent state does not count.
    """
    counts = {layer.offset for layer in leaves(cache) if isinstance(getattr(layer, "offset", None), int)}
    return not counts or (counts - {0} or {0}) == {n_tokens}


def can_trim(cache: Sequence[Any]) -> bool:
    """Whether the cache can be cut back to any number of its tokens."""
    return all(map(_can_trim, leaves(cache)))


def always_trims(cache: Sequence[Any]) -> bool:
    """Whether an empty cache can be cut back however long it becomes: a window can't once it is full."""
    return all(isinstance(layer, KVCache) for layer in leaves(cache))


def take_back(cache: list[Any], n_tokens: int) -> None:
    """Take the last ``n_tokens`` off a cache that trims; mlx-lm keeps their room."""
    trim_prompt_cache(cache, n_tokens)


def cut_back(cache: list[Any], n_tokens: int) -> None:
    """Take the last ``n_tokens`` off a copy of a cache (if any, it must trim), and what room there is behind the rest.

    mlx-lm keeps that room, and the first write to what is shared would copy all of it. ConcatenateKVCache even keeps
    what was in it, and adds the next tokens behind that.
    """
    take_back(cache, n_tokens)
    for layer in leaves(cache):
        if isinstance(layer, _GROWING) and not layer.empty():
            layer.keys, layer.values = bare_state(layer)[:2]


def kind_of(layer: Any) -> str | None:
    """The name by which ``made`` knows the kind of a layer's cache; None: it does not know it."""
    kind = type(layer)
    return kind.__name__ if kind is CacheList or _KINDS.get(kind.__name__) is kind else None


def parts_of(layer: Any) -> list[Any] | None:
    """The caches that a layer's cache is a list of; None: it is a single one."""
    return list(layer.caches) if type(layer) is CacheList else None


def joined(parts: Sequence[Any]) -> Any:
    """The cache whose ``parts_of`` these are."""
    return CacheList(*parts)


def made(kind_name: str, state: Any) -> Any:
    """A single cache of a kind with what ``bare_state`` gave of another one. Raises KeyError for an unknown kind."""
    kind = _KINDS[kind_name]
    if kind is ConcatenateKVCache and state[0] is None:
        # Its own state setter can't take what its state is before the first token.
        return kind()
    return kind.from_state(state)


def bare_state(layer: Any) -> Any:
    """The state of a layer's cache, with keys and values cut to what is in them."""
    if isinstance(layer, ArraysCache) or layer.empty():
        return layer.state
    if isinstance(layer, ConcatenateKVCache):
        return tuple(array[..., : layer.offset, :] for array in layer.state)
    return (*layer.keys_and_values(), *islice(layer.state, 2, None))


def is_quantized(layer: Any) -> bool:
    """Whether a layer's cache is kept in few bits."""
    return isinstance(layer, QuantizedKVCache)


def can_batch(layer: Any) -> bool:
    """Whether mlx-lm can put a layer's caches of several sequences together."""
    return hasattr(layer, "merge")


def element_bytes(layer: Any) -> int:
    """Bytes of one number in a layer's cache, before it is quantized."""
    keys = getattr(layer, "keys", None)
    return int(keys.dtype.size) if isinstance(keys, mx.array) else 2


def is_fixed(layer: Any) -> bool:
    """Whether a layer's cache is a state whose size does not depend on the number of tokens."""
    return isinstance(layer, ArraysCache)


def window(layer: Any) -> int | None:
    """The most tokens that a layer's cache keeps; None: all."""
    size = getattr(layer, "max_size", None) or getattr(layer, "chunk_size", None)
    return size if isinstance(size, int) else None


def kind_names(layers: Iterable[Any]) -> str:
    """The kinds of some layers' caches, for a message."""
    return ", ".join(sorted({type(layer).__name__ for layer in layers}))


def _can_trim(layer: Any) -> bool:
    if isinstance(layer, ChunkedKVCache):
        # It says that it can be trimmed, but what lies before its start is gone.
        return bool(layer.start_position == 0)
    return bool(layer.is_trimmable())
