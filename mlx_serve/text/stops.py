"""Finds the first of several strings in a text that comes in pieces, looking at each character once for each string.

Knuth, Morris and Pratt's search: how much of a string the text ends with is known at any time, so that nothing is
compared again however often a string almost matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_MAX_KEPT = 256


class StopSearch:
    """``strings``: none of them empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._fallbacks = [_fallbacks(string) for string in strings]
        self._first_chars = frozenset(string[0] for string in strings)
        # How many of each string's first characters the text so far ends with.
        self._n_matched = [0] * len(strings)

    @property
    def n_held(self) -> int:
        """How many of the text's last characters may be the beginning of one of the strings."""
        return max(self._n_matched, default=0)

    def restart(self) -> None:
        """A new text begins."""
        self._n_matched = [0] * len(self._strings)

    def feed(self, text: str) -> tuple[int, str] | None:
        """More of the text. The string that is complete first, and where in ``text`` it ends; of two, the longer.

        By its end and not by its start, so that the outcome does not depend on how much text comes at a time.
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


@lru_cache(maxsize=_MAX_KEPT)
def _fallbacks(string: str) -> tuple[int, ...]:
    """For each beginning of a string, how much of it is also its end (the whole beginning aside)."""
    out = [0]
    for char in string[1:]:
        n = out[-1]
        while n and string[n] != char:
            n = out[n - 1]
        out.append(n + (string[n] == char))
    return tuple(out)
