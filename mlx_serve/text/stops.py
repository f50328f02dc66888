"""Ends a text that comes in pieces at the first of several stop strings, in time linear in the text for each string.

This is Knuth, Morris and Pratt's search: it always knows how much of a string the text ends with, so that it never
compares a character again, however often a string almost matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_MAX_KEPT = 256


class StopSearch:
    """``strings``: none of them may be empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._fallbacks = [_fallbacks(string) for string in strings]
        self._first_chars = frozenset(string[0] for string in strings)
        # For each string, the number of its first characters that the text so far ends with.
        self._n_matched = [0] * len(strings)

    @property
    def n_held(self) -> int:
        """How many of the text's last characters may be the beginning of a string."""
        return max(self._n_matched, default=0)

    def restart(self) -> None:
        """Begins a new text."""
        self._n_matched = [0] * len(self._strings)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Takes more of the text. Returns the string that is complete first, and where in ``text`` it ends.

        Of two that end together, the longer. The end counts and not the start, so that the result does not depend on
        how the text was cut into pieces.
        """
        if self.n_held == 0 and self._first_chars.isdisjoint(text):
            return None
        for i, char in enumerate(text):
            if found := self._step(char):
                return i + 1, found
        return None

    def _step(self, char: str) -> str:
        """The longest string that this character completes, or ""."""
        found = ""
        for k, string in enumerate(self._strings):
            n = self._n_matched[k]
            while n and string[n] != char:
                n = self._fallbacks[k][n - 1]
            n += string[n] == char
            if n == len(string):
                found = max(found, string, key=len)
                n = self._fallbacks[k][n - 1]
            self._n_matched[k] = n
        return found


class StopCutter:
    """Ends the text at the stop string (none may be empty) that is complete first.

    Before that string, or with ``keeps_stop`` behind it.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._search = StopSearch(stops)
        self._keeps_stop = keeps_stop
        self._pending = ""
        # The string that ended the text.
        self.match: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.match is not None

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop string. After a match it is always ""."""
        if self.stopped:
            return ""
        n_before = len(self._pending)
        self._pending += text
        found = self._search.feed(text)
        if found is not None:
            end, self.match = found
            end += n_before if self._keeps_stop else n_before - len(self.match)
            out, self._pending = self._pending[:end], ""
            return out
        cut = len(self._pending) - self._search.n_held
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out

    def flush(self) -> str:
        """The text that was held back. A stop string does not reach over this position."""
        self._search.restart()
        out, self._pending = self._pending, ""
        return out


@lru_cache(maxsize=_MAX_KEPT)
def _fallbacks(string: str) -> tuple[int, ...]:
    """For each beginning of a string, the length of its longest proper part that is both its beginning and its end."""
    out = [0]
    for char in string[1:]:
        n = out[-1]
        while n and string[n] != char:
            n = out[n - 1]
        out.append(n + (string[n] == char))
    return tuple(out)
