"""Sequences of similar lengths that decode together: the model runs them in one pass. Worker thread.

The next pass starts before the tokens of the last one are read, so Python's work overlaps with the device's. So a bank
is always one token ahead. A pass with drafts needs the tokens first, and adds several of them to a row instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import Sampler, greedy_sampler

from mlx_serve.engine.cache.batch_cache import BatchCache
from mlx_serve.engine.cache.lone import LoneCache
from mlx_serve.engine.generate.draft_model import DraftRows
from mlx_serve.engine.generate.logprobs import note_rows
from mlx_serve.engine.generate.row import Row


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """What a step with drafts gave each row, its longest draft, the drafted tokens of all rows, and the right ones."""

    out: list[tuple[Row, list[int]]]
    n_longest: int
    n_drafted: int
    n_accepted: int


class Bank:
    """Sequences that the model runs in one pass."""

    def __init__(
        self,
        model: Any,
        cache: BatchCache | LoneCache,
        drafter: DraftRows | None = None,
        agree: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        """``drafter``: the draft model's rows, whose layers come behind the model's in a sequence's cache.

        ``agree``: makes the drawn tokens those of rank 0, on all ranks.
        """
        self._model = model
        self._agree = agree if agree is not None else lambda drawn: drawn
        self._cache = cache
        self._drafter = drafter
        self.rows: list[Row] = []
        # The next input of each row, shape (rows,).
        self._drawn = mx.array([], mx.uint32)

    @property
    def spare_bytes(self) -> int:
        """The bytes of free rows."""
        return sum(part.spare_bytes for part in self._parts)

    @property
    def can_cut_back(self) -> bool:
        """Whether tokens can be dropped again, as wrong drafts must be."""
        return all(part.can_cut_back for part in self._parts)

    @property
    def drafting(self) -> list[Row]:
        """The rows that something can propose drafts for."""
        if not self.can_cut_back:
            return []
        has_model = self._drafter is not None
        return [row for row in self.rows if row.max_drafts and (has_model or row.lookup is not None)]

    @property
    def _parts(self) -> list[BatchCache | LoneCache]:
        return [self._cache] if self._drafter is None else [self._cache, self._drafter.cache]

    def join(self, row: Row, cache: list[Any], drawn: mx.array, max_spare: float) -> None:
        """Add a row whose next input is ``drawn``, shape (1,). At most ``max_spare`` bytes are added for other rows."""
        self.wait()
        n = len(cache) if self._drafter is None else len(self._cache.layers)
        for part, layers in zip(self._parts, (cache[:n], cache[n:]), strict=False):
            n_spare = part.spare_bytes
            part.join(layers, len(row.tokens), max_spare)
            max_spare -= part.spare_bytes - n_spare
        self.rows.append(row)
        self._drawn = mx.concatenate([self._drawn, drawn])

    def leave(self, row: Row, max_spare: float) -> tuple[list[Any], mx.array]:
        """Remove a row. Returns its cache and its next input, shape (1,). Free rows may keep ``max_spare`` bytes."""
        self.wait()
        index, last = self.rows.index(row), len(self.rows) - 1
        kept = self._cache.leave(index, max_spare)
        if self._drafter is not None:
            kept += self._drafter.leave(index, row.tokens, max_spare - self._cache.spare_bytes)
        drawn = self._drawn[index : index + 1]
        self._drawn = self._drawn[mx.array([last if i == index else i for i in range(last)], mx.int32)]
        self.rows[index] = self.rows[last]
        self.rows.pop()
        return kept, drawn

    def copy(self, row: Row, n_tokens: int | None = None) -> list[Any]:
        """A copy of a row's cache, or of its first ``n_tokens``. Raises ValueError if it can't be cut back."""
        index = self.rows.index(row)
        cache = self._cache.copy(index, n_tokens)
        return cache if self._drafter is None else cache + self._drafter.copy(index, row.tokens[:n_tokens])

    def step(self) -> list[tuple[Row, list[int]]]:
        """Start a pass with the tokens that were drawn last, then read and return these tokens."""
        if self._drafter is not None:
            self._drafter.follow(self.rows)
        fed = self._drawn
        contexts = self._contexts(fed)
        self._cache.begin(1)
        logits = self._model(fed[:, None], cache=self._cache.layers)[:, -1, :]
        self._cache.advance([1] * len(self.rows))
        self._drawn = self._agree(self._draw(logits, contexts))
        mx.async_eval(self._drawn, [row.context.state for row in self.rows if row.processors])  # type: ignore[no-untyped-call]
        tokens: list[int] = fed.tolist()  # type: ignore[assignment]
        out = []
        for row, token in zip(self.rows, tokens, strict=True):
            row.learn(token)
            out.append((row, row.take([token])))
            row.guess_within_grammar()
        return out

    def step_with_drafts(self, n_most: int) -> DraftedStep:
        """Read the tokens that were drawn last, and run a pass with them and at most ``n_most`` drafts of each row."""
        tokens: list[int] = self._drawn.tolist()  # type: ignore[assignment]
        if self._drafter is not None:
            self._drafter.follow(self.rows)
        drafts = self._propose(
            tokens, [row.n_wanted(token, n_most) for row, token in zip(self.rows, tokens, strict=True)]
        )
        drawn = self._check(tokens, drafts)
        right = [
            draft[: _n_right(draft, behind, row.ends)]
            for row, draft, behind in zip(self.rows, drafts, drawn, strict=True)
        ]
        following = [behind[len(kept)] for kept, behind in zip(right, drawn, strict=True)]
        out = []
        for row, token, draft, kept, after in zip(self.rows, tokens, drafts, right, following, strict=True):
            out.append((row, row.take([token, *kept])))
            row.note_checked(len(draft), kept, n_drawn=len(drawn[0]))
            row.learn(after)
            row.guess_within_grammar(after)
        self._cache.advance([1 + len(kept) for kept in right])
        if self._drafter is not None:
            self._drafter.settle(self.rows, [[*kept, after] for kept, after in zip(right, following, strict=True)])
        self._drawn = mx.array(following, mx.uint32)
        return DraftedStep(out, max(map(len, drafts)), sum(map(len, drafts)), sum(map(len, right)))

    def _check(self, tokens: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Run a pass with a token and a draft of each row. Returns what is drawn behind each of them, for each row.

        All rows have as many tokens in the pass as the longest. What is drawn behind the end of a draft says nothing.
        """
        n = max(map(len, drafts))
        fed = mx.array(
            [[token, *draft] + [token] * (n - len(draft)) for token, draft in zip(tokens, drafts, strict=True)]
        )
        contexts = self._contexts(fed[:, 0])
        self._cache.begin(1 + n)
        logits = self._model(fed, cache=self._cache.layers)
        drawn = []
        for i in range(1 + n):
            seen = [
                mx.concatenate([context, fed[j, 1 : 1 + i]]) if context is not None and i <= len(drafts[j]) else None
                for j, context in enumerate(contexts)
            ]
            drawn.append(self._draw(logits[:, i, :], seen))
        return self._agree(mx.stack(drawn, axis=1)).tolist()  # type: ignore[return-value]

    def _propose(self, tokens: Sequence[int], n_wanted: Sequence[int]) -> list[list[int]]:
        """For each row at most so many tokens that may follow ``tokens``, which each row has drawn last."""
        for row, token in zip(self.rows, tokens, strict=True):
            row.learn(token)
        drafts = [row.look_up(n) for row, n in zip(self.rows, n_wanted, strict=True)]
        n_asked = [0 if row.was_looked_up else n for row, n in zip(self.rows, n_wanted, strict=True)]
        if self._drafter is not None and any(n_asked):
            proposed = self._drafter.propose(self.rows, tokens, max(n_asked))
            drafts = [[*draft, *more[:n]] for draft, more, n in zip(drafts, proposed, n_asked, strict=True)]
        return [
            row.within_grammar(token, draft, n)
            for row, token, draft, n in zip(self.rows, tokens, drafts, n_wanted, strict=True)
        ]

    def _contexts(self, fed: mx.array) -> list[mx.array | None]:
        """What the processors of each row get when these tokens are fed, shape (rows,)."""
        return [
            row.context.update_and_fetch(fed[i : i + 1]) if row.processors else None for i, row in enumerate(self.rows)
        ]

    def give_up_spare(self) -> None:
        """Give up the memory of free rows."""
        self.wait()
        for part in self._parts:
            part.give_up_spare()

    def wait(self) -> None:
        """Wait for the running pass. A write to an array that it is reading would copy the whole array."""
        mx.eval(self._drawn)
        if self._drafter is not None:
            self._drafter.wait()

    def _draw(self, logits: mx.array, contexts: Sequence[mx.array | None]) -> mx.array:
        """The next token of each row, shape (rows,), from its logits, shape (rows, vocab), and its tokens so far."""
        # The model's own values, before a processor changes them.
        note_rows(logits, [row.logprobs for row in self.rows])
        if any(context is not None for context in contexts):
            each = [_processed(row, logits[i : i + 1], contexts[i]) for i, row in enumerate(self.rows)]
            logits = mx.concatenate(each)
        # Rows with equal settings have the same sampler, and are sampled in one call.
        alike: dict[int, list[int]] = {}
        for i, row in enumerate(self.rows):
            alike.setdefault(id(row.sampler), []).append(i)
        if len(alike) == 1:
            return _sampled(self.rows[0].sampler, logits)
        groups = list(alike.values())
        drawn = mx.concatenate([_sampled(self.rows[group[0]].sampler, logits[mx.array(group)]) for group in groups])
        order = [i for group in groups for i in group]
        return drawn[mx.array(sorted(range(len(order)), key=order.__getitem__))]


def _sampled(sampler: Sampler, logits: mx.array) -> mx.array:
    """The next token of each row, shape (rows,), from its logits, shape (rows, vocab)."""
    if sampler is not greedy_sampler:
        # The likeliest token needs no normalization, which takes a tenth of a pass with drafts on a CPU.
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn: mx.array = sampler(logits)
    return drawn


def _processed(row: Row, logits: mx.array, context: mx.array | None) -> mx.array:
    if context is not None:
        for processor in row.processors:
            logits = processor(context, logits)
    return logits


def _n_right(draft: Sequence[int], drawn: Sequence[int], ends: Collection[int]) -> int:
    """How many drafted tokens were drawn too, up to one that ends the output."""
    for n, (guess, token) in enumerate(zip(draft, drawn, strict=False)):
        if guess != token:
            return n
        if token in ends:
            return n + 1
    return len(draft)
