"""Token ids to text, as they come, for any tokenizer. Knows no regions and no stop strings.

A token's text depends on its neighbours (leading spaces, bytes of one character), so a window of the last tokens is
decoded with and without the new ones and the difference goes out, once it is whole characters. The technique is that
of vLLM and text-generation-inference; but a U+FFFD that the model wrote is told from half a character, by its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

# What decoders write for bytes that are no character, or not yet one; and that character's own bytes.
_INCOMPLETE = "\ufffd"
_REPLACEMENT = _INCOMPLETE.encode()
# So many prompt tokens before the first new one decide whether it begins with a space.
_CONTEXT_TOKENS = 5
# A character has at most four bytes, so more pending tokens than that are bytes that will never make one.
_MAX_PENDING = 5


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text, which may be less than a character."""


class Detokenizer:
    """``context`` is the prompt that the text continues; () when the text stands for itself, as a chat answer does."""

    def __init__(self, decoder: Decoder, hidden_ids: Collection[int], context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._hidden_ids = hidden_ids
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._n_sent = len(self._window)
        self._sent = decoder.decode(self._window) if self._window else ""
        if self._is_incomplete(self._sent):
            self._window, self._n_sent, self._sent = [], 0, ""

    def add(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete. What stays incomplete is dropped."""
        if token in self._hidden_ids:
            return ""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        if self._is_incomplete(text) and len(self._window) - self._n_sent < _MAX_PENDING:
            return ""
        new = text[len(self._sent) :]
        # The window starts anew at the tokens just sent: they are the context of the next ones.
        self._window = self._window[self._n_sent :]
        self._n_sent = len(self._window)
        self._sent = self._decoder.decode(self._window)
        return new

    def interrupt(self) -> None:
        """A control token stands here: a character that is incomplete will not be completed behind it."""
        del self._window[self._n_sent :]

    def _is_incomplete(self, text: str) -> bool:
        """Whether the window's text ends inside a character, as far as its decoder can tell.

        No character but U+FFFD has bytes that end in those of U+FFFD, for the first of the three begins a character.
        """
        if not text.endswith(_INCOMPLETE):
            return False
        return not b"".join(map(self._decoder.token_bytes, self._window)).endswith(_REPLACEMENT)
