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

from mlx_serve.core import ApiError, Job, TokenEvent
from mlx_serve.engine.prefix_cache import PrefixCache
from mlx_serve.engine.sampling import make_processors, make_sampler
from mlx_serve.engine.vocabulary import check_ids


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory. ``eos_ids`` end a sequence; ``kept_by_xtc`` are never dropped by XTC sampling."""

    model: Any
    vocab_size: int
    eos_ids: frozenset[int]
    kept_by_xtc: tuple[int, ...]
    prefix_cache: PrefixCache
    draft_model: Any = None


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
        self._jobs: dict[int, Job] = {}
        self._stops = StopSequences([(token,) for token in sorted(loaded.eos_ids)])
        self._generator = BatchGenerator(
            loaded.model,
            completion_batch_size=options.decode_concurrency,
            prefill_batch_size=options.prompt_concurrency,
            prefill_step_size=options.prefill_step_size,
        )

    def insert(self, job: Job) -> int:
        """Queue the part of the prompt that no cache covers."""
        _check(job, self._loaded.vocab_size)
        tokens = list(job.prompt.tokens)
        cache, cached_tokens = self._loaded.prefix_cache.fetch(tokens)
        (uid,) = self._generator.insert(
            [tokens[cached_tokens:]],
            max_tokens=[job.sampling.max_tokens],
            caches=[cache],
            all_tokens=[tokens[:cached_tokens]],
            samplers=[_sampler(job, self._loaded)],
            logits_processors=[make_processors(job.sampling)],
            stop_sequences=[self._stops],
        )
        self._jobs[uid] = job
        return cached_tokens

    def remove(self, jobs: Collection[Job]) -> None:
        """Take jobs out of the batch."""
        uids = [uid for uid, job in self._jobs.items() if job in jobs]
        self._generator.remove(uids)
        for uid in uids:
            del self._jobs[uid]

    def step(self) -> Sequence[tuple[Job, TokenEvent]]:
        """Decode one token of each running sequence, then prefill a step of the new ones."""
        _, responses = self._generator.next()
        return [self._event(response) for response in responses]

    def close(self) -> None:
        """Restore what the generator set of the device."""
        self._generator.close()

    def _event(self, response: Any) -> tuple[Job, TokenEvent]:
        job = self._jobs[response.uid]
        if response.finish_reason is not None:
            del self._jobs[response.uid]
            self._loaded.prefix_cache.store(response.all_tokens, response.prompt_cache)
        return job, _token_event(job, response.token, response.finish_reason, response.logprobs)


class SingleBackend:
    """One job at a time."""

    capacity = 1

    def __init__(self, loaded: Loaded, options: SingleOptions) -> None:
        self._loaded = loaded
        self._options = options
        self._running: _Running | None = None

    def insert(self, job: Job) -> int:
        """Prepare the job; its prompt is prefilled in the first step."""
        _check(job, self._loaded.vocab_size)
        cache, cached_tokens = self._cache(job)
        self._running = _Running(job, cache, self._generate(job, cache, cached_tokens), list(job.prompt.tokens))
        return cached_tokens

    def remove(self, jobs: Collection[Job]) -> None:
        """Drop the job, if it is the one that runs."""
        if self._running is not None and self._running.job in jobs:
            self._running.generation.close()  # type: ignore[attr-defined]
            self._running = None

    def step(self) -> Sequence[tuple[Job, TokenEvent]]:
        """The job's next token; nothing when it was cancelled while its prompt was prefilled."""
        running = self._running
        assert running is not None
        try:
            token, logprobs = next(running.generation)
        except _CancelledInPrefillError:
            return []
        running.tokens.append(token)
        finish = self._finish(running, token)
        event = _token_event(running.job, token, finish, logprobs)
        if finish is not None:
            self.remove([running.job])
            if self._loaded.draft_model is None:
                self._loaded.prefix_cache.store(running.tokens, running.cache)
        return [(running.job, event)]

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
        n_output = len(running.tokens) - len(running.job.prompt.tokens)
        return "length" if n_output >= running.job.sampling.max_tokens else None

    def _generate(self, job: Job, cache: list[Any], cached_tokens: int) -> Iterator[tuple[int, mx.array]]:
        prompt = mx.array(job.prompt.tokens[cached_tokens:])
        options: dict[str, Any] = {
            "max_tokens": job.sampling.max_tokens,
            "sampler": _sampler(job, self._loaded),
            "logits_processors": make_processors(job.sampling),
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
    job: Job
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


def _sampler(job: Job, loaded: Loaded) -> Any:
    return make_sampler(job.sampling, vocab_size=loaded.vocab_size, kept_by_xtc=loaded.kept_by_xtc)


def _check(job: Job, vocab_size: int) -> None:
    """The last look at what comes from a client. Raises ApiError 400."""
    if not job.prompt.tokens:
        raise ApiError(400, "The prompt is empty.", param="prompt")
    check_ids(job.prompt.tokens, vocab_size, "prompt")
    check_ids([token for token, _ in job.sampling.logit_bias], vocab_size, "logit_bias")


def _token_event(job: Job, token: int, finish: Any, logprobs: mx.array) -> TokenEvent:
    k = job.sampling.top_logprobs
    if k is None:
        return TokenEvent(job.index, token, finish)
    return TokenEvent(job.index, token, finish, float(logprobs[token]), _top(logprobs, k))


def _top(logprobs: mx.array, k: int) -> tuple[tuple[int, float], ...]:
    """The k likeliest tokens of one row, falling. ``logprobs`` has shape (vocab,)."""
    if k == 0:
        return ()
    k = min(k, logprobs.shape[0])
    ids = mx.argpartition(-logprobs, kth=k - 1)[:k]
    values = logprobs[ids]
    order = mx.argsort(-values)
    return tuple(zip(ids[order].tolist(), values[order].tolist(), strict=True))  # type: ignore[arg-type]
