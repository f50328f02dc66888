"""A draft model: a smaller model with the same vocabulary, which proposes what comes next in each row. Worker thread.

It runs the same tokens as the model, so a sequence has one cache with the layers of both, the model's first. In a bank
the draft model may lag behind: most passes draft nothing, and it takes their tokens later, many in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.cache.batch_cache import BatchCache
from mlx_serve.engine.cache.kinds import cut_back, leaves
from mlx_serve.engine.cache.rows import MAX_PASS
from mlx_serve.engine.generate.drafts import n_common

# With so many unseen tokens a row is fed before they exceed a pass, together with the token that begins a draft.
_MOST_UNSEEN = MAX_PASS - 1
# The newest token's weight in the chance that the draft model is right.
_WEIGHT = 0.1
# Of the passes that only catch up, every so many compare what was expected with what came: a small model's logits take
# most of its time.
_COMPARED = 8


class Paired:
    """A model and its draft model as one, for prompts: both run, and the logits are the model's."""

    def __init__(self, model: Any, draft_model: Any) -> None:
        self._model = model
        self._draft_model = draft_model
        self._n_layers = len(make_prompt_cache(model))

    def make_cache(self) -> list[Any]:
        """An empty cache of a sequence, with the layers of both."""
        return [*make_prompt_cache(self._model), *make_prompt_cache(self._draft_model)]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits of shape (rows, tokens, vocab) for inputs of shape (rows, tokens)."""
        logits: mx.array = self._model(inputs, cache=cache[: self._n_layers])
        # Only its cache is needed, so MLX never computes its logits.
        self._draft_model(inputs, cache=cache[self._n_layers :])
        return logits


class Chance:
    """How likely the draft model's next token is right. ``like``: where it begins, and what learns the same."""

    def __init__(self, value: float = 0.0, like: Chance | None = None) -> None:
        self.value: float = value if like is None else like.value
        self._like = like

    def note(self, n_right: int, *, is_wrong: bool) -> None:
        """``n_right`` tokens in a row were right; ``is_wrong``: the next one was wrong."""
        for is_right in [*[True] * n_right, *[False] * is_wrong]:
            self.value += _WEIGHT * (is_right - self.value)
        if self._like is not None:
            self._like.note(n_right, is_wrong=is_wrong)

    def expected(self, n_tokens: int) -> float:
        """How many of ``n_tokens`` drafted tokens will be right."""
        return sum(self.value**n for n in range(1, n_tokens + 1))


class Drafted(Protocol):
    """A row of a bank: its tokens, and how likely the draft model is right in it."""

    tokens: list[int]
    guesses: Chance


class DraftRows:
    """The draft model's part of a bank: a row for each row of the bank. Last tokens that it lacks are unseen."""

    def __init__(self, model: Any, cache: BatchCache) -> None:
        self._model = model
        self.cache = cache
        # By row: the tokens proposed for the running pass.
        self._proposed: list[list[int]] = []
        # What the draft model expected behind fed tokens, shape (rows, tokens), and each row's chance and tokens.
        self._expected: tuple[mx.array, list[tuple[Chance, list[int]]]] | None = None
        self._n_caught_up = 0

    def wait(self) -> None:
        """Wait for a running pass: a write to an array that it is reading would copy the whole array."""
        mx.eval(self._states)

    def copy(self, index: int, tokens: Sequence[int]) -> list[Any]:
        """A row's cache, as that of a single sequence with the row's first ``tokens``."""
        n_seen = min(self.cache.lengths[index], len(tokens))
        return self._completed(self.cache.copy(index, n_seen), tokens[n_seen:])

    def leave(self, index: int, tokens: Sequence[int], max_spare: float) -> list[Any]:
        """Remove a row and return its cache, which then holds ``tokens``. ``max_spare`` as in ``BatchCache.leave``."""
        unseen = tokens[self.cache.lengths[index] :]
        return self._completed(self.cache.leave(index, max_spare), unseen)

    def follow(self, rows: Sequence[Drafted]) -> None:
        """Feed the unseen tokens to the draft model once a row has ``_MOST_UNSEEN``. Does not wait for the pass."""
        while max(map(len, self._unseen(rows))) >= _MOST_UNSEEN:
            self._compare()
            expected = self._feed(rows, [tokens[:MAX_PASS] for tokens in self._unseen(rows)])
            if self._n_caught_up % _COMPARED:
                self._expected = None
                # MLX never computes logits that nobody reads.
                mx.async_eval(self._states)  # type: ignore[no-untyped-call]
            else:
                mx.async_eval(expected)  # type: ignore[no-untyped-call]
            self._n_caught_up += 1

    def propose(self, rows: Sequence[Drafted], drawn: Sequence[int], n_tokens: int) -> list[list[int]]:
        """For each row, the ``n_tokens`` that the draft model thinks likeliest behind the token that was drawn."""
        self._compare()
        fed = [[*tokens, token] for tokens, token in zip(self._unseen(rows), drawn, strict=True)]
        expected = self._feed(rows, fed)
        last = mx.array([len(tokens) - 1 for tokens in fed])[:, None]
        proposed = [mx.take_along_axis(expected, last, axis=1)]
        for _ in range(n_tokens - 1):
            self.cache.begin(1)
            proposed.append(mx.argmax(self._model(proposed[-1], cache=self.cache.layers), axis=-1))
            self.cache.advance([1] * len(rows))
        self._proposed = mx.concatenate(proposed, axis=1).tolist()  # type: ignore[assignment]
        self._compare()
        return self._proposed

    def settle(self, rows: Sequence[Drafted], following: Sequence[Sequence[int]]) -> None:
        """Drop wrong proposals. ``following``: for each row, the tokens that came, up to the one drawn last."""
        surplus = []
        for row, proposed, came in zip(rows, self._proposed, following, strict=False):
            n_right = n_common(proposed, came)
            row.guesses.note(n_right, is_wrong=n_right < min(len(proposed), len(came)))
            # The last proposal was not fed to the draft model, and the last token that came was not fed to the model.
            n_fed = len(proposed) - 1
            surplus.append(n_fed - min(n_right, n_fed, len(came) - 1))
        if surplus:
            self.cache.take_back(surplus)
        self._proposed = []

    @property
    def _states(self) -> list[Any]:
        return [layer.state for layer in leaves(self.cache.layers)]

    def _completed(self, cache: list[Any], unseen: Sequence[int]) -> list[Any]:
        """The cache of a single sequence, after the draft model has taken the unseen tokens."""
        if unseen:
            self._model(mx.array([unseen]), cache=cache)
            mx.eval([layer.state for layer in cache])
            cut_back(cache, 0)
        return cache

    def _unseen(self, rows: Sequence[Drafted]) -> list[list[int]]:
        return [row.tokens[n_seen:] for row, n_seen in zip(rows, self.cache.lengths, strict=True)]

    def _feed(self, rows: Sequence[Drafted], tokens: Sequence[list[int]]) -> mx.array:
        """Feed each row its tokens. Returns what the draft model expects behind each of them: shape (rows, longest)."""
        longest = max(map(len, tokens))
        self.cache.begin(longest)
        padded = mx.array([[*each, *[0] * (longest - len(each))] for each in tokens])
        expected = mx.argmax(self._model(padded, cache=self.cache.layers), axis=-1)
        self.cache.advance(list(map(len, tokens)))
        self._expected = expected, [(row.guesses, each) for row, each in zip(rows, tokens, strict=True)]
        return expected

    def _compare(self) -> None:
        """Note how often the draft model was right in tokens that it was fed: what it would have drafted."""
        if self._expected is None:
            return
        expected, fed = self._expected
        by_row: list[list[int]] = expected.tolist()  # type: ignore[assignment]
        for (chance, tokens), guesses in zip(fed, by_row, strict=True):
            for guess, token in zip(guesses, tokens[1:], strict=False):
                chance.note(int(guess == token), is_wrong=guess != token)
        self._expected = None
