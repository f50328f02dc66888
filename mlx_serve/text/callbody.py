"""What stands between a tool call's markers, read as it comes. Knows no markers of any model and no tokens.

JsonCalls    (calljson) {"name": "f", "arguments": {...}}, one or several, in a list or not
HeaderCalls  a name in some words of the model's, then {...}
NamedCall    {...} of a call whose name is known
WholeCalls   anything that has to be there whole before it can be parsed
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from mlx_serve.text.calljson import NAME, SPACE, CallReader
from mlx_serve.text.pieces import Piece


class CallBody(Protocol):
    """``in_string``: what comes now is inside a JSON string, where a marker is only text."""

    @property
    def n_calls(self) -> int:
        """How many calls have begun to go out."""

    @property
    def in_string(self) -> bool:
        """Whether what comes now is inside a JSON string."""

    @property
    def failed(self) -> bool:
        """Whether what came is no call, and nothing that follows will be one."""

    def feed(self, text: str, out: list[Piece]) -> int:
        """Take some of the text, at least a character, and append what is certain; how much was taken."""

    def close(self, out: list[Piece], *, cut: bool) -> str:
        """Nothing more comes. Returns the text that is not part of any call."""


class HeaderCalls(CallReader):
    """Patterns of what stands around each call: ``begin``, ``name`` with a group of that name, ``end``."""

    def __init__(self, begin: str, name: str, end: str) -> None:
        super().__init__()
        self._header = re.compile(f"(?:{end})(?:{begin})(?:{name})")
        self._end = re.compile(end)
        self._empty = re.compile(f"(?:{end})(?:{begin})?")

    def close(self, out: list[Piece], *, cut: bool) -> str:
        """What has come and is no call."""
        left = super().close(out, cut=cut)
        if (cut or self.n_calls) and self._empty.fullmatch(left):
            return ""
        end = self._end.match(left) if self.n_calls else None
        return left[end.end() :] if end else left

    def _take(self, char: str) -> bool:
        call = self._call
        if call.name is None:
            if char != "{":
                return True
            match = self._header.fullmatch(self._raw[:-1])
            if match is None:
                return False
            call.name = match["name"]
        call.arguments.step(char)
        self.in_string = call.arguments.in_string
        call.ended = call.arguments.done
        return call.arguments.kind != "broken"


class NamedCall(CallReader):
    """The arguments of one call whose name is known already; none at all are an empty object."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._call.name = name
        self._name = name

    def close(self, out: list[Piece], *, cut: bool) -> str:
        """What has come and is no call. What was cut off right where it began is one."""
        text = self._raw.strip()
        if self.n_calls or self.failed or text not in ("", "{") or (text and not cut):
            return self._raw if text else ""
        self.n_calls = 1
        out.append(Piece("call", self._name))
        if arguments := text if cut else "{}":
            out.append(Piece("arguments", arguments))
        return ""

    def _take(self, char: str) -> bool:
        if char in SPACE and (self.n_calls == 0 and self._call.arguments.kind == "unknown"):
            return True
        if self._call.name is None:
            return char in SPACE
        self._call.arguments.step(char)
        self.in_string = self._call.arguments.in_string
        self._call.ended = self._call.arguments.done
        return self._call.arguments.kind in ("unknown", "object")


class EitherCalls:
    """Mistral's two ways: JSON when the first character begins JSON, else names with arguments behind them."""

    def __init__(self, json_calls: CallBody, header_calls: CallBody) -> None:
        self._json_calls = json_calls
        self._body = header_calls
        self._is_chosen = False

    @property
    def n_calls(self) -> int:
        """How many calls have begun to go out."""
        return self._body.n_calls

    @property
    def in_string(self) -> bool:
        """Whether what comes now is inside a JSON string."""
        return self._body.in_string

    @property
    def failed(self) -> bool:
        """Whether what came is no call."""
        return self._body.failed

    def feed(self, text: str, out: list[Piece]) -> int:
        """As the chosen one does."""
        if not self._is_chosen and text.strip():
            self._is_chosen = True
            if text.lstrip()[0] in "[{" and not text.lstrip().startswith("[ARGS"):
                self._body = self._json_calls
        return self._body.feed(text, out)

    def close(self, out: list[Piece], *, cut: bool) -> str:
        """As the chosen one does."""
        return self._body.close(out, cut=cut)


class WholeCalls:
    """Calls that ``parse`` finds in the whole text; it raises ValueError when there are none."""

    in_string = False
    failed = False

    def __init__(self, parse: Callable[[str], list[dict[str, Any]]], *, has_end: bool = True) -> None:
        self.n_calls = 0
        self._parse = parse
        self._has_end = has_end
        self._text: list[str] = []

    def feed(self, text: str, out: list[Piece]) -> int:
        """All of it."""
        self._text.append(text)
        return len(text)

    def close(self, out: list[Piece], *, cut: bool) -> str:
        """The whole text when it is no call. One that was cut off is none: half of its arguments may be missing."""
        text = "".join(self._text)
        try:
            if cut and self._has_end:
                raise ValueError("cut off")
            found = [(_name(call), _arguments(call)) for call in self._parse(text.strip())]
        except (ValueError, TypeError, KeyError, RecursionError):
            return text
        for name, arguments in found:
            out += [Piece("call", name), Piece("arguments", arguments)]
        self.n_calls += len(found)
        return "" if found else text


def _name(call: dict[str, Any]) -> str:
    name = call["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError("no name")
    return name


def _arguments(call: dict[str, Any]) -> str:
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
