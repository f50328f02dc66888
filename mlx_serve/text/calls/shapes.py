"""Patterns for markup that arrives in parts: unlike ``re``, they tell an incomplete match from a mismatch.

A shape is literal text with three exceptions: " " matches any white space or none, "«...»" is optional, and "{name}" is
one of the holes below. Knows no models and no calls.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple, TypeAlias

# For each hole: its pattern, and whether it consumes characters or only looks at the next one.
_HOLES = {
    "name": (r"[\w.:/-]{1,128}?", True),
    "key": (r"[^<>\"'\n]{1,128}", True),
    "attributes": (r"[^<>]{0,200}", True),
    "other": (r"[^<>]{0,200}", True),
    "word": (r"[\w-]{1,64}", True),
    "quote": ("[\"']?", True),
    "tag": ("(?=<)", False),
    "json": (r"(?=\{)", False),
    "parenthesis": (r"(?=\()", False),
    "open": (r"(?=[({])", False),
}
_NAMED = ("name", "key", "attributes")
_TOKENS = re.compile(r"\{(?P<hole>[a-z]+)\}|«(?P<optional>[^»]*)»|(?P<space> )|(?P<char>.)", re.DOTALL)
_Part: TypeAlias = "re.Match[str]"


class Shape(NamedTuple):
    """``full`` matches the whole shape; ``begun`` matches any beginning of it."""

    full: re.Pattern[str]
    begun: re.Pattern[str]

    def match(self, text: str, at: int) -> re.Match[str] | None:
        """Matches the whole shape at ``at``."""
        return self.full.match(text, at)

    def may_begin(self, text: str, at: int) -> bool:
        """Whether all of the text from ``at`` on may be the beginning of the shape."""
        return self.begun.fullmatch(text, at) is not None


@cache
def shape(source: str) -> Shape:
    """Compiles a shape."""
    return Shape(re.compile(_full(source)), re.compile(_begun(source)))


def _full(source: str) -> str:
    return "".join(map(_full_part, _TOKENS.finditer(source)))


def _full_part(part: _Part) -> str:
    if hole := part["hole"]:
        pattern = _HOLES[hole][0]
        return f"(?P<{hole}>{pattern})" if hole in _NAMED else pattern
    if part["optional"] is not None:
        return f"(?:{_full(part['optional'])})?"
    return r"\s*" if part["space"] else re.escape(part["char"])


def _begun(source: str, rest: str = "") -> str:
    for part in reversed(list(_TOKENS.finditer(source))):
        rest = _begun_part(part, rest)
    return rest


def _begun_part(part: _Part, rest: str) -> str:
    if hole := part["hole"]:
        pattern, takes = _HOLES[hole]
        return f"(?:{pattern}{rest})?" if takes else ""
    if (optional := part["optional"]) is not None:
        return f"(?:{_begun(optional, rest)}|{rest})"
    return rf"\s*{rest}" if part["space"] else f"(?:{re.escape(part['char'])}{rest})?"
