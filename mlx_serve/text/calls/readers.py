"""Readers of the text after a tool call's opening. They take it as it streams, and know no model and no tokens.

CallReader   the base class: reads the text between calls and recognizes their end
HeaderCalls  a header with the tool's name, then the arguments
NamedCall    the arguments of one call whose name is already known
AnyCalls     tries several readers; the first that finds a call is used
WholeCalls   formats that can be parsed only when the whole call has arrived

    feed ---> _between --a call may begin--> _begin ---> the format's own steps ---> _between ...
                 |                             |
                 +-- closing marker            +-- not a call
                 v                             v
              _end: the calls are over; the rest of the text belongs to the answer again

``_step`` holds the current step. A step consumes text and returns True, or returns False if it needs more text or the
calls are over. Readers consume the closing marker themselves: only they can tell it from the same text in a value.
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
    """A pattern that finds the first occurrence of any of ``marks``."""
    return re.compile("|".join(map(re.escape, marks)))


@lru_cache(maxsize=256)
def _edges(marks: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """The length of the longest incomplete mark, and the first characters of all marks."""
    return max(map(len, marks), default=1) - 1, frozenset(mark[0] for mark in marks)


def overlap(text: str, at: int, marks: tuple[str, ...]) -> int:
    """The number of characters at the end of ``text``, from ``at`` on, that may begin one of ``marks``."""
    most, first_chars = _edges(marks)
    longest = min(most, len(text) - at)
    if longest <= 0 or first_chars.isdisjoint(text[-longest:]):
        return 0
    tails = (text[-n:] for n in range(longest, 0, -1))
    return next((len(tail) for tail in tails if any(mark.startswith(tail) for mark in marks)), 0)


class Reader(Protocol):
    """Reads calls from text. ``feed`` and ``close`` return how many of the last characters are not part of calls."""

    @property
    def n_calls(self) -> int:
        """The number of calls of which at least the name was sent."""

    def feed(self, text: str, out: list[Piece]) -> int | None:
        """Takes ``text`` and appends the certain pieces to ``out``. Returns None as long as more calls may follow."""

    def close(self, out: list[Piece], *, cut: bool) -> int:
        """Ends the text. ``cut``: the answer was cut off, so its last call may be incomplete."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The markers around calls. ``closing`` ends all calls; the markers in ``between`` may stand around each."""

    closing: str = ""
    between: tuple[str, ...] = ()
    separators: str = " \t\r\n,;[]"
    # Only these names make a call. None: any name does.
    names: frozenset[str] | None = None

    def accepts(self, name: str) -> bool:
        """Whether ``name`` is a valid name of a call."""
        return NAME.fullmatch(name) is not None and (self.names is None or name in self.names)

    def may_name(self, begun: str) -> bool:
        """Whether a text that begins with ``begun`` may begin with the name of a call."""
        return self.names is None or any(name.startswith(begun) or begun.startswith(name) for name in self.names)


class CallReader:
    """Holds the text that is not consumed yet, and the step that consumes it."""

    def __init__(self, frame: Frame) -> None:
        self.n_calls = 0
        self._frame = frame
        self._text = ""
        self._at = 0
        # Where the current call begins, until its name is sent. If it is not a call, the text from here is returned.
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
        """See Reader. An incomplete call is kept as far as it was sent; incomplete markup at a cut is dropped."""
        if self._n_left is None:
            self._finish(out, cut=cut)
        if self._n_left is None and cut:
            return 0
        if self._n_left is None:
            self._end()
        return self._n_left or 0

    @property
    def left(self) -> str:
        """The text that is not part of the calls."""
        return self._text[self._at :]

    @abstractmethod
    def _begin(self, out: list[Piece]) -> bool:
        """Reads the beginning of a call, or calls ``_end`` if there is none. Returns False if it needs more text."""

    def _finish(self, out: list[Piece], *, cut: bool) -> None:
        """Handles the end of the text inside a call."""

    def _between(self, out: list[Piece]) -> bool:
        """Reads the text before the first call, between calls and after the last one."""
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
        """Whether the whole remaining text may be the beginning of a marker."""
        left = self._text[self._at : self._at + 80]
        return any(len(left) < len(marker) and marker.startswith(left) for marker in self._markers())

    def _markers(self) -> tuple[str, ...]:
        return (self._frame.closing, *self._frame.between)

    def _may_be_name(self) -> bool:
        """Whether the remaining text may begin with the name of a call."""
        return self._frame.may_name(self._text[self._at : self._at + 140].lstrip(" \t\r\n["))

    def _expect(self, what: Shape) -> re.Match[str] | None:
        """Consumes ``what``. Returns None if more text is needed, or after ``_end`` if the text does not match."""
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
    """Reads calls of a ``header`` shape, whose hole "name" is the tool's name, then arguments, then ``end``."""

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
            # A call that was sent already ends here with the arguments so far.
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
            # The header was complete, so the name is certain.
            self._call(self._name, out)
        if self._step == self._after:
            self._at = len(self._text)


class NamedCall(CallReader):
    """Reads the arguments of one call whose name is already known. No text at all is an empty object."""

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
    """Gives the same text to several readers. The first reader that finds a call is used from then on."""

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
    """Passes the text between markers to ``parse``, which raises ValueError if it is not a call."""

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
        # A call that was cut off is dropped: half of its arguments may be missing.
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
