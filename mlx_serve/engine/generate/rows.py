"""The running batch. Its sequences are rows, and each step adds tokens to every row. Worker thread.

Sequences join and leave between two passes. Those of similar lengths are in one bank (bank.py).

Knows no job and no prompt: a sequence joins with its prefilled cache, and gets a sampler and logits processors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import TokenBuffer, make_prompt_cache

from mlx_serve.engine.cache.banks import bank_of
from mlx_serve.engine.cache.batch_cache import BatchCache
from mlx_serve.engine.cache.kinds import Quantization, is_quantized, leaves
from mlx_serve.engine.cache.lone import LoneCache
from mlx_serve.engine.generate.bank import Bank
from mlx_serve.engine.generate.draft_length import DraftLength, Shape, Times
from mlx_serve.engine.generate.draft_model import Chance, DraftRows
from mlx_serve.engine.generate.row import Row

# MLX's cache of freed buffers is emptied every so many steps.
_CLEAR_EVERY = 512
# A draft model is taken to be right so often until it has been seen at work.
_FIRST_CHANCE = 0.7


class Rows:
    """All running sequences of a model."""

    def __init__(
        self,
        model: Any,
        *,
        draft_model: Any = None,
        alone: bool = False,
        quantization: Quantization | None = None,
        agree: Callable[[mx.array], mx.array] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``alone``: the model's caches can't be rows, so there is at most one sequence, and no draft model.

        ``agree``: see Bank.
        """
        self._model = model
        self._agree = agree
        self._draft_model = draft_model
        self._n_layers = len(make_prompt_cache(model))
        # How likely the draft model is right, in all sequences. Before it was seen at work, it is given a chance.
        self._guesses = Chance(_FIRST_CHANCE)
        self._clock = clock
        self.draft_length = DraftLength()
        # The most bytes for rows that are free: not needed now, but they make joining and leaving quick.
        self.max_spare = math.inf
        # Tokens that were drafted, and those of them that were right.
        self.n_drafted = self.n_accepted = 0
        self._alone = alone
        self._quantization = quantization
        # By whether the caches are quantized, and by length.
        self._banks: dict[tuple[bool, int], Bank] = {}
        self._n_steps = 0

    def __len__(self) -> int:
        return sum(len(bank.rows) for bank in self._banks.values())

    @property
    def spare_bytes(self) -> int:
        """The bytes of free rows."""
        return sum(bank.spare_bytes for bank in self._banks.values())

    def join(self, row: Row, cache: list[Any]) -> None:
        """Add a sequence. ``cache`` holds ``row.tokens``, and is taken over."""
        with mx.stream(generation_stream):
            if row.processors:
                row.context = TokenBuffer(row.tokens)
            if self._draft_model is not None:
                row.guesses = Chance(like=self._guesses)
            self._join(row, cache, mx.array([row.next_token], mx.uint32))

    def leave(self, row: Row) -> tuple[list[Any], int]:
        """Remove a sequence. Returns its cache, which holds ``row.tokens``, and the token that it drew last.

        That token comes behind ``row.tokens``, and ``step`` has not returned it.
        """
        with mx.stream(generation_stream):
            cache, drawn = self._leave(row)
            token = int(drawn.item())  # type: ignore[arg-type]
            # A paused sequence goes on in its prediction behind this token.
            row.learn(token)
            return cache, token

    def copy(self, row: Row, n_tokens: int | None = None) -> list[Any]:
        """A copy of a sequence's cache, or of its first ``n_tokens``. Raises ValueError if it can't be cut back."""
        with mx.stream(generation_stream):
            return self._bank_with(row).copy(row, n_tokens)

    def plan(self) -> int:
        """How many tokens the next step should draft for each row, by the clock of this rank."""
        if not any(bank.drafting for bank in self._banks.values()):
            return 0
        return self.draft_length.choose(self._shape, self._rows)

    def interrupted(self) -> None:
        """Other work runs between two steps, so their times say nothing."""
        self.draft_length.interrupted()

    def step(self, n_drafts: int = 0) -> list[tuple[Row, int]]:
        """Run a pass of each bank, and return the tokens that were fed to it: what earlier passes drew, and drafts.

        A sequence that just joined has none yet. A sequence goes on until it is removed.
        """
        with mx.stream(generation_stream):
            self._give_up_spare()
            self._move_grown()
            self._n_steps += 1
            if self._n_steps % _CLEAR_EVERY == 0:
                mx.clear_cache()
            drafting = [bank for bank in self._banks.values() if n_drafts and bank.drafting]
            out = self._step_with_drafts(drafting, n_drafts) if drafting else self._step()
            return [(row, token) for row, tokens in out for token in tokens]

    def _step(self) -> list[tuple[Row, list[int]]]:
        started_s = self._clock()
        out = [one for bank in self._banks.values() for one in bank.step()]
        self.draft_length.ran_plain(self._shape, self._rows, Times(started_s, started_s, self._clock()))
        return out

    def _step_with_drafts(self, drafting: Sequence[Bank], n_drafts: int) -> list[tuple[Row, list[int]]]:
        started_s = self._clock()
        for bank in self._banks.values():
            bank.wait()
        ready_s = self._clock()
        n_before = {row: len(row.tokens) for row in self._rows}
        # The passes of the others are started first, so they have ended when the last pass has.
        out = [one for bank in self._banks.values() if bank not in drafting for one in bank.step()]
        n_longest = 0
        for bank in drafting:
            drafted = bank.step_with_drafts(n_drafts)
            out += drafted.out
            n_longest = max(n_longest, drafted.n_longest)
            self.n_drafted += drafted.n_drafted
            self.n_accepted += drafted.n_accepted
        taken = [(row, len(row.tokens) - n) for row, n in n_before.items()]
        self.draft_length.ran(self._shape, n_longest, taken, Times(started_s, ready_s, self._clock()))
        return out

    @property
    def _shape(self) -> Shape:
        return tuple(sorted((*key, len(bank.rows)) for key, bank in self._banks.items()))

    @property
    def _rows(self) -> list[Row]:
        return [row for bank in self._banks.values() for row in bank.rows]

    def _join(self, row: Row, cache: list[Any], drawn: mx.array) -> None:
        self.draft_length.changed()
        if self._quantization is not None:
            self._quantization.apply(cache)
        quantized = any(map(is_quantized, leaves(cache)))
        key = self._key(row, quantized)
        # A token that is quantized without drafts is quantized with them.
        row.most_tokens = self._quantization.start if self._quantization is not None and not quantized else math.inf
        if key not in self._banks:
            self._banks[key] = self._new_bank(cache)
        self._banks[key].join(row, cache, drawn, self.max_spare - self.spare_bytes)

    def _new_bank(self, like: list[Any]) -> Bank:
        if self._alone:
            return Bank(self._model, LoneCache(), agree=self._agree)
        drafter = None
        if self._draft_model is not None:
            drafter = DraftRows(self._draft_model, BatchCache(like[self._n_layers :]))
        return Bank(self._model, BatchCache(like[: self._n_layers]), drafter, self._agree)

    def _leave(self, row: Row) -> tuple[list[Any], mx.array]:
        self.draft_length.changed()
        bank = self._bank_with(row)
        left = bank.leave(row, self.max_spare - self.spare_bytes + bank.spare_bytes)
        if not bank.rows:
            self._banks = {key: other for key, other in self._banks.items() if other is not bank}
        return left

    def _give_up_spare(self) -> None:
        """Give up free rows if they take too much."""
        if self.spare_bytes > self.max_spare:
            for bank in self._banks.values():
                if bank.spare_bytes:
                    bank.give_up_spare()

    def _move_grown(self) -> None:
        """Move sequences that have become too long for their banks, or that are to be quantized now."""
        start = self._quantization.start if self._quantization is not None else math.inf
        for key, bank in list(self._banks.items()):
            for row in [row for row in bank.rows if self._key(row, key[0] or len(row.tokens) >= start) != key]:
                self._join(row, *self._leave(row))

    def _key(self, row: Row, quantized: bool) -> tuple[bool, int]:
        return quantized, 0 if self._alone else bank_of(len(row.tokens))

    def _bank_with(self, row: Row) -> Bank:
        return next(bank for bank in self._banks.values() if row in bank.rows)
