"""The pieces that a model's text is split into, and control tokens as characters that no text can hold.

For the splitters, a control token is one character of the surrogate range, which no decoder returns (RFC 3629). So a
marker that is a control token is never cut in half, and text that only looks like one stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

# "call": the name of a tool call that begins; "arguments": a piece of its JSON.
PieceKind: TypeAlias = Literal["content", "reasoning", "call", "arguments"]
# The region that a splitter is in: "header" is template text that clients do not see.
Region: TypeAlias = Literal["content", "reasoning", "call", "header"]

_FIRST_SYMBOL = 0xD800
_LAST_SYMBOL = 0xDFFF
_SYMBOL = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. For content and reasoning, ``start`` and ``end`` are its positions in the text that was
    fed.
    """

    kind: PieceKind
    text: str
    start: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)


class Splitter(Protocol):
    """Takes text in pieces, and returns pieces as soon as they are certain. ``cut``: the answer was cut off."""

    @property
    def region(self) -> Region:
        """The region of the next text, as far as it is known."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """The rest."""


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins neighbours of one kind; a call's name stays a piece of its own."""
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

    ``in_markers``: control tokens that markers consist of; ``shown``: control tokens that are text outside a marker.
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
        """The character of a control token; characters are assigned in the order of the calls."""
        if token not in self._char_of:
            code = _FIRST_SYMBOL + len(self._char_of)
            if code > _LAST_SYMBOL:
                return ""
            self._char_of[token] = chr(code)
            self._token_of[chr(code)] = token
        return self._char_of[token]

    def marker(self, text: str) -> str:
        """A marker with its control tokens as characters; a marker without control tokens stays as it is."""
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
