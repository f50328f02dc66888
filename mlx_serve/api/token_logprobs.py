"""Which log-probabilities go out with which piece of an answer's content. Knows no jobs and no dialect."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_serve.text.symbols import Piece
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import TokenEvent, TokenLogprob


class TokenLogprobs:
    """Holds each token's log-probabilities until the content in which the token begins is sent.

    ``add`` says where a token lies in the splitter's input, and ``place`` which part of that input is content. A
    token's entry is sent with its content, or dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._n_placed = 0
        self._n_sent = 0
        # (first and last position in the text, entry)
        self._heard: list[tuple[int, int, TokenLogprob]] = []
        # (position in the content at which the token's text begins, entry)
        self._waiting: list[tuple[int, TokenLogprob]] = []

    def add(self, event: TokenEvent, start: int, end: int) -> None:
        """Add a token whose text begins and ends at these positions of the splitter's input."""
        assert event.logprob is not None
        self._heard.append((start, end, self.entry(event.token, event.logprob, event.top_logprobs)))

    def place(self, piece: Piece) -> None:
        """Mark a part of the splitter's input as content."""
        begun = [heard for heard in self._heard if heard[0] < piece.end]
        del self._heard[: len(begun)]
        for start, end, entry in begun:
            # A token without text holds the first bytes of a character that a later token completes.
            if end > piece.start or start >= piece.start:
                self._waiting.append((self._n_placed + max(0, start - piece.start), entry))
        self._n_placed += len(piece.text)

    def drop(self, end: int) -> None:
        """Drop the entries of input before ``end``, which is not content."""
        while self._heard and self._heard[0][1] <= end and self._heard[0][0] < end:
            del self._heard[0]

    def take(self, n_chars: int) -> tuple[TokenLogprob, ...]:
        """The entries that go with the next ``n_chars`` of the content."""
        self._n_sent += n_chars
        out = tuple(entry for start, entry in self._waiting if start < self._n_sent)
        del self._waiting[: len(out)]
        return out

    def entry(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
        """A token and its alternatives as texts."""
        others = tuple(self.entry(*other) for other in top)
        return TokenLogprob(self._tokenizer.decode([token]), self._tokenizer.token_bytes(token), logprob, others)
