"""Reads tool calls written as JSON, with keys in any order: {"name": "f", "arguments": {...}}. Knows no markers.

    _between ---> _begin --"{"--> _key --":"--> _name_value or _any_value ---> _after_value
                                   ^                                             |  |
                                   +-------------------- "," --------------------+  +--last "}"--> _between

Each name is a step (see readers.CallReader). A call is sent as soon as its name is known and its arguments begin as an
object. Text that a step does not expect leads to ``_fail``: a call that was sent ends there, and the text of a call
that was not sent belongs to the answer.
"""

from __future__ import annotations

import json
import re

from mlx_serve.text.calls.literals import Value
from mlx_serve.text.calls.readers import CallReader, Frame
from mlx_serve.text.symbols import Piece

_KEY = re.compile(r"""\s*(?P<quote>["'])(?P<key>[^"'\\]{0,128})(?P=quote)\s*:\s*(?=\S)""")
_KEY_BEGUN = re.compile(r"""\s*(?:["'](?:[^"'\\]{0,128}(?:["']\s*(?::\s*)?)?)?)?""")
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
# OpenAI's form has the name and the arguments in an object under "function"; some models put only the name there.
_INNER_KEYS = ("function", "tool")
# Keys that some models add to a call. The reader skips them.
_OTHER_KEYS = ("id", "type", "tool_call_id")


class JsonCalls(CallReader):
    """Reads objects with a name and arguments: one or several, in a list or not.

    ``strict``: an object with any other key is no call. ``eager``: a call is sent as soon as its name is known.
    ``by_name``: a call's only key is the name of the tool, and the value of that key is its arguments.
    """

    def __init__(self, frame: Frame, *, strict: bool = False, eager: bool = False, by_name: bool = False) -> None:
        super().__init__(frame)
        self._strict = strict
        self._eager = eager
        self._by_name = by_name
        self._reset()

    def _reset(self) -> None:
        self._name: str | None = None
        self._arguments: Value | None = None
        self._value = Value()
        self._depth = 0
        self._is_out = False

    def _begin(self, out: list[Piece]) -> bool:
        if self._text[self._at] != "{":
            return False if self._may_be_marker() else self._end()
        self._at += 1
        self._depth = 1
        self._step = self._key
        return True

    def _key(self, out: list[Piece]) -> bool:
        if match := _KEY.match(self._text, self._at):
            self._at = match.end()
            return self._begin_value(match["key"])
        if _KEY_BEGUN.fullmatch(self._text, self._at):
            return False
        return self._fail()

    def _begin_value(self, key: str) -> bool:
        if key in _INNER_KEYS and self._text[self._at] == "{":
            self._at += 1
            self._depth += 1
            return True
        if self._by_name and self._depth == 1 and self._frame.accepts(key):
            self._name, key = key, "arguments"
        if self._strict and key not in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_INNER_KEYS, *_OTHER_KEYS):
            return self._fail()
        self._value = Value()
        if key in _ARGUMENT_KEYS and self._arguments is None:
            # Only the first arguments count: they may have been sent already.
            self._arguments = self._value
        self._step = self._name_value if key in (*_NAME_KEYS, *_INNER_KEYS) else self._any_value
        return True

    def _any_value(self, out: list[Piece]) -> bool:
        value = self._value
        self._at = value.take(self._text, self._at)
        is_arguments = value is self._arguments
        if is_arguments:
            self._announce(out)
        else:
            value.pop()
        if value.is_broken:
            return self._fail()
        if not value.is_done:
            return False
        if is_arguments and value.kind == "other" and (text := _other_arguments(value.text)) is None:
            return self._fail()
        if is_arguments and value.kind == "other":
            value.text, value.kind = text or "{}", "object"
            self._announce(out)
        self._step = self._after_value
        return True

    def _name_value(self, out: list[Piece]) -> bool:
        self._at = self._value.take(self._text, self._at)
        if self._value.is_broken or (self._value.is_done and not self._set_name(self._value.pop())):
            return self._fail()
        if self._value.is_done:
            self._announce(out)
            self._step = self._after_value
        return self._value.is_done

    def _set_name(self, text: str) -> bool:
        try:
            name = json.loads(text)
        except (ValueError, RecursionError):
            # The value in place of the name is an object, but not valid JSON.
            return False
        if not isinstance(name, str) or not self._frame.accepts(name) or self._name not in (None, name):
            return False
        self._name = name
        return True

    def _after_value(self, out: list[Piece]) -> bool:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        if self._at == len(self._text):
            return False
        char = self._text[self._at]
        if char not in ",}":
            return self._fail()
        self._at += 1
        self._depth -= char == "}"
        if char == ",":
            self._step = self._key
        return self._depth > 0 or self._end_call(out)

    def _end_call(self, out: list[Piece]) -> bool:
        # Without markers, an object that has only a name may be the answer itself. Between markers it is a call.
        if self._name is None or (self._strict and self._arguments is None):
            return self._fail()
        if not self._is_out:
            self._call(self._name, out)
        if self._arguments is None or self._arguments.kind != "object":
            self._send("{}", out)
        self._reset()
        self._step = self._between
        return True

    def _announce(self, out: list[Piece]) -> None:
        """Send the part of the call that is certain now."""
        is_object = self._arguments is not None and self._arguments.kind == "object"
        if self._name is None or not (is_object or self._eager):
            return
        if not self._is_out:
            self._is_out = True
            self._call(self._name, out)
        if self._arguments is not None and is_object:
            self._send(self._arguments.pop(), out)

    def _fail(self) -> bool:
        """Handles text that cannot belong to a call: ends a call that was sent, and gives up one that was not."""
        is_out = self._is_out
        self._reset()
        self._step = self._between
        return is_out or self._end()

    def _finish(self, out: list[Piece], *, cut: bool) -> None:
        if cut and self._name is not None and not self._is_out and not self._strict:
            self._call(self._name, out)


def _other_arguments(text: str) -> str | None:
    """Arguments that are not an object: null, or a string that holds an object as JSON. None if they are neither."""
    try:
        value = json.loads(text)
        if value is None:
            return "{}"
        return value if isinstance(value, str) and isinstance(json.loads(value), dict) else None
    except (ValueError, RecursionError):
        return None
