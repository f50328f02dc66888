"""Drafts: tokens that may come next in a sequence, and whether it pays to check them. Knows no MLX, no model, no clock.

The model checks several drafted tokens of each row in one pass, and draws a token at each of them as it would without
drafts. As long as what it draws is what was drafted, the next drawn token is right as well. So drafts change no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Protocol

from mlx_serve.engine.generate.prediction import LONGEST, Prediction

# So many of a prompt's last tokens are indexed: 2 us each, while every stream waits.
_INDEXED = 8192
# At first a predicted token is taken to be right this often.
_PREDICTED = 0.8
# How many tokens a pass may draft for each row.
LENGTHS = (1, 3, 7)
# The newest draft's weight in a row's chance that a drafted token is right.
_WEIGHT = 0.1
# Drafting must promise so much more than a pass without drafts.
_LEAST_GAIN = 1.05
# The same for a length whose passes are not measured: the trial costs time where they turn out to be slow.
_WORTH_A_TRIAL = 1.4
# The newest passes of a length whose times are kept.
_KEPT_TIMES = 5
# A length whose passes were too slow is measured again after so many passes.
_STALE = 400


class Drafting(Protocol):
    """A row that something proposes drafts for."""

    def expected(self, n_tokens: int) -> float:
        """How many of ``n_tokens`` drafted tokens will be right."""


class Lookup:
    """What may come next in a text, by what followed its end elsewhere: earlier in it, or in a prediction of it."""

    def __init__(self, tokens: Sequence[int] | None, prediction: Prediction | None = None) -> None:
        """``tokens``: the text so far. None: only the prediction is looked up in."""
        self._text = _Text(tokens) if tokens is not None else None
        self._prediction = prediction
        # Whether the last draft was from the prediction.
        self._is_predicted = False
        # The chance that the first drafted token is right. A text that repeats nothing has none to try.
        self.chance = 0.0 if prediction is None else _PREDICTED

    def add(self, *tokens: int) -> None:
        """Append tokens that have come, and note whether each would have been drafted."""
        for token in tokens:
            guess = self.draft(1)
            self.chance += _WEIGHT * ((guess == [token]) - self.chance)
            if self._prediction is not None:
                self._prediction.add(token)
            if self._text is not None:
                self._text.add(token)

    def draft(self, n_tokens: int) -> list[int]:
        """At most ``n_tokens`` that may come next."""
        n_matched, draft = self._text.draft(n_tokens) if self._text is not None else (0, [])
        n_followed, predicted = self._prediction.draft(n_tokens) if self._prediction is not None else (0, [])
        # The longer match is likelier to go on. Of equal ones the client's own prediction.
        self._is_predicted = bool(predicted) and n_followed >= n_matched
        return predicted if self._is_predicted else draft

    def note_checked(self, n_tokens: int, n_right: int) -> None:
        """So many tokens of the last draft were checked, of which the first ``n_right`` were right."""
        if self._is_predicted and self._prediction is not None:
            self._prediction.n_accepted += n_right
            self._prediction.n_rejected += n_tokens - n_right

    def expected(self, n_tokens: int) -> float:
        """How many of ``n_tokens`` drafted tokens will be right."""
        return sum(self.chance**n for n in range(1, n_tokens + 1))


class _Text:
    """A text and its n-grams."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens[-_INDEXED:])
        # By n-gram: the position behind its last occurrence. The end of the text is not indexed yet.
        self._followers: dict[tuple[int, ...], int] = {}
        for end in range(1, len(self._tokens)):
            self._index(end)

    def add(self, token: int) -> None:
        if self._tokens:
            self._index(len(self._tokens))
        self._tokens.append(token)

    def draft(self, n_tokens: int) -> tuple[int, list[int]]:
        """How many of the last tokens occurred earlier, and at most ``n_tokens`` of what followed them there."""
        for n in range(min(LONGEST, len(self._tokens)), 0, -1):
            begin = self._followers.get(tuple(self._tokens[-n:]))
            if begin is not None:
                return n, self._tokens[begin : begin + n_tokens]
        return 0, []

    def _index(self, end: int) -> None:
        """Note that the n-grams that end at ``end`` are followed by the token there."""
        for n in range(1, min(LONGEST, end) + 1):
            self._followers[tuple(self._tokens[end - n : end])] = end


class DraftLength:
    """Chooses how many tokens the rows of a batch draft, by what passes took and by how often drafts were right.

    A length whose passes were never measured is tried when drafts are likely to be right.
    """

    def __init__(self) -> None:
        # By the number of rows as a power of two, and the drafted tokens: seconds of the newest passes.
        self._seconds: dict[tuple[int, int], list[float]] = {}
        # By the same: how many passes have run since the last one of this kind.
        self._age: dict[tuple[int, int], int] = {}

    def choose(self, n_rows: int, drafting: Sequence[Drafting]) -> int:
        """How many tokens to draft in the next pass of so many rows, some of which are ``drafting``; 0: none."""
        size = n_rows.bit_length()
        plain = self._seconds.get((size, 0))
        if plain is None:
            return 0
        best, best_gain = 0, 1.0
        for n in LENGTHS:
            tokens = 1 + sum(row.expected(n) for row in drafting) / n_rows
            times = self._seconds.get((size, n))
            # A length that was not measured lately is tried, as if its passes took no longer than those without drafts.
            is_known = times is not None and self._age[size, n] <= _STALE
            slower = median(times or plain) / median(plain) if is_known else 1.0
            if tokens / slower > max(best_gain, _LEAST_GAIN if is_known else _WORTH_A_TRIAL):
                best, best_gain = n, tokens / slower
        return best

    def note(self, n_rows: int, n_drafted: int, seconds: float) -> None:
        """A pass of ``n_rows`` rows that drafted so many tokens took so long."""
        key = (n_rows.bit_length(), n_drafted)
        self._age = {one: age + 1 for one, age in self._age.items()} | {key: 0}
        self._seconds[key] = [*self._seconds.get(key, ()), seconds][-_KEPT_TIMES:]
