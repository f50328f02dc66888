"""Converts values that a model wrote as bare text to JSON, guided by the request's schema. Knows no markup.

A value that does not fit its schema becomes a string of its text: the client's tool can then report what is wrong.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_INTEGER = re.compile(r"\+?(-?)0*(\d+)(?:\.0*)?")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBER_BEGUN = re.compile(r"[-+\d.eE]*")
_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_NULLS = ("null", "None")


def quoted(text: str) -> str:
    """``text`` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema, and the root document in which its references are resolved."""

    schema: Any
    root: Any

    def alternatives(self, seen: set[str] | None = None) -> Iterator[Mapping[str, Any]]:
        """The schema and all schemas that it combines or refers to. Each reference is followed once."""
        seen = set() if seen is None else seen
        if not isinstance(self.schema, Mapping):
            return
        yield self.schema
        target = self.schema.get("$ref")
        parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _items(self.schema.get(key))]
        if isinstance(target, str) and target not in seen:
            seen.add(target)
            parts.append(_pointed(self.root, target))
        for part in parts:
            yield from Schema(part, self.root).alternatives(seen)

    def types(self) -> frozenset[str]:
        """The names of the types that a value may have. Empty if the schema does not restrict them."""
        found: set[str] = set()
        for part in self.alternatives():
            given = part.get("type")
            found.update(
                [given] if isinstance(given, str) else filter(lambda name: isinstance(name, str), _items(given))
            )
        return frozenset(found or (_type_name(value) for value in self.values()))

    def values(self) -> list[Any]:
        """The values that the schema lists (enum, const)."""
        parts = list(self.alternatives())
        constants = [part["const"] for part in parts if "const" in part]
        return [value for part in parts for value in _items(part.get("enum"))] + constants

    def member(self, key: str) -> Schema:
        """The schema of the property ``key``."""
        for part in self.alternatives():
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return Schema(properties[key], self.root)
        extra = (part["additionalProperties"] for part in self.alternatives() if "additionalProperties" in part)
        return Schema(next(extra, None), self.root)

    def item(self) -> Schema:
        """The schema of a list's items."""
        return Schema(next((part["items"] for part in self.alternatives() if "items" in part), None), self.root)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _type_name(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def _pointed(root: Any, target: str) -> Any:
    """The part of the schema that a reference ("#/$defs/Place") points to, or None."""
    for step in target.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _as_null(text: str) -> str | None:
    return "null" if text in _NULLS else None


def _as_boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _as_integer(text: str) -> str | None:
    match = _INTEGER.fullmatch(text)
    return match[1] + match[2] if match else None


def _as_number(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) else _as_integer(text)


def _as(kind: type) -> Callable[[str], str | None]:
    """Makes a reader of an object or a list: JSON, JSON with line ends in its strings, or a Python literal."""

    def read(text: str) -> str | None:
        try:
            if isinstance(json.loads(text, parse_constant=_refuse), kind):
                return text
        except (ValueError, RecursionError):
            pass
        for parse in (_loose_json, ast.literal_eval):
            try:
                value = parse(text)
                if isinstance(value, kind):
                    return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
        return None

    return read


def _loose_json(text: str) -> Any:
    return json.loads(text, strict=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_READERS: dict[str, Callable[[str], str | None]] = {
    "null": _as_null,
    "boolean": _as_boolean,
    "integer": _as_integer,
    "number": _as_number,
    "object": _as(dict),
    "array": _as(list),
}
# For each type: whether an incomplete text may still become such a value.
_BEGINNINGS: dict[str, Callable[[str], bool]] = {
    "null": lambda text: any(word.startswith(text) for word in _NULLS),
    "boolean": lambda text: "true".startswith(text.lower()) or "false".startswith(text.lower()),
    "integer": lambda text: _NUMBER_BEGUN.fullmatch(text) is not None,
    "number": lambda text: _NUMBER_BEGUN.fullmatch(text) is not None,
    "object": lambda text: text.startswith("{"),
    "array": lambda text: text.startswith("["),
}


class Conversion:
    """Converts the text of a value to JSON. If the schema gives no type, only objects and lists are parsed."""

    def __init__(self, schema: Schema) -> None:
        types = schema.types() or frozenset(("string", "object", "array"))
        self._kinds = [kind for kind in _READERS if kind in types]
        self._words = frozenset(value for value in schema.values() if isinstance(value, str))

    def is_surely_text(self, begun: str) -> bool:
        """Whether a value that begins with ``begun`` is a string, whatever follows."""
        begun = begun.strip()
        if not self._kinds:
            return not self._words
        return bool(begun) and not self._words and not any(_BEGINNINGS[kind](begun) for kind in self._kinds)

    def json(self, text: str) -> str:
        """The value as JSON."""
        trimmed = text.strip()
        for word in (text, trimmed):
            if word in self._words:
                return quoted(word)
        found = (_READERS[kind](trimmed) for kind in self._kinds)
        return next((value for value in found if value is not None), quoted(text))


def python_number(text: str) -> str | None:
    """Converts a number of Python or JSON to JSON. None if ``text`` is not a number."""
    return _as_number(text)
