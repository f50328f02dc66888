"""The free text of a custom tool's call, out of the JSON that the model writes it in, as it comes.

{"input": "*** Begin Patch\\n..."}   ->   *** Begin Patch ...
"""

from __future__ import annotations

import json
import re

from mlx_serve.api.responses.tools import INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A run of plain characters, an escape, or an invalid escape: models also write \d and \'.
_STEP = re.compile(rf'[^"\\]+|{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\.', re.DOTALL)
# A possible beginning of an escape.
_HALF = re.compile(r"\\(u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?")


class FreeText:
    """Reads a call's arguments. If they are not an object with an ``input``, their text comes whole at the end."""

    def __init__(self) -> None:
        self._pending = ""
        self._is_open = False
        self._is_closed = False

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        if self._is_closed:
            return ""
        self._pending += text
        if not self._is_open:
            match = _OPENING.match(self._pending)
            if match is None:
                return ""
            self._is_open = True
            self._pending = self._pending[match.end() :]
        return self._read()

    def flush(self) -> str:
        """The rest of the text, without an escape that was cut off."""
        return "" if self._is_open else _only_text(self._pending)

    def _read(self) -> str:
        out, position = [], 0
        while position < len(self._pending):
            if self._pending[position] == '"':
                self._is_closed = True
                break
            if _HALF.fullmatch(self._pending, position):
                break
            match = _STEP.match(self._pending, position)
            assert match is not None
            out.append(_plain(match.group()))
            position = match.end()
        self._pending = self._pending[position:]
        return "".join(out)


def _plain(step: str) -> str:
    if step[0] != "\\":
        return step
    try:
        text = str(json.loads(f'"{step}"'))
    except ValueError:
        return step
    # Half of a surrogate pair is not a character.
    return "\ufffd" if "\ud800" <= text <= "\udfff" else text


def _only_text(arguments: str) -> str:
    """The string of an object with one string, whatever its key; otherwise the whole text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    texts = list(value.values()) if isinstance(value, dict) else [value]
    if len(texts) != 1 or not isinstance(texts[0], str):
        return arguments
    return re.sub("[\ud800-\udfff]", "\ufffd", texts[0])
