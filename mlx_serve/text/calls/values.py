"""Values that a model wrote as bare text, as JSON, led by the schema of the request. Knows no markup.

A value that does not fit its schema is the text itself, as a string: the client's tool can say what is wrong with it.
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
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema and the root that its references lead into."""

    schema: Any
    root: Any

    def alternatives(self, seen: set[str] | None = None) -> Iterator[Mapping[str, Any]]:
        """The schema and all that it combines and refers to; each reference is followed once."""
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
        """Names of the types that a value may have; empty: nothing is said."""
        found: set[str] = set()
        for part in self.alternatives():
            given = part.get("type")
            found.update(
                [given] if isinstance(given, str) else filter(lambda name: isinstance(name, str), _items(given))
            )
        return frozenset(found or (_type_name(value) for value in self.values()))

    def values(self) -> list[Any]:
        """The values that are listed (enum, const)."""
        parts = list(self.alternatives())
        constants = [part["const"] for part in parts if "const" in part]
        return [value for part in parts for value in _items(part.get("enum"))] + constants

    def member(self, key: str) -> Schema:
        """The schema of a property."""
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
    """What a reference inside the schema ("#/$defs/Place") points to; None when there is nothing."""
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
    """Reads an object or a list: JSON as it stands, with line ends in its strings, or as Python writes it."""

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
# What a text that has begun so may still become.
_BEGINNINGS: dict[str, Callable[[str], bool]] = {
    "null": lambda text: any(word.startswith(text) for word in _NULLS),
    "boolean": lambda text: "true".startswith(text.lower()) or "false".startswith(text.lower()),
    "integer": lambda text: _NUMBER_BEGUN.fullmatch(text) is not None,
    "number": lambda text: _NUMBER_BEGUN.fullmatch(text) is not None,
    "object": lambda text: text.startswith("{"),
    "array": lambda text: text.startswith("["),
}


class Conversion:
    """How a value's text becomes JSON. Where a schema says nothing, only objects and lists are more than text."""

    def __init__(self, schema: Schema) -> None:
        types = schema.types() or frozenset(("string", "object", "array"))
        self._kinds = [kind for kind in _READERS if kind in types]
        self._words = frozenset(value for value in schema.values() if isinstance(value, str))

    def is_surely_text(self, begun: str) -> bool:
        """Whether a value that begins so is a string, however it goes on."""
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
    """A number of Python or JSON, as JSON."""
    return _as_number(text)
