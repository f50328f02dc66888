"""Follows a call's arguments as they stream and rewrites them as JSON. Knows no calls and no markers.

JSON passes through unchanged. Two other notations are accepted: Python's literals and keywords (``a=1, b='x'``), and
bare keys with strings between delimiters of the model (``{city:<|"|>Paris<|"|>}``).
"""

from __future__ import annotations

import json
import re
from typing import Literal

from mlx_serve.text.calls.values import python_number, quoted

_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"[^\s,:={}\[\]()\"'<>]+")
_DIGITS = re.compile(r"[\d.eE+-]+")
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux])", re.DOTALL)
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?")
_WORDS = {"True": "true", "False": "false", "None": "null"} | {word: word for word in ("true", "false", "null")}
_CLOSING = {"{": "}", "[": "]", "(": "]"}


class Value:
    """One value. ``is_bare``: words without quotes are strings. ``delimiters``: quotes other than JSON's.

    ``take`` sets ``kind`` as soon as the kind of value is clear, ``is_done`` at the value's end, and ``is_broken`` when
    the text cannot belong to a value.
    """

    def __init__(self, delimiters: tuple[str, ...] = (), *, is_bare: bool = False) -> None:
        self.kind: Literal["unknown", "object", "other"] = "unknown"
        self.is_done = False
        self.is_broken = False
        self.text = ""
        self._delimiters = delimiters
        self._is_bare = is_bare
        self._closers: list[str] = []
        # The closing quote of the current string; "" outside of strings.
        self._quote = ""
        self._out: list[str] = []
        self._n_tokens = 0
        self._is_after_value = False
        self._is_in_number = False
        # JSON keeps the model's white space. Other notations get separators as json.dumps writes them.
        self._is_json = not delimiters

    def take(self, text: str, at: int) -> int:
        """Follows ``text`` from ``at``. Returns the index where it stopped: the value's end, or where more is needed.

        Appends the JSON of what it took to ``self.text``.
        """
        while at < len(text) and not (self.is_done or self.is_broken):
            taken = self._string(text, at) if self._quote else self._token(text, at)
            if taken == 0 or self.is_broken:
                break
            at += taken
        self.text += "".join(self._out)
        self._out.clear()
        return at

    def pop(self) -> str:
        """The JSON that was added since the last ``pop``."""
        text, self.text = self.text, ""
        return text

    def _token(self, text: str, at: int) -> int:
        if self._is_in_number and (digits := _DIGITS.match(text, at)):
            self._out.append(digits.group())
            return len(digits.group())
        self._is_in_number = False
        if space := _SPACE.match(text, at):
            if self._n_tokens and self._is_json:
                self._out.append(space.group())
            return len(space.group())
        if not self._closers and self._n_tokens:
            self.is_done = True
            return 0
        return self._bracket(text[at]) if text[at] in "{[()]}" else self._plain(text, at)

    def _bracket(self, char: str) -> int:
        if char in "{[(":
            return self._open(char)
        return self._close(char)

    def _plain(self, text: str, at: int) -> int:
        char = text[at]
        if char in ",:=" and self._closers:
            self._is_after_value = False
            self._out.append(char.replace("=", ":") + ("" if self._is_json else " "))
            return 1
        return self._scalar(text, at)

    def _open(self, char: str) -> int:
        # The parentheses of a call stand for the object of its arguments. Any others are a list.
        is_call = char == "(" and not self._n_tokens
        self._is_json = self._is_json and not is_call
        self._see("object" if char == "{" or is_call else "other", "{" if is_call else char.replace("(", "["))
        self._closers.append("}" if is_call else _CLOSING[char])
        self._is_after_value = False
        return 1

    def _close(self, char: str) -> int:
        if not self._closers:
            self.is_done = True
            return 0
        closer = self._closers.pop()
        if char not in (closer, ")"):
            return self._break()
        self._is_after_value = False
        self._see("other", closer)
        self.is_done = not self._closers
        return 1

    def _scalar(self, text: str, at: int) -> int:
        for quote in (*self._delimiters, '"', "'"):
            if text.startswith(quote, at):
                if self._closers == ["}"] and self._n_tokens == 1 and not self._is_json and not self._delimiters:
                    # Inside the parentheses of a call, each value needs a key. Without one, the text is code.
                    return self._break()
                self._quote = quote
                self._see("other", '"')
                return len(quote)
            if len(text) - at < len(quote) and quote.startswith(text[at:]):
                return 0
        if self._is_json and self._closers and text[at] in "-0123456789":
            self._is_in_number = True
            self._see("other", text[at])
            return 1
        word = _WORD.match(text, at)
        return self._word(word.group(), text, word.end()) if word else self._break()

    def _word(self, word: str, text: str, end: int) -> int:
        after = _SPACE.match(text, end)
        follows = after.end() if after else end
        if follows == len(text):
            # The word, or the character that tells a key from a value, may be incomplete.
            return 0
        is_key = text[follows] in ":=" and bool(self._closers)
        written = None if is_key else _WORDS.get(word) or python_number(word)
        if written is None and not (is_key or self._is_bare):
            return self._break()
        self._see("other", quoted(word) if written is None else written)
        return len(word)

    def _string(self, text: str, at: int) -> int:
        if self._quote in self._delimiters:
            return self._delimited(text, at)
        if plain := _PLAIN.match(text, at):
            self._out.append(plain.group())
            return len(plain.group())
        char = text[at]
        if char == self._quote:
            return self._end_string()
        if char == "\\":
            return self._backslash(text, at)
        # JSON allows no line ends and control characters in strings, but models write them.
        self._out.append(quoted(char)[1:-1])
        return 1

    def _backslash(self, text: str, at: int) -> int:
        escape = _ESCAPE.match(text, at)
        if escape is None and _ESCAPE_BEGUN.fullmatch(text, at):
            return 0
        self._out.append(_escape(escape.group()) if escape else "\\\\")
        return len(escape.group()) if escape else 1

    def _delimited(self, text: str, at: int) -> int:
        end = text.find(self._quote, at)
        if end == at:
            return self._end_string()
        if end < 0:
            end = len(text) - _overlap(text[at:], self._quote)
        self._out.append(quoted(text[at:end])[1:-1])
        return end - at

    def _end_string(self) -> int:
        length, self._quote = len(self._quote), ""
        self._out.append('"')
        self.is_done = not self._closers
        return length

    def _see(self, kind: Literal["object", "other"], written: str) -> None:
        self._n_tokens += 1
        if self._n_tokens == 1:
            self.kind = "other" if kind == "other" else "unknown"
        elif self.kind == "unknown" and written[0] in '"}':
            self.kind = "object"
        self.is_broken = self._is_after_value or (self._n_tokens > 1 and self.kind == "unknown")
        self._is_after_value = True
        if not self.is_broken:
            self._out.append(written)

    def _break(self) -> int:
        self.is_broken = True
        return 0


def _escape(text: str) -> str:
    """Translates an escape of JSON or Python to JSON. Before any other character a backslash stands for itself."""
    if text[1] in '"\\/bfnrtu':
        return text
    if text[1] == "x":
        return f"\\u00{text[2:]}"
    return "'" if text[1] == "'" else "\\\\" + json.dumps(text[1], ensure_ascii=False)[1:-1]


def _overlap(text: str, marker: str) -> int:
    """The number of characters at the end of ``text`` that are the beginning of ``marker``."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
