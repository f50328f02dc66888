"""What the model's text is split into, and control tokens as characters that no text can hold.

The splitters see a control token as one character of the surrogate range, which no decoder ever gives (RFC 3629), so a
marker that is a control token is never cut in half, and text that only looks like one stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

# "call": the name of a tool call that begins; "arguments": a piece of its JSON.
PieceKind: TypeAlias = Literal["content", "reasoning", "call", "arguments"]
# Where a splitter is: "header" is template text that nobody sees.
Region: TypeAlias = Literal["content", "reasoning", "call", "header"]

_FIRST_SYMBOL = 0xD800
_LAST_SYMBOL = 0xDFFF
_SYMBOL = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. Of content and reasoning, ``start`` and ``end`` are its place in the text that was fed."""

    kind: PieceKind
    text: str
    start: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)


class Splitter(Protocol):
    """Text in, as it comes; pieces out, as soon as they are certain. ``cut``: the answer ended before its own end."""

    @property
    def region(self) -> Region:
        """Where the next text belongs, as far as that is known."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """The rest."""


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece; a call's name is a piece of its own."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if last is not None and last.kind == piece.kind != "call" and last.end == piece.start:
            out[-1] = Piece(piece.kind, last.text + piece.text, last.start, piece.end)
        else:
            out.append(piece)
    return out


def is_symbol(char: str) -> bool:
    """Whether a character stands for a control token."""
    return _FIRST_SYMBOL <= ord(char) <= _LAST_SYMBOL


class Symbols:
    """A character for each control token.

    ``in_markers``: those that markers are made of; ``shown``: those that are text when they stand outside of any.
    """

    def __init__(
        self,
        controls: Mapping[int, str],
        in_markers: Mapping[int, str] | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._controls = controls
        self._in_markers = controls if in_markers is None else in_markers
        self._shown = shown
        self._char_of: dict[int, str] = {}
        self._token_of: dict[str, int] = {}

    def char(self, token: int) -> str:
        """The character of a control token; the first that comes gets the first character."""
        if token not in self._char_of:
            code = _FIRST_SYMBOL + len(self._char_of)
            if code > _LAST_SYMBOL:
                return ""
            self._char_of[token] = chr(code)
            self._token_of[chr(code)] = token
        return self._char_of[token]

    def marker(self, text: str) -> str:
        """A marker with its control tokens as characters; one without any stays as it is."""
        found = [token for token, control in self._in_markers.items() if control in text]
        for token in sorted(found, key=lambda token: -len(self._controls[token])):
            text = text.replace(self._controls[token], self.char(token))
        return text

    def restore(self, text: str) -> str:
        """The text as the model wrote it."""
        return _SYMBOL.sub(lambda symbol: self._text(symbol.group()), text)

    def visible(self, text: str) -> str:
        """The text without control tokens."""
        return _SYMBOL.sub(lambda symbol: self._shown_text(symbol.group()), text)

    def _text(self, char: str) -> str:
        return self._controls[self._token_of[char]]

    def _shown_text(self, char: str) -> str:
        return self._text(char) if self._token_of[char] in self._shown else ""
