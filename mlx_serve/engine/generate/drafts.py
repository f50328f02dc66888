"""Drafts: tokens that may come next in a sequence, by what followed its last tokens elsewhere.

The model checks several drafted tokens of each row in one pass, and draws a token at each of them as it would without
drafts. As long as what it draws is what was drafted, the next drawn token is right as well. So drafts change no token.

Knows no MLX, no model, no clock. On every rank the same tokens give the same drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from mlx_serve.engine.generate.prediction import LONGEST, Prediction

# So many of a prompt's last tokens are indexed, so many at a time: 1 us each, while every stream waits.
_INDEXED = 8192
_AT_A_TIME = 1024
# The bits of a token in the key of an n-gram. Three of them fit in numpy's integers.
_TOKEN_BITS = 20
# Guesses behind more matching tokens than this are equally likely to be right.
_MOST_MATCHED = 16
# Where a guess is from.
Source: TypeAlias = Literal["text", "prediction", "grammar"]
# The chance of guesses that were never checked, and how many checked guesses it counts as.
_FIRST_CHANCE: Mapping[Source, tuple[float, float]] = {
    "text": (0.5, 2.0),
    "prediction": (0.8, 4.0),
    "grammar": (0.8, 4.0),
}
# How many of the last guesses count in a chance.
_MEMORY = 100.0
# Expectations are computed anew after so many guesses.
_RENEWED = 8
# How far ahead the guesses are judged: the longest draft, and the token before it.
_MOST_AHEAD = 16


class Chances:
    """How likely guesses are right, by the number of matching tokens before them. A model's rows share what is learnt.

    So a text that is being copied is told from one that repeats a word by chance. Guesses from predictions and grammars
    are counted apart: until it is known how good they are, they are trusted. A grammar's are told apart by how many
    before them were right.
    """

    def __init__(self) -> None:
        n = 1 + _MOST_MATCHED
        self._right = {source: [chance * weight] * n for source, (chance, weight) in _FIRST_CHANCE.items()}
        self._all = {source: [weight] * n for source, (_, weight) in _FIRST_CHANCE.items()}
        # What ``expected`` has computed since the last renewal.
        self._expected: dict[tuple[Source, int], list[float]] = {}
        self._n_noted = 0

    def note(self, n_matched: int, source: Source, *, is_right: bool) -> None:
        """A guess behind so many matching tokens was right, or wrong."""
        n = min(n_matched, _MOST_MATCHED)
        right, of = self._right[source], self._all[source]
        if of[n] >= _MEMORY:
            right[n] *= 1 - 1 / _MEMORY
            of[n] -= 1
        right[n] += is_right
        of[n] += 1
        self._n_noted += 1
        if self._n_noted % _RENEWED == 0:
            self._expected.clear()

    def expected(self, n_matched: int, source: Source) -> list[float]:
        """How many of the next 0, 1, 2, ... guesses will be right, the first being behind so many matching tokens."""
        key = source, min(n_matched, _MOST_MATCHED)
        if key not in self._expected:
            total, chance, sums = 0.0, 1.0, [0.0]
            for i in range(_MOST_AHEAD):
                n = min(n_matched + i, _MOST_MATCHED)
                chance *= self._right[source][n] / self._all[source][n]
                total += chance
                sums.append(total)
            self._expected[key] = sums
        return self._expected[key]


class Restriction(Protocol):
    """A grammar that restricts a row's drafts."""

    @property
    def has_ended(self) -> bool:
        """It allows no more drafts, because they took too long."""

    def draft(
        self, tokens: Sequence[int], last: int, proposed: Sequence[int], n_tokens: int
    ) -> tuple[list[int], list[int]]:
        """At most ``n_tokens`` to check behind ``tokens`` and ``last``, and the guess behind them.

        They begin with what it allows of the proposed ones.
        """

    def guess(self, tokens: Sequence[int], last: int | None) -> list[int]:
        """The token that is forced behind ``tokens`` and ``last``, or none. Without ``last``: in the running pass."""


class Lookup:
    """What may come next in a text, by what followed its end elsewhere: earlier in it, or in a prediction of it."""

    def __init__(
        self, tokens: Sequence[int] | None, prediction: Prediction | None = None, chances: Chances | None = None
    ) -> None:
        """``tokens``: the text so far. None: only the prediction is looked up in."""
        self._text = _Text(tokens) if tokens is not None else None
        self._prediction = prediction
        self._chances = chances if chances is not None else Chances()
        # What a grammar puts in the place of the next guesses (None: it keeps a guess), and how many tokens up to here
        # it forced one after another.
        self._changed: list[int | None] = []
        self._n_forced = 0

    def add(self, *tokens: int) -> None:
        """Append tokens that have come, and note whether each would have been drafted."""
        for token in tokens:
            source, n_matched, guess = self._guess()
            is_right = guess == [token]
            if guess:
                self._chances.note(n_matched, source, is_right=is_right)
            if self._n_forced and source != "grammar":
                # The forced text had an end here.
                self._chances.note(self._n_forced, "grammar", is_right=False)
            self._n_forced = self._n_forced + 1 if is_right and source == "grammar" else 0
            self._changed = self._changed[1:] if is_right else []
            if self._prediction is not None:
                self._prediction.add(token)
            if self._text is not None:
                self._text.add(token)

    def draft(self, n_tokens: int) -> list[int]:
        """At most ``n_tokens`` that may come next."""
        return self._draft(n_tokens)[2]

    def change(self, tokens: Sequence[int]) -> None:
        """A grammar has changed the draft to these tokens. They may begin as the draft does."""
        draft = self._draft(len(tokens))[2]
        n_same = n_common(draft, tokens)
        self._changed = [None] * n_same + list(tokens[n_same:])

    def force(self, tokens: Sequence[int]) -> None:
        """A grammar forces these tokens to come next, whatever was guessed."""
        self._changed = list(tokens)

    def note_checked(self, n_tokens: int, n_right: int) -> None:
        """So many tokens of a draft were checked, of which the first ``n_right`` were right. They are not added yet."""
        if self._prediction is not None and self._draft(1)[0] == "prediction":
            n_own = next((i for i, token in enumerate(self._changed) if token is not None), n_tokens)
            n_checked = min(n_tokens, n_own)
            self._prediction.n_accepted += min(n_right, n_checked)
            self._prediction.n_rejected += n_checked - min(n_right, n_checked)

    def expected(self, n_tokens: int, *, ahead: int = 0) -> float:
        """How many of ``n_tokens`` drafted tokens will be right, behind ``ahead`` tokens that are not known yet."""
        source, n_matched, guess = self._guess()
        if not guess:
            return 0.0
        sums = self._chances.expected(n_matched, source)
        return sums[ahead + n_tokens] - sums[ahead]

    def _guess(self) -> tuple[Source, int, list[int]]:
        """As ``_draft`` for one token, or what a grammar forces instead."""
        if self._changed and self._changed[0] is not None:
            return "grammar", self._n_forced, [self._changed[0]]
        return self._draft(1)

    def _draft(self, n_tokens: int) -> tuple[Source, int, list[int]]:
        """Where a draft is from, how many of the last tokens match there, and the draft."""
        n_matched, draft = self._text.draft(n_tokens) if self._text is not None else (0, [])
        n_followed, predicted = self._prediction.draft(n_tokens) if self._prediction is not None else (0, [])
        # The longer match is likelier to go on. Of equal ones the client's own prediction.
        if predicted and n_followed >= n_matched:
            return "prediction", n_followed, predicted
        return "text", n_matched, draft


class _Text:
    """A text, its n-grams, and the place in it that is followed as long as the text goes on as it did there."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens[-_INDEXED:])
        # By n-gram: the position behind its last occurrence. The end of the text is not indexed yet.
        self._followers: dict[int, int] = {}
        # The tokens before this position are not indexed yet either.
        self._n_before = len(self._tokens)
        self._index_more()
        # The keys of the n-grams at the end of the text, the shortest first.
        self._ends: list[int] = []
        for token in self._tokens[-LONGEST:]:
            self._ends = _with(self._ends, token)
        # The position of the guess, and how many tokens before it match the end of the text; 0: there is no guess.
        self._place = self._n_matched = 0
        self._find()

    def add(self, token: int) -> None:
        if self._n_before:
            self._index_more()
        follows = self._n_matched > 0 and self._tokens[self._place] == token
        for key in self._ends:
            self._followers[key] = len(self._tokens)
        self._tokens.append(token)
        self._ends = _with(self._ends, token)
        if follows:
            # It has more in common with the end than any n-gram.
            self._place += 1
            self._n_matched += 1
        else:
            self._find()

    def draft(self, n_tokens: int) -> tuple[int, list[int]]:
        """How many of the last tokens match at a place, and at most ``n_tokens`` of what follows them there."""
        if not self._n_matched:
            return 0, []
        draft = self._tokens[self._place : self._place + n_tokens]
        # A text that repeats its last few tokens goes on to do so.
        period = len(self._tokens) - self._place
        for i in range(len(draft), n_tokens):
            draft.append(draft[i - period])
        return self._n_matched, draft

    def _index_more(self) -> None:
        """Index the part before the indexed one. So many sequences that begin together hold nobody up for long."""
        end, self._n_before = self._n_before, max(0, self._n_before - _AT_A_TIME)
        first = max(0, self._n_before - LONGEST + 1)
        for key, position in _followers(self._tokens[first : end + 1]).items():
            self._followers.setdefault(key, first + position)

    def _find(self) -> None:
        """Look up the end of the text."""
        self._n_matched = 0
        for n, key in enumerate(self._ends, 1):
            if (position := self._followers.get(key)) is not None:
                self._place, self._n_matched = position, n


def n_common(tokens: Sequence[object], others: Sequence[object]) -> int:
    """How many tokens (or characters) two sequences have in common at their start."""
    pairs = zip(tokens, others, strict=False)
    return next((n for n, (token, other) in enumerate(pairs) if token != other), min(len(tokens), len(others)))


def _with(ends: Sequence[int], token: int) -> list[int]:
    """The keys of the n-grams at the end of a text behind one more token. ``ends``: those before it."""
    return [token + 1, *(token + 1 | key << _TOKEN_BITS for key in ends[: LONGEST - 1])]


def _followers(tokens: Sequence[int]) -> dict[int, int]:
    """By the key of each n-gram that is not the end of the text: the position behind its last occurrence."""
    ids = np.asarray(tokens, np.int64) + 1
    followers: dict[int, int] = {}
    keys = np.zeros(len(ids), np.int64)
    for n in range(1, min(LONGEST, len(ids) - 1) + 1):
        # Of the n-grams that end at each position from n - 1 on; of equal ones the last stays.
        keys[n - 1 :] |= ids[: len(ids) - n + 1] << (n - 1) * _TOKEN_BITS
        followers.update(zip(keys[n - 1 : -1].tolist(), range(n, len(ids)), strict=True))
    return followers
