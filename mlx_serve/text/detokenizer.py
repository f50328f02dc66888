"""Token ids to text, as they come, for any tokenizer. Knows no regions and no stop strings.

A token's text depends on its neighbours (leading spaces, bytes of one character), so a window of the last tokens is
decoded with and without the new ones and the difference goes out, once it is whole characters. The technique is that
of vLLM and text-generation-inference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_INCOMPLETE = "\ufffd"
# So many prompt tokens before the first new one decide whether it begins with a space.
_CONTEXT_TOKENS = 5
# A character has at most four bytes, so more pending tokens than that are bytes that will never make one.
_MAX_PENDING = 5


class Detokenizer:
    """``context`` is the prompt that the text continues; () when the text stands for itself, as a chat answer does."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], hidden_ids: Collection[int], context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._hidden_ids = hidden_ids
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._n_sent = len(self._window)
        self._sent = decode(self._window) if self._window else ""
        if self._sent.endswith(_INCOMPLETE):
            self._window, self._n_sent, self._sent = [], 0, ""

    def add(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete. What stays incomplete is dropped."""
        if token in self._hidden_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE) and len(self._window) - self._n_sent < _MAX_PENDING:
            return ""
        new = text[len(self._sent) :]
        # The window starts anew at the tokens just sent: they are the context of the next ones.
        self._window = self._window[self._n_sent :]
        self._n_sent = len(self._window)
        self._sent = self._decode(self._window)
        return new

    def interrupt(self) -> None:
        """A control token stands here: a character that is incomplete will not be completed behind it."""
        del self._window[self._n_sent :]
