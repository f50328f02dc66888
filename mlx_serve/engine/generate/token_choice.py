"""How one job's tokens are chosen, and how its events are made. Worker thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor

from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.cache.size import NO_KV, KvSize
from mlx_serve.engine.errors import is_fault
from mlx_serve.engine.generate.constraints import Constraint
from mlx_serve.engine.generate.drafts import Restriction
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.engine.generate.logprobs import OutputLogprobs
from mlx_serve.engine.generate.look_ahead import LookAhead
from mlx_serve.engine.generate.pooling import LAST_TOKEN, Pooling
from mlx_serve.engine.generate.prediction import Prediction
from mlx_serve.engine.generate.sampling import Seeded, make_processors, make_sampler
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.values import ApiError, Failed, Job, Sampling, TokenEvent, internal_error

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory. ``eos_ids`` end a sequence. XTC sampling never drops ``kept_by_xtc``.

    ``vocabulary`` is for grammars; None: grammars are not served. ``control_ids`` are the tokens that are not text;
    they begin and end the turns of a conversation. ``trimmable``: the caches of this model can always be trimmed.
    ``shares``: a sequence may use the cache of another one that runs.
    ``alone``: why its sequences can't run together; "": they can. ``undrafted``: why nothing is drafted for them; "":
    something may be. ``agree`` is set with several ranks: it makes drawn tokens those of rank 0.
    """

    model: Any
    vocab_size: int
    eos_ids: frozenset[int]
    kept_by_xtc: tuple[int, ...]
    prefix_cache: PrefixCache
    draft_model: Any = None
    vocabulary: Vocabulary | None = None
    control_ids: frozenset[int] = frozenset()
    kv_size: KvSize = NO_KV
    quantization: Quantization | None = None
    trimmable: bool = True
    shares: bool = True
    alone: str = ""
    undrafted: str = ""
    agree: Callable[[mx.array], mx.array] | None = None
    pooling: Pooling = LAST_TOKEN


@dataclass(slots=True)
class TokenChoice:
    """A job's sampler, its logits processors, what they say about each token, and the tokens that end the output."""

    job: Job
    ends: frozenset[int]
    sampler: Any
    processors: list[Any]
    constraint: Constraint | None
    logprobs: OutputLogprobs | None
    prediction: Prediction | None = None
    look_ahead: Restriction | None = None
    n_output: int = 0
    # The fault of a processor that raised. It fails this job alone, not the batch.
    fault: ApiError | None = None

    @property
    def is_late(self) -> bool:
        """Whether the job's grammar has used up its CPU time."""
        return self.constraint is not None and self.constraint.is_late

    def guarded(self, call: Callable[[], T], otherwise: T) -> T:
        """The result of a call whose exception fails this job alone: it is made within a step of the whole batch."""
        if self.fault is not None:
            return otherwise
        try:
            return call()
        except BaseException as error:  # an error of the grammar's library fails this job alone
            if not is_fault(error):
                raise
            log.exception("a logits processor failed")
            self.fault = internal_error()
            return otherwise

    def event(self, token: int) -> TokenEvent | Failed:
        """The event of the output's next token. The batch is a token ahead, so a fault may be early too."""
        position = self.n_output
        if self.prediction is not None:
            self.job.n_accepted, self.job.n_rejected = self.prediction.n_accepted, self.prediction.n_rejected
        self.n_output += 1
        if self.fault is not None:
            return Failed(self.job.index, self.fault)
        if self.constraint is not None and self.constraint.fault and self.constraint.fault_at <= position:
            return Failed(self.job.index, _grammar_failed(self.constraint.fault))
        is_full = self.n_output >= self.job.sampling.max_tokens
        finish: Literal["stop", "length"] | None = "stop" if token in self.ends else "length" if is_full else None
        if self.logprobs is None:
            return TokenEvent(self.job.index, token, finish)
        return TokenEvent(self.job.index, token, finish, *self.logprobs.take(position, token))


def make_choice(job: Job, loaded: Loaded) -> TokenChoice:
    """Raises ApiError 400."""
    _check(job, loaded.vocab_size)
    sampling = job.sampling
    constraint = _constraint(sampling, loaded)
    logprobs = OutputLogprobs(sampling.top_logprobs) if sampling.top_logprobs is not None else None
    sampler = make_sampler(sampling, vocab_size=loaded.vocab_size, kept_by_xtc=loaded.kept_by_xtc)
    processors = make_processors(sampling, constraint)
    if isinstance(sampler, Seeded):
        processors.append(sampler.follow)
    prediction = Prediction(job.prediction) if job.prediction else None
    choice = TokenChoice(job, loaded.eos_ids, sampler, [], constraint, logprobs, prediction)
    choice.processors = [_Guarded(processor, choice) for processor in processors]
    if constraint is not None and sampling.grammar is not None and loaded.vocabulary is not None:
        texts = loaded.vocabulary.tokens().texts
        choice.look_ahead = _GuardedLookAhead(LookAhead(constraint, texts, len(job.prompt.tokens)), choice)
    return choice


@dataclass(slots=True)
class _Guarded:
    """Wraps a processor so that its exception fails one job."""

    processor: LogitsProcessor
    choice: TokenChoice = field(repr=False)

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        return self.choice.guarded(lambda: self.processor(context, logits), logits)


@dataclass(slots=True)
class _GuardedLookAhead:
    """Wraps a look-ahead so that its exception fails one job."""

    look_ahead: LookAhead
    choice: TokenChoice = field(repr=False)

    @property
    def has_ended(self) -> bool:
        return self.look_ahead.has_ended

    def draft(
        self, tokens: Sequence[int], last: int, proposed: Sequence[int], n_tokens: int
    ) -> tuple[list[int], list[int]]:
        nothing: tuple[list[int], list[int]] = ([], [])
        return self.choice.guarded(lambda: self.look_ahead.draft(tokens, last, proposed, n_tokens), nothing)

    def guess(self, tokens: Sequence[int], last: int | None) -> list[int]:
        return self.choice.guarded(lambda: self.look_ahead.guess(tokens, last), [])


def _constraint(sampling: Sampling, loaded: Loaded) -> Constraint | None:
    # ``ignore_eos`` holds for the whole output, and covers only the model's own end tokens.
    puts_off = sampling.min_tokens > 0 and not sampling.ignore_eos
    ends = loaded.eos_ids.union(sampling.stop_token_ids) if puts_off else loaded.eos_ids
    if sampling.grammar is not None:
        if loaded.vocabulary is None:
            raise ApiError(400, "This model does not serve grammars.")
        matcher = loaded.vocabulary.matcher(sampling.grammar)
        return Constraint(sampling, ends, matcher, judges_time=loaded.agree is None)
    return Constraint(sampling, ends) if sampling.min_tokens or sampling.ignore_eos else None


def _grammar_failed(fault: str) -> ApiError:
    return ApiError(400, f"The grammar became too complex while this answer was generated: {fault}")


def _check(job: Job, vocab_size: int) -> None:
    """The engine's own check of values from a client. Raises ApiError 400."""
    if not job.prompt.tokens:
        raise ApiError(400, "The prompt is empty.", param="prompt")
    check_ids(job.prompt.tokens, vocab_size, "prompt")
    check_ids(job.prediction, vocab_size, "prediction")
    check_ids([token for token, _ in job.sampling.logit_bias], vocab_size, "logit_bias")
    check_ids(job.sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_ids(job.sampling.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    budget = job.sampling.reasoning_budget
    check_ids((*budget.closing, *budget.not_next) if budget is not None else (), vocab_size, "reasoning")
