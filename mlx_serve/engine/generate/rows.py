"""The running batch. Its sequences are rows, and each step adds a token to every row. Worker thread.

Rows of similar lengths are in one bank, which the model runs in one pass. Sequences join and leave between two passes.
A bank's next pass starts before the tokens of the last one are read, so Python's work overlaps with the device's. So a
bank is always one token ahead: ``drawn`` has the tokens that the running pass draws.

Knows no job and no prompt: a sequence joins with its prefilled cache, and gets a sampler and logits processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from mlx_serve.engine.cache.kinds import Quantization, is_quantized, leaves
from mlx_serve.engine.cache.lone import LoneCache
from mlx_serve.engine.cache.rows import BatchCache, bank_of
from mlx_serve.engine.generate.logprobs import OutputLogprobs, note_rows

# MLX's cache of freed buffers is emptied every so many steps.
_CLEAR_EVERY = 512


@dataclass(slots=True, eq=False)
class Row:
    """A sequence in the batch.

    ``tokens``: what its cache holds once the running pass has ended. ``next_token``: what it is fed first, the last
    token of its prompt.
    """

    tokens: list[int]
    next_token: int
    sampler: Sampler = greedy_sampler
    processors: Sequence[LogitsProcessor] = ()
    # Where its tokens' log-probabilities are noted; None: nobody wants them.
    logprobs: OutputLogprobs | None = None
    # What the processors get: the tokens so far, on the device.
    context: TokenBuffer = field(default_factory=TokenBuffer)
    # Whether the token that was fed last is part of the output.
    has_begun: bool = False


class Rows:
    """All running sequences of a model."""

    def __init__(self, model: Any, *, alone: bool = False, quantization: Quantization | None = None) -> None:
        """``alone``: the model's caches can't be rows, so there is at most one sequence."""
        self._model = model
        self._alone = alone
        self._quantization = quantization
        # By whether the caches are quantized, and by length.
        self._banks: dict[tuple[bool, int], _Bank] = {}
        self._n_steps = 0

    def __len__(self) -> int:
        return sum(len(bank.rows) for bank in self._banks.values())

    @property
    def nbytes(self) -> int:
        """The bytes of the running sequences' caches."""
        return sum(bank.cache.nbytes for bank in self._banks.values())

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
        """Run a pass of each bank, and return the tokens that the passes before it drew.

        A sequence that just joined has none yet. A sequence goes on until it is removed.
        """
        with mx.stream(generation_stream):
            self._move_grown()
            self._n_steps += 1
            if self._n_steps % _CLEAR_EVERY == 0:
                mx.clear_cache()
            return [drawn for bank in self._banks.values() for drawn in bank.step()]

    def _join(self, row: Row, cache: list[Any], drawn: mx.array) -> None:
        if self._quantization is not None:
            self._quantization.apply(cache)
        key = self._key(row, any(map(is_quantized, leaves(cache))))
        if key not in self._banks:
            self._banks[key] = _Bank(self._model, LoneCache() if self._alone else BatchCache(cache))
        self._banks[key].join(row, cache, drawn)

    def _leave(self, row: Row) -> tuple[list[Any], mx.array]:
        bank = self._bank_with(row)
        left = bank.leave(row)
        if not bank.rows:
            self._banks = {key: other for key, other in self._banks.items() if other is not bank}
        return left

    def _move_grown(self) -> None:
        """Move sequences that have become too long for their banks, or that are to be quantized now."""
        start = self._quantization.start if self._quantization is not None else math.inf
        for key, bank in list(self._banks.items()):
            for row in [row for row in bank.rows if self._key(row, key[0] or len(row.tokens) >= start) != key]:
                self._join(row, *self._leave(row))

    def _key(self, row: Row, quantized: bool) -> tuple[bool, int]:
        return quantized, 0 if self._alone else bank_of(len(row.tokens) + 1)

    def _bank_with(self, row: Row) -> _Bank:
        return next(bank for bank in self._banks.values() if row in bank.rows)


class _Bank:
    """Sequences that the model runs in one pass."""

    def __init__(self, model: Any, cache: BatchCache | LoneCache) -> None:
        self._model = model
        self.cache = cache
        self.rows: list[Row] = []
        # The next input of each row, shape (rows,).
        self._drawn = mx.array([], mx.uint32)

    def join(self, row: Row, cache: list[Any], drawn: mx.array) -> None:
        """Add a row whose next input is ``drawn``, shape (1,)."""
        self._wait()
        self.cache.join(cache, len(row.tokens))
        self.rows.append(row)
        self._drawn = mx.concatenate([self._drawn, drawn])

    def leave(self, row: Row) -> tuple[list[Any], mx.array]:
        """Remove a row. Returns its cache and its next input, shape (1,)."""
        self._wait()
        index, last = self.rows.index(row), len(self.rows) - 1
        kept = self.cache.copy(index)
        self.cache.leave(index)
        drawn = self._drawn[index : index + 1]
        self._drawn = self._drawn[mx.array([last if i == index else i for i in range(last)], mx.int32)]
        self.rows[index] = self.rows[last]
        self.rows.pop()
        return kept, drawn

    def step(self) -> list[tuple[Row, int]]:
        """Start a pass with the tokens that were drawn last, then read and return these tokens."""
        fed = self._drawn
        self.cache.begin(1)
        logits = self._model(fed[:, None], cache=self.cache.layers)[:, -1, :]
        self.cache.advance([1] * len(self.rows))
        self._drawn = self._draw(logits, fed)
        contexts = [row.context.state for row in self.rows if row.processors]
        mx.async_eval(self._drawn, contexts)  # type: ignore[no-untyped-call]
        tokens: list[int] = fed.tolist()  # type: ignore[assignment]
        out = []
        for row, token in zip(self.rows, tokens, strict=True):
            row.tokens.append(token)
            if row.has_begun:
                out.append((row, token))
            row.has_begun = True
        return out

    def _wait(self) -> None:
        """Wait for the running pass, because a write to an array that it is reading would copy the whole array."""
        mx.eval(self._drawn)

    def _draw(self, logits: mx.array, fed: mx.array) -> mx.array:
        """The next token of each row, shape (rows,), from its logits, shape (rows, vocab)."""
        # The model's own values, before a processor changes them.
        note_rows(logits, [row.logprobs for row in self.rows])
        if any(row.processors for row in self.rows):
            each = [_processed(row, logits[i : i + 1], fed[i : i + 1]) for i, row in enumerate(self.rows)]
            logits = mx.concatenate(each)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        # Rows with equal settings have the same sampler, and are sampled in one call.
        alike: dict[int, list[int]] = {}
        for i, row in enumerate(self.rows):
            alike.setdefault(id(row.sampler), []).append(i)
        if len(alike) == 1:
            only: mx.array = self.rows[0].sampler(logprobs)
            return only
        groups = list(alike.values())
        drawn = mx.concatenate([self.rows[group[0]].sampler(logprobs[mx.array(group)]) for group in groups])
        order = [i for group in groups for i in group]
        return drawn[mx.array(sorted(range(len(order)), key=order.__getitem__))]


def _processed(row: Row, logits: mx.array, fed: mx.array) -> mx.array:
    if row.processors:
        context = row.context.update_and_fetch(fed)
        for processor in row.processors:
            logits = processor(context, logits)
    return logits
