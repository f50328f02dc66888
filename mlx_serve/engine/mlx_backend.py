"""The two ways mlx-lm generates, behind the scheduler's Backend protocol. Lives on the worker thread.

``BatchBackend`` is continuous batching through mlx-lm's BatchGenerator. ``SingleBackend`` runs one job at a time, for
what cannot be batched: caches that do not merge, a quantized KV cache, speculative decoding. All that the project knows
of mlx-lm's generation API is in this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences, generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.core import ApiError, Failed, Job, Sampling, TokenEvent
from mlx_serve.engine.constraints import Constraint, Vocabulary
from mlx_serve.engine.prefix_cache import PrefixCache
from mlx_serve.engine.sampling import ModelRows, make_processors, make_sampler
from mlx_serve.engine.vocabulary import check_ids


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory. ``eos_ids`` end a sequence; ``kept_by_xtc`` are never dropped by XTC sampling.

    ``vocabulary`` is for grammars; None: they are not served.
    """

    model: Any
    vocab_size: int
    eos_ids: frozenset[int]
    kept_by_xtc: tuple[int, ...]
    prefix_cache: PrefixCache
    draft_model: Any = None
    vocabulary: Vocabulary | None = None


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of the running batch, as mlx_lm.server's flags of the same names have them."""

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048


@dataclass(frozen=True, slots=True)
class SingleOptions:
    """How a job that runs alone is prefilled, and how its KV cache is quantized."""

    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000


class BatchBackend:
    """Jobs join and leave the batch between any two steps."""

    def __init__(self, loaded: Loaded, options: BatchOptions) -> None:
        self.capacity = options.decode_concurrency
        self._loaded = loaded
        self._running: dict[int, _Choice] = {}
        self._stops = StopSequences([(token,) for token in sorted(loaded.eos_ids)])
        self._generator = BatchGenerator(
            loaded.model,
            completion_batch_size=options.decode_concurrency,
            prefill_batch_size=options.prompt_concurrency,
            prefill_step_size=options.prefill_step_size,
        )

    def insert(self, job: Job) -> int:
        """Queue the part of the prompt that no cache covers."""
        choice = _choice(job, self._loaded)
        tokens = list(job.prompt.tokens)
        cache, cached_tokens = self._loaded.prefix_cache.fetch(tokens)
        (uid,) = self._generator.insert(
            [tokens[cached_tokens:]],
            max_tokens=[job.sampling.max_tokens],
            caches=[cache],
            all_tokens=[tokens[:cached_tokens]],
            samplers=[choice.sampler],
            logits_processors=[choice.processors],
            stop_sequences=[self._stops],
        )
        self._running[uid] = choice
        return cached_tokens

    def remove(self, jobs: Collection[Job]) -> None:
        """Take jobs out of the batch."""
        uids = [uid for uid, choice in self._running.items() if choice.job in jobs]
        self._generator.remove(uids)
        for uid in uids:
            del self._running[uid]

    def step(self) -> Sequence[tuple[Job, TokenEvent | Failed]]:
        """Decode one token of each running sequence, then prefill a step of the new ones."""
        _, responses = self._generator.next()
        return [self._event(response) for response in responses]

    def close(self) -> None:
        """Restore what the generator set of the device."""
        self._generator.close()

    def _event(self, response: Any) -> tuple[Job, TokenEvent | Failed]:
        choice = self._running[response.uid]
        event = choice.event(response.token, response.finish_reason, response.logprobs)
        if response.finish_reason is not None:
            del self._running[response.uid]
            self._loaded.prefix_cache.store(response.all_tokens, response.prompt_cache)
        elif isinstance(event, Failed):
            self.remove([choice.job])
        return choice.job, event


class SingleBackend:
    """One job at a time."""

    capacity = 1

    def __init__(self, loaded: Loaded, options: SingleOptions) -> None:
        self._loaded = loaded
        self._options = options
        self._running: _Running | None = None

    def insert(self, job: Job) -> int:
        """Prepare the job; its prompt is prefilled in the first step."""
        choice = _choice(job, self._loaded)
        cache, cached_tokens = self._cache(job)
        generation = self._generate(choice, cache, cached_tokens)
        self._running = _Running(choice, cache, generation, list(job.prompt.tokens))
        return cached_tokens

    def remove(self, jobs: Collection[Job]) -> None:
        """Drop the job, if it is the one that runs."""
        if self._running is not None and self._running.choice.job in jobs:
            self._running.generation.close()  # type: ignore[attr-defined]
            self._running = None

    def step(self) -> Sequence[tuple[Job, TokenEvent | Failed]]:
        """The job's next token; nothing when it was cancelled while its prompt was prefilled."""
        running = self._running
        assert running is not None
        try:
            token, logprobs = next(running.generation)
        except _CancelledInPrefillError:
            return []
        running.tokens.append(token)
        finish = self._finish(running, token)
        event = running.choice.event(token, finish, logprobs)
        if isinstance(event, Failed) or finish is not None:
            self.remove([running.choice.job])
            if self._loaded.draft_model is None:
                self._loaded.prefix_cache.store(running.tokens, running.cache)
        return [(running.choice.job, event)]

    def close(self) -> None:
        """Nothing is held between jobs."""
        self._running = None

    def _cache(self, job: Job) -> tuple[list[Any], int]:
        # Not reused with a draft model: after its last token the two models' caches hold different lengths.
        if self._loaded.draft_model is not None:
            return make_prompt_cache(self._loaded.model) + make_prompt_cache(self._loaded.draft_model), 0
        cache, cached_tokens = self._loaded.prefix_cache.fetch(job.prompt.tokens)
        return cache or make_prompt_cache(self._loaded.model), cached_tokens

    def _finish(self, running: _Running, token: int) -> Literal["stop", "length"] | None:
        if token in self._loaded.eos_ids:
            return "stop"
        job = running.choice.job
        n_output = len(running.tokens) - len(job.prompt.tokens)
        return "length" if n_output >= job.sampling.max_tokens else None

    def _generate(self, choice: _Choice, cache: list[Any], cached_tokens: int) -> Iterator[tuple[int, mx.array]]:
        job = choice.job
        prompt = mx.array(job.prompt.tokens[cached_tokens:])
        options: dict[str, Any] = {
            "max_tokens": job.sampling.max_tokens,
            "sampler": choice.sampler,
            "logits_processors": choice.processors,
            "prompt_cache": cache,
            "prefill_step_size": self._options.prefill_step_size,
            "kv_bits": self._options.kv_bits,
            "kv_group_size": self._options.kv_group_size,
            "quantized_kv_start": self._options.quantized_kv_start,
        }
        if self._loaded.draft_model is not None:
            options["num_draft_tokens"] = job.sampling.n_draft_tokens
            for token, logprobs, _ in speculative_generate_step(
                prompt, self._loaded.model, self._loaded.draft_model, **options
            ):
                yield int(token), logprobs
            return
        options["prompt_progress_callback"] = _stop_when_cancelled(job)
        yield from generate_step(prompt, self._loaded.model, **options)


@dataclass(slots=True)
class _Running:
    choice: _Choice
    cache: list[Any]
    generation: Iterator[tuple[int, mx.array]]
    tokens: list[int]


class _CancelledInPrefillError(Exception):
    pass


def _stop_when_cancelled(job: Job) -> Any:
    # Called by generate_step after each chunk of the prompt: the only way out of a long prefill.
    def progress(_done: int, _total: int) -> None:
        if job.cancelled:
            raise _CancelledInPrefillError

    return progress


@dataclass(slots=True)
class _Choice:
    """How one job's tokens are chosen, and what its events are made from."""

    job: Job
    sampler: Any
    processors: list[Any]
    constraint: Constraint | None
    rows: ModelRows | None
    n_output: int = 0

    def event(self, token: int, finish: Any, logprobs: mx.array) -> TokenEvent | Failed:
        """What became of the output's next token. mlx-lm is a token ahead, and so may a fault be."""
        position = self.n_output
        self.n_output += 1
        if self.constraint is not None and self.constraint.fault and self.constraint.fault_at <= position:
            return Failed(self.job.index, _grammar_failed(self.constraint.fault))
        k = self.job.sampling.top_logprobs
        if k is None:
            return TokenEvent(self.job.index, token, finish)
        # Without processors, mlx-lm's are the model's own.
        own = self.rows.take(position) if self.rows is not None and self.processors else logprobs
        return TokenEvent(self.job.index, token, finish, float(own[token]), _top(own, k))


def _choice(job: Job, loaded: Loaded) -> _Choice:
    """Raises ApiError 400."""
    _check(job, loaded.vocab_size)
    sampling = job.sampling
    constraint = _constraint(sampling, loaded)
    rows = ModelRows() if sampling.top_logprobs is not None else None
    sampler = make_sampler(sampling, vocab_size=loaded.vocab_size, kept_by_xtc=loaded.kept_by_xtc)
    return _Choice(job, sampler, make_processors(sampling, constraint, rows), constraint, rows)


def _constraint(sampling: Sampling, loaded: Loaded) -> Constraint | None:
    if sampling.grammar is not None:
        if loaded.vocabulary is None:
            raise ApiError(400, "This model does not serve grammars.")
        return Constraint(sampling, loaded.eos_ids, loaded.vocabulary.matcher(sampling.grammar))
    return Constraint(sampling, loaded.eos_ids) if sampling.min_tokens or sampling.ignore_eos else None


def _grammar_failed(fault: str) -> ApiError:
    return ApiError(400, f"The grammar became too complex while this answer was generated: {fault}")


def _check(job: Job, vocab_size: int) -> None:
    """The last look at what comes from a client. Raises ApiError 400."""
    if not job.prompt.tokens:
        raise ApiError(400, "The prompt is empty.", param="prompt")
    check_ids(job.prompt.tokens, vocab_size, "prompt")
    check_ids([token for token, _ in job.sampling.logit_bias], vocab_size, "logit_bias")


def _top(logprobs: mx.array, k: int) -> tuple[tuple[int, float], ...]:
    """The k likeliest tokens of one row, falling. ``logprobs`` has shape (vocab,)."""
    if k == 0:
        return ()
    k = min(k, logprobs.shape[0])
    ids = mx.argpartition(-logprobs, kth=k - 1)[:k]
    values = logprobs[ids]
    order = mx.argsort(-values)
    return tuple(zip(ids[order].tolist(), values[order].tolist(), strict=True))  # type: ignore[arg-type]
