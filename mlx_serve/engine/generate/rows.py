"""The running batch. Its sequences are rows, and each step adds tokens to every row. Worker thread.

Sequences join and leave between two passes. Those of similar lengths are in one bank (bank.py).

Knows no job and no prompt: a sequence joins with its prefilled cache, and gets a sampler and logits processors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import TokenBuffer

from mlx_serve.engine.cache.kinds import Quantization, is_quantized, leaves
from mlx_serve.engine.cache.lone import LoneCache
from mlx_serve.engine.cache.rows import BatchCache, bank_of
from mlx_serve.engine.generate.bank import Bank, Row
from mlx_serve.engine.generate.drafts import DraftLength

# MLX's cache of freed buffers is emptied every so many steps.
_CLEAR_EVERY = 512


class Rows:
    """All running sequences of a model."""

    def __init__(
        self,
        model: Any,
        *,
        alone: bool = False,
        quantization: Quantization | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``alone``: the model's caches can't be rows, so there is at most one sequence."""
        self._model = model
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
    def nbytes(self) -> int:
        """The bytes of the running sequences' caches, with free rows."""
        return sum(bank.cache.nbytes for bank in self._banks.values())

    @property
    def spare_bytes(self) -> int:
        """The bytes of free rows."""
        return sum(bank.cache.spare_bytes for bank in self._banks.values())

    def join(self, row: Row, cache: list[Any]) -> None:
        """Add a sequence. ``cache`` holds ``row.tokens``, and is taken over."""
        with mx.stream(generation_stream):
            if row.processors:
                row.context = TokenBuffer(row.tokens)
            self._join(row, cache, mx.array([row.next_token], mx.uint32))

    def leave(self, row: Row) -> tuple[list[Any], int]:
        """Remove a sequence. Returns its cache, which holds ``row.tokens``, and the token that it drew last.

        That token comes behind ``row.tokens``, and ``step`` has not returned it.
        """
        with mx.stream(generation_stream):
            cache, drawn = self._leave(row)
            return cache, int(drawn.item())  # type: ignore[arg-type]

    def copy(self, row: Row, n_tokens: int | None = None) -> list[Any]:
        """A copy of a sequence's cache, or of its first ``n_tokens``. Raises ValueError if it can't be cut back."""
        with mx.stream(generation_stream):
            bank = self._bank_with(row)
            return bank.cache.copy(bank.rows.index(row), n_tokens)

    def step(self) -> list[tuple[Row, int]]:
        """Run a pass of each bank, and return the tokens that were fed to it: what earlier passes drew, and drafts.

        A sequence that just joined has none yet. A sequence goes on until it is removed.
        """
        with mx.stream(generation_stream):
            self._give_up_spare()
            self._move_grown()
            self._n_steps += 1
            if self._n_steps % _CLEAR_EVERY == 0:
                mx.clear_cache()
            return [(row, token) for bank in self._banks.values() for row, out in self._run(bank) for token in out]

    def _run(self, bank: Bank) -> list[tuple[Row, list[int]]]:
        drafting = bank.drafting
        wanted = self.draft_length.choose(len(bank.rows), drafting) if drafting else 0
        out = bank.step_with_drafts(wanted) if wanted else bank.step()
        if bank.seconds is not None:
            self.draft_length.note(len(bank.rows), wanted, bank.seconds)
        self.n_drafted += bank.n_drafted
        self.n_accepted += bank.n_accepted
        bank.n_drafted = bank.n_accepted = 0
        return out

    def _join(self, row: Row, cache: list[Any], drawn: mx.array) -> None:
        if self._quantization is not None:
            self._quantization.apply(cache)
        key = self._key(row, any(map(is_quantized, leaves(cache))))
        if key not in self._banks:
            self._banks[key] = Bank(self._model, LoneCache() if self._alone else BatchCache(cache), self._clock)
        self._banks[key].join(row, cache, drawn, self.max_spare - self.spare_bytes)

    def _leave(self, row: Row) -> tuple[list[Any], mx.array]:
        bank = self._bank_with(row)
        left = bank.leave(row, self.max_spare - self.spare_bytes + bank.cache.spare_bytes)
        if not bank.rows:
            self._banks = {key: other for key, other in self._banks.items() if other is not bank}
        return left

    def _give_up_spare(self) -> None:
        """Give up free rows if they take too much."""
        if self.spare_bytes > self.max_spare:
            for bank in self._banks.values():
                if bank.cache.spare_bytes:
                    bank.give_up_spare()

    def _move_grown(self) -> None:
        """Move sequences that have become too long for their banks, or that are to be quantized now."""
        start = self._quantization.start if self._quantization is not None else math.inf
        for key, bank in list(self._banks.items()):
            for row in [row for row in bank.rows if self._key(row, key[0] or len(row.tokens) >= start) != key]:
                self._join(row, *self._leave(row))

    def _key(self, row: Row, quantized: bool) -> tuple[bool, int]:
        return quantized, 0 if self._alone else bank_of(len(row.tokens) + 1)

    def _bank_with(self, row: Row) -> Bank:
        return next(bank for bank in self._banks.values() if row in bank.rows)
