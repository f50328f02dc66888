"""Tool calls written as JSON, read one character at a time: {"name": "f", "arguments": {...}}. Knows no markers.

A call goes out as soon as its name is known and its arguments begin like an object; from then on it is a call, however
it goes on. Text that never gets there is given back by ``close``.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

from mlx_serve.text.pieces import Piece

NAME = re.compile(r"[\w.:/-]{1,128}")
SPACE = " \t\r\n"
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
# Keys that some models add to a call.
_OTHER_KEYS = ("id", "type", "tool_call_id")


class Value:
    """Follows one JSON value: where it ends, whether it is inside a string, and whether it is an object."""

    def __init__(self) -> None:
        self.text = ""
        self.in_string = False
        self.done = False
        self.kind: Literal["unknown", "object", "broken", "other"] = "unknown"
        self._depth = 0
        self._escaped = False
        self._start = ""

    def step(self, char: str) -> bool:
        """Take a character. False: it is not part of the value, which ended before it."""
        if self._depth == 0 and not self.in_string and char in ",}]":
            self.done = True
            return False
        self.text += char
        self._judge(char)
        if self.in_string:
            self._step_in_string(char)
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        return True

    def take(self) -> str:
        """What was not taken yet."""
        text, self.text = self.text, ""
        return text

    def _judge(self, char: str) -> None:
        if self.kind != "unknown" or char in SPACE:
            return
        self._start += char
        if self._start != "{":
            is_object = self._start in ('{"', "{}")
            self.kind = "object" if is_object else "broken" if self._start[0] == "{" else "other"

    def _step_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
            self.done = self._depth == 0


def _other_arguments(text: str) -> str | None:
    """Arguments that are no object: none at all, null, or an object written as a JSON string. None: no arguments."""
    try:
        value = json.loads(text) if text.strip() else None
        if value is None:
            return "{}"
        return value if isinstance(value, str) and isinstance(json.loads(value), dict) else None
    except (ValueError, RecursionError):
        return None


class Call:
    """One call: its name and arguments, of which either may come first."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = Value()
        self.started = False
        self.ended = False

    def send(self, out: list[Piece], *, eager: bool) -> None:
        """Append what can go out now."""
        is_object = self.arguments.kind == "object"
        if self.name is None or not (self.started or is_object or eager or self.ended):
            return
        if not self.started:
            self.started = True
            out.append(Piece("call", self.name))
        text = self.arguments.take() if is_object else self._other_text()
        if text:
            out.append(Piece("arguments", text))

    def _other_text(self) -> str:
        return (_other_arguments(self.arguments.text) or "") if self.ended else ""


class CallReader:
    """What the readers of JSON arguments share. ``eager``: a call goes out as soon as it has a name."""

    def __init__(self, *, eager: bool = False) -> None:
        self.n_calls = 0
        self.in_string = False
        self.failed = False
        self._eager = eager
        self._call = Call()
        # What has come and is not part of a call that went out.
        self._raw = ""

    def feed(self, text: str, out: list[Piece]) -> int:
        """Up to where a string begins or ends, a call ends, or it is clear that this is none."""
        n_taken = 0
        while n_taken < len(text) and not self.failed:
            char = text[n_taken]
            n_taken += 1
            was_in_string = self.in_string
            self._raw += char
            self.failed = not self._take(char)
            if self.failed or self._call.ended or self.in_string != was_in_string:
                break
        if n_taken == 0:
            self._raw += text
            return len(text)
        self._send(out)
        return n_taken

    def close(self, out: list[Piece], *, cut: bool) -> str:
        """What has come and is no call."""
        return "" if self._eager and cut and not self.failed else self._raw

    @abstractmethod
    def _take(self, char: str) -> bool:
        """Take a character. False: no call can have it here."""

    def _send(self, out: list[Piece]) -> None:
        if self.failed:
            self.in_string = False
            return
        was_started = self._call.started
        self._call.send(out, eager=self._eager)
        if self._call.started:
            self.n_calls += not was_started
            self._raw = ""
        if self._call.ended:
            self._call = Call()


class JsonCalls(CallReader):
    """Objects with a name and arguments. ``accept``: which names are calls. ``strict``: other keys make it no call."""

    def __init__(
        self, accept: Callable[[str], bool] | None = None, *, strict: bool = False, eager: bool = False
    ) -> None:
        super().__init__(eager=eager)
        self._accept = accept or (lambda name: bool(NAME.fullmatch(name)))
        self._strict = strict
        self._step = self._between
        self._key = ""
        self._value = Value()

    def _take(self, char: str) -> bool:
        return self._step(char)

    def _between(self, char: str) -> bool:
        if char == "{":
            self._step, self._key = self._in_key, ""
            return True
        return char in SPACE or char in "[],;"

    def _in_key(self, char: str) -> bool:
        if self.in_string:
            self._key += char
            self.in_string = char != '"'
        elif char == '"' and not self._key:
            self._key, self.in_string = char, True
        elif char == ":":
            return self._begin_value()
        elif char == "}" and not self._key:
            return self._end_call()
        else:
            return char in SPACE
        return True

    def _begin_value(self) -> bool:
        key = self._key[1:-1]
        if not self._key or (self._strict and key not in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS)):
            return False
        # Arguments that came already are not replaced: they may have gone out.
        is_arguments = key in _ARGUMENT_KEYS and self._call.arguments.kind == "unknown"
        self._value = self._call.arguments if is_arguments else Value()
        self._step = self._in_value
        return True

    def _in_value(self, char: str) -> bool:
        if not self._value.text and char in SPACE and self._value.kind == "unknown":
            return True
        belongs = self._value.step(char)
        self.in_string = self._value.in_string
        if self._value is self._call.arguments and self._value.kind == "broken":
            return False
        if not self._value.done:
            return True
        self._step = self._after_value
        return self._end_value() and (belongs or self._after_value(char))

    def _end_value(self) -> bool:
        value = self._value
        if value is self._call.arguments:
            return value.kind == "object" or _other_arguments(value.text) is not None
        return self._key[1:-1] not in _NAME_KEYS or self._set_name(value.text)

    def _set_name(self, text: str) -> bool:
        try:
            name = json.loads(text)
        except ValueError:
            return False
        if not isinstance(name, str) or not self._accept(name) or self._call.name not in (None, name):
            return False
        self._call.name = name
        return True

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self._step, self._key = self._in_key, ""
            return True
        return self._end_call() if char == "}" else char in SPACE

    def _end_call(self) -> bool:
        self._step = self._between
        self._call.ended = True
        # An object that is only a name may be the answer itself; with the markers around it, it is a call.
        return self._call.name is not None and not (self._strict and self._call.arguments.kind == "unknown")
