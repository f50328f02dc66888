"""Keeps clients' texts from becoming control tokens: "<|im_end|>" in a message is ten characters, not an end.

Before the chat template sees a text that looks like a control token, ``GUARD`` is put into it. The tokenizer cuts the
rendered prompt at each GUARD and encodes the parts one by one, so none of them is the whole token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_serve.values import GUARD


class Guard:
    """Guards texts against becoming one of ``controls``."""

    def __init__(self, controls: Iterable[str]) -> None:
        longest_first = sorted({control for control in controls if len(control) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """The text, with a GUARD in everything that looks like a control token."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)

    def value(self, value: Any) -> Any:
        """A JSON value with every string in it guarded."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with everything guarded except its role."""
        return {key: item if key == "role" else self.value(item) for key, item in message.items()}
