"""The form of a model's KV caches as JSON: the kind of each layer's cache, and which arrays grow with the tokens.

    {"kind": "KVCache", "grows": {"tuple": [{"dtype": "float16", "shape": [1, 8, 128]}, ...]}, "settings": []}
    {"kind": "RotatingKVCache"}                      its state is that of one position; it can't be cut back
    {"kind": "CacheList", "caches": [...]}

Caches with one form can be put together from blocks of tokens. The token axis is the last but one; ``shape`` leaves it
out. Forms come from files and are not trusted. Knows no MLX and no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

# numpy has no bfloat16, so its bits are stored as integers.
DTYPES: dict[str, Any] = {
    **{name: np.dtype(name) for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32")},
    **{name: np.dtype(name) for name in ("int64", "float16", "float32", "complex64")},
    "bfloat16": np.dtype("uint16"),
}


@dataclass(frozen=True, slots=True)
class Array:
    """An array in a file: the name of MLX's type, and the shape. Raises ValueError for what can't be one."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or any(type(n) is not int or n < 0 for n in self.shape):
            raise ValueError(f"an array of {self.dtype!r} with the shape {self.shape}")

    @property
    def n_bytes(self) -> int:
        """Its bytes; of an array that grows, those of one token."""
        return prod(self.shape) * int(DTYPES[self.dtype].itemsize)

    def of(self, n_tokens: int) -> Array:
        """This array with so many tokens."""
        return Array(self.dtype, (*self.shape[:-1], n_tokens, self.shape[-1]))

    def read(self, data: memoryview) -> NDArray[Any]:
        """The array whose bytes these are."""
        return np.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Form:
    """``text``: the JSON. ``growing``: the arrays that grow, in order. ``whole``: all layers grow.

    A cache of a whole form can be cut back to any number of its tokens.
    """

    text: str
    growing: tuple[Array, ...]
    whole: bool

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in the arrays that grow."""
        return sum(array.n_bytes for array in self.growing)


@lru_cache(maxsize=64)
def parsed(text: str) -> Form:
    """The form that a text describes. Raises ValueError, LookupError, TypeError, RecursionError."""
    layers = list(_layers(json.loads(text)))
    arrays = [array for layer in layers if "grows" in layer for array in arrays_of(layer["grows"])]
    if any(not array.shape for array in arrays):
        raise ValueError("an array that grows has no axis for tokens and another one")
    return Form(text, tuple(arrays), all("grows" in layer for layer in layers))


def arrays_of(node: Any) -> Iterator[Array]:
    """The arrays in a value that state.py has described, in order."""
    if isinstance(node, list):
        for item in node:
            yield from arrays_of(item)
    elif "dtype" in node:
        yield Array(node["dtype"], tuple(node["shape"]))
    else:
        yield from arrays_of(node.get("list", node.get("tuple", [])))


def dumped(value: Any) -> str:
    """The JSON text of a form, the same for equal values."""
    return json.dumps(value, separators=(",", ":"))


def _layers(nodes: list[Any]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        if "caches" in node:
            yield from _layers(node["caches"])
        else:
            yield node
