"""Readers of what stands behind a tool call's opening, which take text as it comes. They know no model and no tokens.

CallReader   what they share: the text between calls, and where calls end
HeaderCalls  a name in some words of the model's, then its arguments
NamedCall    the arguments of a call whose name is known
AnyCalls     several readers, of which the first that makes a call is the one
WholeCalls   anything that has to be there whole before it can be parsed

A reader goes on until something comes that is not a call's. It reads the closing marker itself, for only the reader
knows whether a marker is part of a value.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from mlx_serve.text.calls.literals import Value
from mlx_serve.text.calls.shapes import Shape, shape
from mlx_serve.text.symbols import Piece

NAME = re.compile(r"[\w.:/-]{1,128}")


@lru_cache(maxsize=256)
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of some texts."""
    return re.compile("|".join(map(re.escape, marks)))


@lru_cache(maxsize=256)
def _edges(marks: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """The most characters that can be a beginning, and what beginnings begin with."""
    return max(map(len, marks), default=1) - 1, frozenset(mark[0] for mark in marks)


def overlap(text: str, at: int, marks: tuple[str, ...]) -> int:
    """How many of the last characters, from a place on, may begin one of some texts."""
    most, first_chars = _edges(marks)
    longest = min(most, len(text) - at)
    if longest <= 0 or first_chars.isdisjoint(text[-longest:]):
        return 0
    tails = (text[-n:] for n in range(longest, 0, -1))
    return next((len(tail) for tail in tails if any(mark.startswith(tail) for mark in marks)), 0)


class Reader(Protocol):
    """``n_calls``: how many calls have begun to go out. The last ``n`` characters that came are not the calls'."""

    @property
    def n_calls(self) -> int:
        """How many calls have begun to go out."""

    def feed(self, text: str, out: list[Piece]) -> int | None:
        """Take all of the text and append what is certain. None: more may come; else ``n``, and the calls are over."""

    def close(self, out: list[Piece], *, cut: bool) -> int:
        """Nothing more comes, be it that the answer was ``cut`` off. Returns ``n``."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What may stand around calls: their ``closing`` ends them all, what is in ``between`` may come at any time."""

    closing: str = ""
    between: tuple[str, ...] = ()
    separators: str = " \t\r\n,;[]"
    # The only names that are calls; None: all are.
    names: frozenset[str] | None = None

    def accepts(self, name: str) -> bool:
        """Whether a call may have this name."""
        return NAME.fullmatch(name) is not None and (self.names is None or name in self.names)

    def may_name(self, begun: str) -> bool:
        """Whether a text that begins so may begin with a name."""
        return self.names is None or any(name.startswith(begun) or begun.startswith(name) for name in self.names)


class CallReader:
    """Text that has come and is not used up yet, and the step that takes it further."""

    def __init__(self, frame: Frame) -> None:
        self.n_calls = 0
        self._frame = frame
        self._text = ""
        self._at = 0
        # Where a call begins that has not gone out: should it be none, it is given back from here.
        self._begun_at: int | None = None
        self._step: Callable[[list[Piece]], bool] = self._between
        self._n_left: int | None = None

    def feed(self, text: str, out: list[Piece]) -> int | None:
        """See Reader."""
        n_used = self._at if self._begun_at is None else self._begun_at
        self._text = self._text[n_used:] + text
        self._at -= n_used
        self._begun_at = None if self._begun_at is None else 0
        while self._n_left is None and self._step(out):
            pass
        return self._n_left

    def close(self, out: list[Piece], *, cut: bool) -> int:
        """See Reader. A call that is not whole is one as far as it has come; cut-off markup is dropped."""
        if self._n_left is None:
            self._finish(out, cut=cut)
        if self._n_left is None and cut:
            return 0
        if self._n_left is None:
            self._end()
        return self._n_left or 0

    @property
    def left(self) -> str:
        """The text that is not the calls'."""
        return self._text[self._at :]

    @abstractmethod
    def _begin(self, out: list[Piece]) -> bool:
        """A call may begin here: take what there is of it, or ``_end``. False: more text is needed."""

    def _finish(self, out: list[Piece], *, cut: bool) -> None:
        """Nothing more comes."""

    def _between(self, out: list[Piece]) -> bool:
        """Between calls, before the first and behind the last."""
        self._begun_at = None
        if self._at == len(self._text):
            return False
        marker = next((m for m in self._markers() if m and self._text.startswith(m, self._at)), None)
        if marker is not None:
            self._at += len(marker)
            return marker != self._frame.closing or self._end()
        if self._may_be_marker():
            return False
        if self._text[self._at] in self._frame.separators or (self.n_calls and self._text[self._at] == "}"):
            self._at += 1
            return True
        self._begun_at = self._at
        return self._begin(out)

    def _may_be_marker(self) -> bool:
        """Whether all the text that is left may be the beginning of a marker."""
        left = self._text[self._at : self._at + 80]
        return any(len(left) < len(marker) and marker.startswith(left) for marker in self._markers())

    def _markers(self) -> tuple[str, ...]:
        return (self._frame.closing, *self._frame.between)

    def _may_be_name(self) -> bool:
        """Whether what is left may begin with a name that is a call."""
        return self._frame.may_name(self._text[self._at : self._at + 140].lstrip(" \t\r\n["))

    def _expect(self, what: Shape) -> re.Match[str] | None:
        """The shape, if it is there. None: it is not, or more is needed, or the calls are over."""
        match = what.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        elif not what.may_begin(self._text, self._at) and not self._may_be_marker():
            self._end()
        return match

    def _end(self) -> bool:
        self._at = self._at if self._begun_at is None else self._begun_at
        self._n_left = len(self._text) - self._at
        return False

    def _call(self, name: str, out: list[Piece]) -> None:
        self.n_calls += 1
        self._begun_at = None
        out.append(Piece("call", name))

    def _send(self, text: str, out: list[Piece]) -> None:
        if text:
            out.append(Piece("arguments", text))


class HeaderCalls(CallReader):
    """Calls of a ``header`` shape (its hole "name" names the tool) and arguments behind it, each ended by ``end``."""

    def __init__(self, frame: Frame, header: str, end: str = "", delimiters: tuple[str, ...] = ()) -> None:
        super().__init__(frame)
        self._header = shape(header)
        self._is_name_first = header.lstrip(" «[»").startswith("{name}")
        self._tail = shape(end)
        self._delimiters = delimiters
        self._name = ""
        self._value = Value()

    def _begin(self, out: list[Piece]) -> bool:
        if self._is_name_first and not (self._may_be_name() or self._may_be_marker()):
            return self._end()
        match = self._expect(self._header)
        if match is None:
            return False
        if not self._frame.accepts(match["name"]):
            return self._end()
        self._name = match["name"]
        self._value = Value(self._delimiters, is_bare=bool(self._delimiters))
        self._step = self._arguments
        return True

    def _arguments(self, out: list[Piece]) -> bool:
        self._at = self._value.take(self._text, self._at)
        if self._value.kind == "object" and self._name:
            self._call(self._name, out)
            self._name = ""
        if not self._name:
            self._send(self._value.pop(), out)
        if self._value.is_broken or self._value.kind == "other":
            # Of a call that has gone out there is what there is.
            self._step = self._between
            return self._end() if self._name else True
        if self._value.is_done:
            self._step = self._after
        return self._value.is_done

    def _after(self, out: list[Piece]) -> bool:
        if self._tail.may_begin(self._text, self._at):
            return False
        if match := self._tail.match(self._text, self._at):
            self._at = match.end()
        self._step = self._between
        return True

    def _finish(self, out: list[Piece], *, cut: bool) -> None:
        if cut and self._step == self._arguments and self._name:
            # The name was whole.
            self._call(self._name, out)
        if self._step == self._after:
            self._at = len(self._text)


class NamedCall(CallReader):
    """The arguments of one call whose name is known already; none at all are an empty object."""

    def __init__(self, name: str) -> None:
        super().__init__(Frame(separators=" \t\r\n"))
        self._name = name
        self._value = Value()

    def _begin(self, out: list[Piece]) -> bool:
        self._at = self._value.take(self._text, self._at)
        if self._value.kind == "object":
            if not self.n_calls:
                self._call(self._name, out)
            self._send(self._value.pop(), out)
            self._step = self._rest if self._value.is_done else self._begin
        return self._end() if self._value.is_broken else self._value.is_done

    def _rest(self, out: list[Piece]) -> bool:
        return self._end() if self._text[self._at :].strip() else False

    def _finish(self, out: list[Piece], *, cut: bool) -> None:
        if not self.n_calls and (cut or not self._value.text):
            self._call(self._name, out)
            self._send(self._value.pop() if cut else "{}", out)


class AnyCalls:
    """Several readers of one text; the first that makes a call is the one."""

    def __init__(self, *readers: Reader) -> None:
        self._readers = list(readers)

    @property
    def n_calls(self) -> int:
        """See Reader."""
        return self._readers[0].n_calls

    def feed(self, text: str, out: list[Piece]) -> int | None:
        """See Reader."""
        n_left: int | None = None
        for reader in list(self._readers):
            n_left = reader.feed(text, out)
            if reader.n_calls:
                self._readers = [reader]
                return n_left
            if n_left is not None and len(self._readers) > 1:
                self._readers.remove(reader)
                n_left = None
        return n_left

    def close(self, out: list[Piece], *, cut: bool) -> int:
        """See Reader."""
        n_left = 0
        for reader in self._readers:
            n_left = reader.close(out, cut=cut)
            if reader.n_calls:
                self._readers = [reader]
                break
        return n_left


class WholeCalls(CallReader):
    """Calls that ``parse`` finds in the text between markers; it raises ValueError when there are none."""

    def __init__(self, frame: Frame, parse: Callable[[str], list[dict[str, Any]]]) -> None:
        super().__init__(frame)
        self._parse = parse
        self._parts: list[str] = []
        self._step = self._begin

    def _begin(self, out: list[Piece]) -> bool:
        marks = tuple(filter(None, self._markers()))
        match = any_of(marks).search(self._text, self._at) if marks else None
        end = len(self._text) - overlap(self._text, self._at, marks) if match is None else match.start()
        self._parts.append(self._text[self._at : end])
        self._at = end if match is None else match.end()
        if match is None:
            return False
        is_call = self._read("".join(self._parts), out)
        self._parts.clear()
        return (is_call and match.group() != self._frame.closing) or self._end()

    def _finish(self, out: list[Piece], *, cut: bool) -> None:
        # One that was cut off is none: half of its arguments may be missing.
        if not cut or not self._frame.closing:
            self._read("".join(self._parts), out)

    def _read(self, text: str, out: list[Piece]) -> bool:
        try:
            found = [(_name(call), _arguments(call)) for call in self._parse(text.strip())]
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        for name, arguments in found:
            out += [Piece("call", name), Piece("arguments", arguments)]
        self.n_calls += len(found)
        return bool(found)


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
