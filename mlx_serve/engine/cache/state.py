"""Converts mlx-lm's cache objects to arrays and plain data, and back.

Worker thread only. Handles only the types of kinds.py, so a file cannot name an arbitrary class. Knows no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_serve.engine.cache.file import DamagedFileError
from mlx_serve.engine.cache.form import DTYPES, Array, Form, dumped, parsed
from mlx_serve.engine.cache.kinds import bare_state, grown, joined, kind_of, made, parts_of, regrown

_DTYPES = {name: mx.bool_ if name == "bool" else getattr(mx, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class UnknownStateError(Exception):
    """A cache that cannot be written to a file. The text names the type that is unknown."""


@dataclass(slots=True)
class Parts:
    """A cache in parts: the arrays that grow with the tokens, in the order of ``form``, and the states of all others.

    ``states`` describes the state of each layer that does not grow, with the arrays in ``last``.
    """

    form: Form
    growing: list[mx.array] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    last: list[mx.array] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """The bytes of all arrays, without mlx-lm's spare capacity."""
        return sum(array.nbytes for array in (*self.growing, *self.last))


def take_apart(cache: Sequence[Any], n_tokens: int) -> Parts:
    """The parts of a cache that holds ``n_tokens``. Raises UnknownStateError."""
    parts = Parts(parsed("[]"))
    nodes = [_layer_node(layer, n_tokens, parts) for layer in cache]
    parts.form = parsed(dumped(nodes))
    return parts


def views(arrays: Sequence[mx.array]) -> list[NDArray[Any]]:
    """The same memory as numpy arrays, which any thread may read and write. They keep it from being freed."""
    plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays]
    mx.eval(plain)
    return [np.asarray(array) for array in plain]


def blank(array: Array) -> mx.array:
    """An array of zeros in memory, to be filled through ``views``."""
    zeros = mx.zeros(array.shape, _DTYPES[array.dtype])
    mx.eval(zeros)
    return zeros


def from_numpy(array: Array, data: NDArray[Any]) -> mx.array:
    """A copy as an MLX array."""
    plain, dtype = mx.array(data), _DTYPES[array.dtype]
    return plain.view(dtype) if plain.dtype != dtype else plain


def put_together(form: Form, n_tokens: int, growing: Sequence[mx.array], states: Any, last: Sequence[mx.array]) -> Any:
    """The cache of which these are the parts. Raises DamagedFileError."""
    try:
        arrays, others, rest = iter(growing), iter(states), iter(last)
        return [_layer(node, n_tokens, arrays, others, rest) for node in json.loads(form.text)]
    except (LookupError, TypeError, ValueError, StopIteration, RuntimeError) as error:
        raise DamagedFileError(f"its parts do not make a cache: {error!r}") from error


def _layer_node(layer: Any, n_tokens: int, parts: Parts) -> dict[str, Any]:
    name = kind_of(layer)
    if name is None:
        raise UnknownStateError(f"a cache of the kind {type(layer).__name__}")
    members = parts_of(layer)
    if members is not None:
        return {"kind": name, "caches": [_layer_node(member, n_tokens, parts) for member in members]}
    found = grown(layer, n_tokens)
    if found is None:
        parts.states.append(_node(bare_state(layer), parts.last))
        return {"kind": name}
    arrays, settings = found
    node = _node(arrays, parts.growing)
    return {"kind": name, "grows": _for_a_token(node), "settings": [_node(value, []) for value in settings]}


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


def _for_a_token(node: dict[str, Any]) -> dict[str, Any]:
    """Arrays without their token axis."""
    if "dtype" in node:
        *before, _, width = node["shape"]
        return {"dtype": node["dtype"], "shape": [*before, width]}
    return {name: [_for_a_token(item) for item in value] if name != "value" else value for name, value in node.items()}


def _layer(
    node: Any, n_tokens: int, growing: Iterator[mx.array], states: Iterator[Any], last: Iterator[mx.array]
) -> Any:
    if "caches" in node:
        return joined([_layer(member, n_tokens, growing, states, last) for member in node["caches"]])
    if "grows" in node:
        settings = [_value(value, last) for value in node["settings"]]
        return regrown(node["kind"], _value(node["grows"], growing), n_tokens, settings)
    return made(node["kind"], _value(next(states), last))


def _value(node: Any, arrays: Iterator[mx.array]) -> Any:
    if "dtype" in node:
        return next(arrays)
    if "list" in node:
        return [_value(item, arrays) for item in node["list"]]
    if "tuple" in node:
        return tuple(_value(item, arrays) for item in node["tuple"])
    return node["value"]
