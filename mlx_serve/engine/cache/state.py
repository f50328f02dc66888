"""Converts mlx-lm's cache objects to plain data and bytes, and back.

Worker thread only. Handles only the types of kinds.py, so a file cannot name an arbitrary class. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_serve.engine.cache.file import DamagedFileError
from mlx_serve.engine.cache.kinds import bare_state, joined, kind_of, made, parts_of

# numpy has no bfloat16, so its bits are stored as integers.
_DTYPES = {
    "bool": (mx.bool_, np.bool_),
    "uint8": (mx.uint8, np.uint8),
    "uint16": (mx.uint16, np.uint16),
    "uint32": (mx.uint32, np.uint32),
    "uint64": (mx.uint64, np.uint64),
    "int8": (mx.int8, np.int8),
    "int16": (mx.int16, np.int16),
    "int32": (mx.int32, np.int32),
    "int64": (mx.int64, np.int64),
    "float16": (mx.float16, np.float16),
    "bfloat16": (mx.bfloat16, np.uint16),
    "float32": (mx.float32, np.float32),
    "complex64": (mx.complex64, np.complex64),
}
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}


class UnknownStateError(Exception):
    """A cache that cannot be written to a file. The text names the type that is unknown."""


def take_apart(cache: Sequence[Any]) -> tuple[list[Any], list[mx.array]]:
    """The layout of a cache as JSON values, and its arrays without mlx-lm's spare capacity.

    Raises UnknownStateError.
    """
    arrays: list[mx.array] = []
    return [_layer_node(layer, arrays) for layer in cache], arrays


def to_bytes(arrays: Sequence[mx.array]) -> list[bytes]:
    """Copies of the arrays that any thread may hold and drop."""
    plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays]
    mx.eval(plain)
    # numpy copies a slice of a larger array three times as fast as a memoryview does.
    return [np.asarray(array).tobytes() for array in plain]


def put_together(layout: list[Any], take: Callable[[int], bytearray]) -> list[Any]:
    """The cache with a layout. ``take`` returns the next bytes of its arrays. Raises DamagedFileError."""
    try:
        return [_layer(node, take) for node in layout]
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedFileError(f"its layout can't be read: {error!r}") from error


def _layer_node(layer: Any, arrays: list[mx.array]) -> dict[str, Any]:
    name = kind_of(layer)
    if name is None:
        raise UnknownStateError(f"a cache of the kind {type(layer).__name__}")
    parts = parts_of(layer)
    if parts is not None:
        return {"kind": name, "caches": [_layer_node(part, arrays) for part in parts]}
    return {"kind": name, "state": _node(bare_state(layer), arrays)}


def _node(value: Any, arrays: list[mx.array]) -> dict[str, Any]:
    if isinstance(value, mx.array):
        if value.dtype not in _NAMES:
            raise UnknownStateError(f"an array of {value.dtype}")
        arrays.append(value)
        return {"dtype": _NAMES[value.dtype], "shape": list(value.shape)}
    # mlx-lm assigns to items of its lists and distinguishes tuples from lists, so both types are stored.
    if type(value) in (list, tuple):
        return {type(value).__name__: [_node(item, arrays) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UnknownStateError(f"a {type(value).__name__}")


def _layer(node: dict[str, Any], take: Callable[[int], bytearray]) -> Any:
    if "caches" in node:
        return joined([_layer(part, take) for part in node["caches"]])
    return made(node["kind"], _value(node["state"], take))


def _value(node: dict[str, Any], take: Callable[[int], bytearray]) -> Any:
    if "dtype" in node:
        return _array(node, take)
    if "list" in node:
        return [_value(item, take) for item in node["list"]]
    if "tuple" in node:
        return tuple(_value(item, take) for item in node["tuple"])
    return node["value"]


def _array(node: dict[str, Any], take: Callable[[int], bytearray]) -> mx.array:
    dtype, plain = _DTYPES[node["dtype"]]
    shape = node["shape"]
    if any(n < 0 for n in shape):
        raise ValueError(f"an array of the shape {shape}")
    data = np.frombuffer(take(prod(shape) * dtype.size), dtype=plain).reshape(shape)
    array = mx.array(data)
    return array.view(dtype) if array.dtype != dtype else array
