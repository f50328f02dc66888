"""One job at a time with a draft model, behind the Backend protocol.

The prompt is prefilled here, in chunks as short as a batch's. So a job can be cancelled during its prompt, and other
models' streams continue. mlx-lm's generator then starts from its last token. Worker thread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.backend import StepPlan, is_last
from mlx_serve.engine.cache.checkpoints import Trail
from mlx_serve.engine.cache.loading import Loading
from mlx_serve.engine.cache.prefix_tree import Ids, as_ids
from mlx_serve.engine.cache.size import bytes_of
from mlx_serve.engine.generate.batch import BatchOptions
from mlx_serve.engine.generate.embedding import Embedder, Embedding
from mlx_serve.engine.generate.loaded import LoadedBackend
from mlx_serve.engine.generate.prefill import prefill
from mlx_serve.engine.generate.prefill_budget import PrefillBudget
from mlx_serve.engine.generate.sampling import NotedLogprobs
from mlx_serve.engine.generate.scoring import Scoring
from mlx_serve.engine.generate.token_choice import Loaded, TokenChoice, make_choice
from mlx_serve.engine.generate.trial import refusal
from mlx_serve.engine.load_errors import LoadError
from mlx_serve.values import Event, Failed, Job, Started


class SingleBackend(LoadedBackend):
    """Runs one job from its prompt to its end before it takes the next one.

    Raises LoadError when the models' caches can't do what drafts and a quantized cache ask of them.
    """

    capacity = 1

    def __init__(self, loaded: Loaded, options: BatchOptions) -> None:
        super().__init__(loaded)
        assert loaded.draft_model is not None
        fault = refusal(loaded.model, loaded.draft_model, loaded.quantization, computes=False)
        if fault:
            raise LoadError(fault)
        self._budget = PrefillBudget(options.prefill_step_size)
        self._embedder = Embedder(loaded)
        # At most one of the two is set.
        self._running: _Running | None = None
        self._embedding: Embedding | None = None
        self._paused: dict[Job, _Running] = {}

    @property
    def n_decoding(self) -> int:
        """1 when the prompt of the job is done."""
        return int(self._running is not None and self._running.generation is not None)

    def kv_bytes(self, tokens: Mapping[Job, int]) -> int:
        """The sum over the jobs, although only one of them runs at a time."""
        return sum(self._kv_bytes(job, n_tokens) for job, n_tokens in tokens.items())

    def insert(self, job: Job) -> None:
        """Prepare the job. Raises ApiError 400."""
        if job.inputs is not None:
            self._embedding = self._embedder.start(job)
            return
        running = self._paused.pop(job, None)
        if running is None:
            choice = make_choice(job, self._loaded)
            scoring = Scoring(choice, self._loaded.model) if job.sampling.prompt_logprobs is not None else None
            running = _Running(choice, list(job.prompt.tokens), self.ids_of(job), scoring)
        else:
            self.let_go(job)
        self._running = running
        if running.scoring is None:
            prefixes = self._loaded.prefix_cache
            prefixes.pin(job, running.ids, job.scope)
            place = prefixes.place(running.ids, job.scope)
            running.loading = prefixes.load(running.ids, job.scope, prefixes.covers(place), self._budget.prefill_s)
            prefixes.leave(place)

    def remove(self, jobs: Collection[Job]) -> None:
        """Drop jobs that run or are paused. What they have computed is kept: their clients may ask again."""
        self.forget(self._paused, jobs)
        self._take_out(jobs)

    def _take_out(self, jobs: Collection[Job], *, is_pause: bool = False) -> None:
        if self._embedding is not None and self._embedding.job in jobs:
            self._embedding = None
        running = self._running
        if running is not None and running.choice.job in jobs:
            self._end(running)
            # While the job decodes, the two models' caches differ in length.
            if running.cache and running.generation is None:
                ids = as_ids(running.tokens[: running.n_done])
                self._loaded.prefix_cache.store(
                    ids,
                    running.cache,
                    running.choice.job.scope,
                    n_prompt=len(running.choice.job.prompt.tokens),
                    checkpoints=running.trail.kept,
                    paused=running.choice.job if is_pause else None,
                )

    def pause(self, jobs: Collection[Job]) -> Sequence[tuple[Job, Event]]:
        """Drop the job if it is the running one, and keep what it needs to go on. Scoring begins again.

        mlx-lm's generators draw a token ahead and do not give it out. It is drawn again from the last token on, so a
        cache that cannot be trimmed is computed again.
        """
        running = self._running
        if running is not None and running.choice.job in jobs:
            self._take_out(jobs, is_pause=True)
            scoring = None if running.scoring is None else Scoring(running.choice, self._loaded.model)
            paused = _Running(running.choice, running.tokens, as_ids(running.tokens), scoring)
            paused.is_announced = running.is_announced
            self._paused[running.choice.job] = paused
            self.hold(running.choice.job, paused.ids)
        return []

    def plan_step(self, gap_s: float) -> StepPlan:
        return StepPlan(self._budget.tokens(gap_s))

    def run_step(self, plan: StepPlan) -> Sequence[tuple[Job, Event]]:
        n_tokens = plan.n_tokens
        if self._embedding is not None:
            return self._embed(self._embedding, n_tokens)
        running = self._running
        assert running is not None
        events: list[tuple[Job, Event]] = []
        if running.loading is not None:
            if not running.loading.poll():
                return []
            running.loading = None
        if running.scoring is None and not running.cache:
            self._begin(running)
        if not running.is_announced:
            running.is_announced = True
            job = running.choice.job
            events.append((job, Started(job.index, running.n_done)))
        if running.scoring is not None:
            return events + self._score(running, running.scoring, n_tokens)
        if running.generation is None and running.n_left > 1:
            failed = self.attempt(running.choice.job, lambda: self._prefill(running, n_tokens))
            if failed is not None:
                self._end(running)
                events.append((running.choice.job, failed))
            return events
        return [*events, self._decode(running)]

    def late(self) -> list[Job]:
        """The job, if its grammar has used up its CPU time."""
        return [self._running.choice.job] if self._running is not None and self._running.choice.is_late else []

    def give_up(self, jobs: Collection[Job]) -> None:
        """Fail the grammar of the job, if it is one of these."""
        if self._running is not None and self._running.choice.job in jobs:
            assert self._running.choice.constraint is not None
            self._running.choice.constraint.give_up()

    def wait_for_disk(self, timeout_s: float) -> None:
        if self._running is not None and self._running.loading is not None:
            self._running.loading.wait(timeout_s)

    def close(self) -> None:
        """Nothing is held between jobs."""
        self._paused.clear()
        if self._running is not None and self._running.loading is not None:
            self._running.loading.cancel()
        self._running = None
        self._embedding = None

    def _kv_bytes(self, job: Job, n_tokens: int) -> int:
        size, quantization = self._loaded.kv_size, self._loaded.quantization
        # The cache of an embedding job is not quantized, because it is dropped after each input.
        return bytes_of(size, n_tokens, quantization if job.inputs is None else None)

    def _begin(self, running: _Running) -> None:
        """Give a prompt its cache, with the prefix that it can reuse."""
        job = running.choice.job
        cache, running.n_done, kept = self._loaded.prefix_cache.fetch(running.ids, job.scope)
        self._loaded.prefix_cache.unpin(job)
        if cache is None:
            cache = make_prompt_cache(self._loaded.model) + make_prompt_cache(self._loaded.draft_model)
        running.cache, running.trail = cache, Trail(kept=kept)
        self.plan_stops(running.trail, running.ids, job.scope, running.n_done, cache)

    def _end(self, running: _Running) -> None:
        if running.loading is not None:
            running.loading.cancel()
        self._loaded.prefix_cache.unpin(running.choice.job)
        if running.generation is not None:
            running.generation.close()  # type: ignore[attr-defined]
        self._running = None

    def _score(self, running: _Running, scoring: Scoring, n_tokens: int) -> list[tuple[Job, Event]]:
        job = running.choice.job
        n_scored = self.attempt(job, lambda: scoring.step(n_tokens))
        if isinstance(n_scored, Failed):
            self._end(running)
            return [(job, n_scored)]
        if n_scored and scoring.n_left:
            return []
        running.scoring = None
        # The draft model has not processed the prompt yet.
        self._begin(running)
        event = scoring.event()
        if event.is_last:
            self._end(running)
        return [(job, event)]

    def _embed(self, embedding: Embedding, n_tokens: int) -> list[tuple[Job, Event]]:
        started_s = time.perf_counter()
        events = self.attempt(embedding.job, lambda: embedding.step(n_tokens))
        if isinstance(events, Failed):
            self._embedding = None
            return [(embedding.job, events)]
        if embedding.n_taken == n_tokens:
            self._budget.note(n_tokens, time.perf_counter() - started_s)
        if any(map(is_last, events)):
            self._embedding = None
        return [(embedding.job, event) for event in events]

    def _prefill(self, running: _Running, n_tokens: int) -> None:
        started_s = time.perf_counter()
        n = min(running.trail.end(running.n_done, n_tokens) - running.n_done, running.n_left - 1)
        chunk = running.tokens[running.n_done : running.n_done + n]
        for model, cache in self._models(running.cache):
            prefill(model, cache, chunk)
        if self._loaded.quantization is not None:
            self._loaded.quantization.apply(running.cache)
        running.n_done += n
        running.trail.reached(running.cache, running.n_done)
        running.choice.job.n_prefilled = running.n_done
        self._budget.note(n, time.perf_counter() - started_s)
        if running.n_left == 1:
            # After this point the two models' caches have different lengths.
            kept = copy.deepcopy(running.cache)
            self._loaded.prefix_cache.store(as_ids(running.tokens[:-1]), kept, running.choice.job.scope)

    def _models(self, cache: list[Any]) -> list[tuple[Any, list[Any]]]:
        n = len(self._loaded.model.layers)
        return [(self._loaded.model, cache[:n]), (self._loaded.draft_model, cache[n:])]

    def _decode(self, running: _Running) -> tuple[Job, Event]:
        if running.generation is None:
            running.generation = self._generate(running)
        job = running.choice.job
        token = next(running.generation)
        running.tokens.append(token)
        # mlx-lm has run the token through the model to draw the next one.
        running.n_done = len(running.tokens)
        finish = self._finish(running, token)
        event = running.choice.event(token, finish)
        if isinstance(event, Failed) or finish is not None:
            self.remove([job])
        return job, event

    def _finish(self, running: _Running, token: int) -> Literal["stop", "length"] | None:
        if token in self._loaded.eos_ids:
            return "stop"
        job = running.choice.job
        n_output = len(running.tokens) - len(job.prompt.tokens)
        return "length" if n_output >= job.sampling.max_tokens else None

    def _generate(self, running: _Running) -> Iterator[int]:
        sampling = running.choice.job.sampling
        # Without the type, an empty prefix (a prompt of one token) would be an array of floats.
        prompt, seen = mx.array(running.tokens[-1:]), mx.array(running.tokens[:-1], mx.int32)
        choice = running.choice
        noting = NotedLogprobs(choice.logprobs, len(choice.job.prompt.tokens)) if choice.logprobs is not None else None
        processors = [*([noting] if noting is not None else []), *choice.processors]
        quantization = self._loaded.quantization
        for token, *_ in speculative_generate_step(
            prompt,
            self._loaded.model,
            self._loaded.draft_model,
            max_tokens=sampling.max_tokens - choice.n_output,
            sampler=running.choice.sampler,
            logits_processors=[_Behind(seen, processor) for processor in processors],
            prompt_cache=running.cache,
            num_draft_tokens=sampling.n_draft_tokens,
            **({} if quantization is None else quantization.for_mlx_lm()),
        ):
            yield int(token)


@dataclass(slots=True)
class _Running:
    """The running job. ``cache`` holds ``n_done`` of its ``tokens`` (the prompt and the output so far).

    ``ids``: its prompt, and the output before a pause.
    """

    choice: TokenChoice
    tokens: list[int]
    ids: Ids
    scoring: Scoring | None = None
    loading: Loading | None = None
    cache: list[Any] = field(default_factory=list)
    n_done: int = 0
    trail: Trail = field(default_factory=Trail)
    generation: Iterator[int] | None = None
    is_announced: bool = False

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_done


@dataclass(slots=True)
class _Behind:
    """Wraps a logits processor: adds the prefilled tokens to the context that mlx-lm passes to it."""

    seen: mx.array
    processor: Any = field(repr=False)

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        masked: mx.array = self.processor(mx.concatenate([self.seen, context]), logits)
        return masked
