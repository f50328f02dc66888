"""A sequence in the running batch: its tokens, how the next one is drawn, and what is drafted for it. Worker thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from mlx_serve.engine.generate.draft_model import Chance
from mlx_serve.engine.generate.drafts import Lookup, Restriction
from mlx_serve.engine.generate.logprobs import OutputLogprobs


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
    # Drafts: the most tokens to check at a time.
    max_drafts: int = 0
    # Where drafts are looked up, and whether the last one is from there.
    lookup: Lookup | None = None
    was_looked_up: bool = False
    # How likely the draft model is right.
    guesses: Chance = field(default_factory=Chance)
    grammar: Restriction | None = None
    # The tokens that the output may still get, and those that end it.
    n_left: int = 0
    # The most tokens that its cache may hold before it moves to another bank.
    most_tokens: float = math.inf
    ends: frozenset[int] = frozenset()
    # Whether the token that was fed last is part of the output.
    has_begun: bool = False
    # Whether ``lookup`` has the next token to feed. It is made with ``next_token``.
    knows_next: bool = True
    # Steps that drafts have saved it (draft_length.py).
    credit: float = 0.0

    def n_wanted(self, token: int, n_most: int) -> int:
        """How many of ``n_most`` tokens to draft behind ``token``, which comes behind ``tokens``."""
        if self.has_begun and token in self.ends:
            return 0
        n_room = self.most_tokens - len(self.tokens) - 1
        return int(max(0, min(n_most, self.max_drafts, self.n_left - self.has_begun, n_room)))

    def within_grammar(self, token: int, draft: list[int], n_tokens: int) -> list[int]:
        """A draft of at most ``n_tokens`` behind ``token`` as the row's grammar has it."""
        if self.grammar is None or not n_tokens:
            return draft
        draft, behind = self.grammar.draft(self.tokens, token, draft, n_tokens)
        if self.grammar.has_ended:
            self.max_drafts = 0
        if self.lookup is not None and self.was_looked_up:
            self.lookup.change([*draft, *behind])
        return draft

    def guess_within_grammar(self, token: int | None = None) -> None:
        """Find out what the row's grammar forces behind ``token``; None: behind the fed tokens, in the running pass."""
        if self.grammar is not None and self.lookup is not None:
            self.lookup.force(self.grammar.guess(self.tokens, token))

    def expected(self, n_tokens: int) -> float:
        """How many of ``n_tokens`` drafted tokens will be right."""
        n = min(n_tokens, self.max_drafts)
        looked_up = self.lookup.expected(n, ahead=not self.knows_next) if self.lookup is not None else 0.0
        return max(looked_up, self.guesses.expected(n))

    def look_up(self, n_tokens: int) -> list[int]:
        """At most ``n_tokens`` that may come next, unless the draft model promises more."""
        promised = self.lookup.expected(n_tokens) if self.lookup is not None else -1.0
        self.was_looked_up = promised >= self.guesses.expected(n_tokens)
        return self.lookup.draft(n_tokens) if self.lookup is not None and self.was_looked_up and n_tokens else []

    def note_checked(self, n_draft: int, right: Sequence[int], n_drawn: int) -> None:
        """A draft of ``n_draft`` tokens began with the ``right`` ones. The pass drew ``n_drawn`` tokens for the row."""
        if self.logprobs is not None:
            self.logprobs.take_back(n_drawn - 1 - len(right))
        if self.processors and right:
            self.context.update_and_fetch(mx.array(list(right)))
        if self.lookup is not None:
            if self.was_looked_up:
                self.lookup.note_checked(n_draft, len(right))
            self.lookup.add(*right)

    def learn(self, token: int) -> None:
        """Note the token that will be fed next."""
        if self.lookup is not None and not self.knows_next:
            self.lookup.add(token)
        self.knows_next = True

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Append what was fed to the model. Returns the part of it that is output."""
        self.tokens += tokens
        output = list(tokens) if self.has_begun else list(tokens[1:])
        self.has_begun, self.knows_next = True, False
        self.n_left -= len(output)
        return output
