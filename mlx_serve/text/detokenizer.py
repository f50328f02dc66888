"""Turns token ids into text while they arrive, for any tokenizer. Knows no regions and no stop strings.

A token's text depends on its neighbours (leading spaces, bytes of one character). So a window of the last tokens is
decoded with and without the new ones, and the difference is returned once it consists of whole characters. vLLM and
text-generation-inference use the same technique. In addition, a U+FFFD that the model wrote is recognized by its bytes,
so that it is not held back as an incomplete character.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

# What decoders write for bytes that are not a character, or not yet; and the bytes of that character itself.
_INCOMPLETE = "\ufffd"
_REPLACEMENT = _INCOMPLETE.encode()
# This many prompt tokens before the first new one decide whether it begins with a space.
_CONTEXT_TOKENS = 5
# A character has at most four bytes, so bytes of more pending tokens than that will never become one.
_MAX_PENDING = 5


class Decoder(Protocol):
    """The methods of a tokenizer that a Detokenizer uses."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text, which may be less than a character."""


class Detokenizer:
    """``context`` is the prompt that the text continues; () if the text stands alone, as a chat answer does."""

    def __init__(self, decoder: Decoder, hidden_ids: Collection[int], context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._hidden_ids = hidden_ids
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._n_sent = len(self._window)
        self._sent = decoder.decode(self._window) if self._window else ""
        if self._is_incomplete(self._sent):
            self._window, self._n_sent, self._sent = [], 0, ""

    def add(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete. A character that stays incomplete is
        dropped.
        """
        if token in self._hidden_ids:
            return ""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        if self._is_incomplete(text) and len(self._window) - self._n_sent < _MAX_PENDING:
            return ""
        new = text[len(self._sent) :]
        # The window starts again at the tokens just sent, which are the context of the next ones.
        self._window = self._window[self._n_sent :]
        self._n_sent = len(self._window)
        self._sent = self._decoder.decode(self._window)
        return new

    def interrupt(self) -> None:
        """Called at a control token: text behind it will not complete an incomplete character."""
        del self._window[self._n_sent :]

    def _is_incomplete(self, text: str) -> bool:
        """Whether the window's text ends inside a character, as far as its decoder can tell.

        Only U+FFFD itself has bytes that end in those of U+FFFD, because the first of its three bytes begins a
        character.
        """
        if not text.endswith(_INCOMPLETE):
            return False
        return not b"".join(map(self._decoder.token_bytes, self._window)).endswith(_REPLACEMENT)
