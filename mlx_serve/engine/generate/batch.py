"""Continuous batching, behind the Backend protocol: what a step does, and which jobs come, pause and leave.

    in line --insert--> prompt, prefilled in its own cache --> decoding, in a row --> kept prefix
      ^                                                              |
      +---------------- paused, kept prefix <---------- pause --------+

A job is pinned while it is in line (in_line.py). Once its prompt is prefilled (prompts.py), it joins the running batch
(rows.py) with this cache and the prompt's last token. Scoring and embedding jobs run beside. Worker thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_serve.engine.backend import NO_GAP, Backend, StepPlan, is_last
from mlx_serve.engine.cache.banks import rows_bytes
from mlx_serve.engine.cache.prefix_tree import as_ids
from mlx_serve.engine.cache.size import bytes_of
from mlx_serve.engine.generate.draft_length import LENGTHS
from mlx_serve.engine.generate.drafts import Chances, Lookup
from mlx_serve.engine.generate.embedding import Embedder, Embedding
from mlx_serve.engine.generate.in_line import InLine
from mlx_serve.engine.generate.prefill_budget import PrefillBudget
from mlx_serve.engine.generate.prompts import Prompts, attempt
from mlx_serve.engine.generate.row import Row
from mlx_serve.engine.generate.rows import Rows
from mlx_serve.engine.generate.scoring import Scoring
from mlx_serve.engine.generate.sequence import RunningSequence
from mlx_serve.engine.generate.token_choice import Loaded, make_choice
from mlx_serve.values import Event, Failed, Job, Started

# How long a step without work waits for the disk. New jobs and cancellations are seen between steps.
_DISK_WAIT_S = 0.02


# For an output that may have fewer tokens, the prompt is not worth indexing.
_LEAST_DRAFTED = 8


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of the running batch, with the meaning of mlx_lm.server's flags of the same names.

    ``draft_ngram``: look up in each sequence's own text what may come next, and check it in the same pass.
    """

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048
    draft_ngram: bool = False


class BatchBackend(Backend):
    """Jobs join and leave the batch between any two steps.

    Each step is planned before it runs, so that all ranks can follow one plan (ranks/).
    """

    def __init__(self, loaded: Loaded, options: BatchOptions, clock: Callable[[], float] = time.perf_counter) -> None:
        self.capacity = 1 if loaded.alone else options.decode_concurrency
        self.max_spare: int | None = None
        self._loaded = loaded
        self._kept = loaded.prefix_cache
        self._clock = clock
        self._draft_ngram = options.draft_ngram
        self._chances = Chances()
        # A former backend that failed has left pins.
        self._kept.forget_jobs()
        self._in_line = InLine(self._kept)
        self._paused: dict[Job, RunningSequence] = {}
        self._decoding: dict[Row, RunningSequence] = {}
        self._rows = Rows(
            loaded.model,
            draft_model=loaded.draft_model,
            alone=bool(loaded.alone),
            quantization=loaded.quantization,
            agree=loaded.agree,
        )
        self._budget = PrefillBudget(options.prefill_step_size)
        self._prompts = Prompts(
            loaded, self._decoding.values(), self._rows.copy, self._budget, clock, options.prompt_concurrency
        )
        self._scoring: list[Scoring] = []
        self._embedder = Embedder(loaded)
        self._embedding: deque[Embedding] = deque()

    @property
    def alone(self) -> str:
        return self._loaded.alone

    @property
    def undrafted(self) -> str:
        return self._loaded.undrafted

    @property
    def n_decoding(self) -> int:
        """Jobs whose prompts are done, without those that wait for a step that decodes."""
        return len(self._decoding)

    @property
    def cache_bytes(self) -> int:
        return self._kept.n_bytes + self._kept.unkept_bytes

    @property
    def n_cached(self) -> int:
        return len(self._kept)

    @property
    def n_evicted(self) -> int:
        return self._kept.n_evicted

    @property
    def n_drafted(self) -> int:
        return self._rows.n_drafted

    @property
    def n_accepted(self) -> int:
        return self._rows.n_accepted

    def kv_bytes(self, tokens: Mapping[Job, int]) -> int:
        """The rows of the batch. Embedding has one cache at a time."""
        in_batch = [
            (min(n, len(job.prompt.tokens) + job.n_output), n) for job, n in tokens.items() if job.inputs is None
        ]
        embedded = [n for job, n in tokens.items() if job.inputs is not None]
        n_bytes = rows_bytes(self._row_bytes, in_batch)
        # The cache of an embedding job is not quantized, because it is dropped after each input.
        return n_bytes + (self._loaded.kv_size.bytes(max(embedded)) if embedded else 0)

    def _row_bytes(self, n_tokens: int) -> int:
        return bytes_of(self._loaded.kv_size, n_tokens, self._loaded.quantization)

    def pin(self, jobs: Sequence[Job]) -> None:
        self._in_line.pin(jobs)

    def missing(self, job: Job) -> tuple[int, float]:
        place = self._kept.pinned_place(job)
        if self._kept.has_disk or place is None:
            return 0, 0.0
        n_tokens = max(1, len(job.prompt.tokens) - self._prompts.will_cover(place))
        return n_tokens, self._budget.prefill_s(n_tokens)

    def wanted_bytes(self, within_s: float) -> int:
        return self._kept.wanted_bytes(within_s)

    def shrink_cache(self, max_bytes: int, *, pinned: bool = True) -> None:
        self._kept.shrink(max_bytes - self._kept.unkept_bytes, pinned=pinned)

    def insert(self, job: Job) -> None:
        """Check the job and queue its prompt for the next steps. Raises ApiError 400."""
        if job.inputs is not None:
            self._embedding.append(self._embedder.start(job))
            return
        sequence = self._paused.pop(job, None)
        if sequence is None:
            sequence = RunningSequence(make_choice(job, self._loaded), self._in_line.ids_of(job))
        if job.sampling.prompt_logprobs is not None and not sequence.has_started:
            self._in_line.let_go(job)
            self._scoring.append(Scoring(sequence.choice, self._prompts.model))
        else:
            self._in_line.claim(job, sequence.ids)
            self._prompts.add(sequence)

    def remove(self, jobs: Collection[Job]) -> None:
        """Take jobs out of the batch. What they have computed is kept: their clients may ask again."""
        for job in jobs:
            if self._paused.pop(job, None) is not None:
                self._in_line.let_go(job)
        self._take_out(jobs)

    def pause(self, jobs: Collection[Job]) -> Sequence[tuple[Job, Event]]:
        """Take jobs out of the batch and keep what they need to go on, their caches as kept prefixes."""
        for scoring in self._scoring:
            if scoring.choice.job in jobs:
                ids = as_ids(scoring.choice.job.prompt.tokens)
                self._paused[scoring.choice.job] = RunningSequence(scoring.choice, ids)
        events = []
        for sequence, token in self._take_out(jobs, is_pause=True):
            choice, ids = sequence.choice, sequence.ids
            if token is not None:
                event = choice.event(token)
                events.append((choice.job, event))
                if is_last(event):
                    self._kept.unpin(choice.job)
                    continue
                ids = as_ids([*sequence.held, token])
            self._paused[choice.job] = sequence.as_new(ids)
        for job in jobs:
            if job in self._paused:
                self._in_line.hold(job, self._paused[job].ids)
        return events

    def _take_out(self, jobs: Collection[Job], *, is_pause: bool = False) -> list[tuple[RunningSequence, int | None]]:
        """Take jobs out, with their caches as kept prefixes. Returns them, with the next token of those that decode."""
        self._scoring = [scoring for scoring in self._scoring if scoring.choice.job not in jobs]
        self._embedding = deque(embedding for embedding in self._embedding if embedding.job not in jobs)
        prompts = self._prompts.take_out(jobs)
        for prompt in prompts:
            prompt.leave(self._kept, prompt.cache, is_pause=is_pause)
        rows = [row for row, sequence in self._decoding.items() if sequence.choice.job in jobs]
        decoding = [self._end(row, is_pause=is_pause) for row in rows]
        return [*((prompt, None) for prompt in prompts), *decoding]

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        if gap_s == NO_GAP:
            self.wait_for_disk(_DISK_WAIT_S)
        return self.run_step(self.plan_step(gap_s))

    def wait_for_disk(self, timeout_s: float) -> None:
        """Wait a moment if there is nothing else to do."""
        if not (self._decoding or self._scoring or self._embedding):
            self._prompts.wait_for_disk(timeout_s)

    def plan_step(self, gap_s: float) -> StepPlan:
        """The plan of the next step, by this rank's clock."""
        n_left = [prompt.n_left for prompt in self._prompts.waiting if prompt.loading is None]
        plan = self._budget.plan(gap_s, n_left, len(self._decoding))
        decodes = plan.decodes or bool(self._prompts.prefilled)
        n_drafts = self._rows.plan() if decodes else 0
        return replace(plan, decodes=decodes, max_spare=self.max_spare, n_drafts=n_drafts)

    def run_step(self, plan: StepPlan) -> Sequence[tuple[Job, Event]]:
        """Run a planned step. It depends on nothing else that differs between ranks."""
        events: list[tuple[Job, Event]] = []
        self._rows.max_spare = math.inf if plan.max_spare is None else plan.max_spare
        n_kinds = sum(map(bool, (self._prompts.waiting, self._scoring, self._embedding)))
        n_tokens = max(1, plan.n_tokens // max(1, n_kinds))
        if n_kinds:
            self._rows.interrupted()
        if self._prompts.waiting:
            events += self._prompts.run(n_tokens, plan.n_held, plan.n_overhead)
        if self._scoring:
            events += self._score(n_tokens)
        if self._embedding:
            events += self._embed(n_tokens)
        if plan.decodes:
            events += self._decode(plan.n_drafts)
        return events

    def late(self) -> list[Job]:
        """Jobs whose grammars have used up their CPU time."""
        return [sequence.choice.job for sequence in self._decoding.values() if sequence.choice.is_late]

    def give_up(self, jobs: Collection[Job]) -> None:
        """Fail the grammars of these jobs."""
        for sequence in self._decoding.values():
            if sequence.choice.job in jobs and sequence.choice.constraint is not None:
                sequence.choice.constraint.give_up()

    def close(self) -> None:
        """Nothing is held outside this object."""
        for prompt in self._prompts.waiting:
            if prompt.loading is not None:
                prompt.loading.cancel()

    def _decode(self, n_drafts: int) -> list[tuple[Job, Event]]:
        for sequence in self._prompts.take():
            self._join(sequence)
            # The plan was made for the rows without it.
            n_drafts = 0
        if not self._decoding:
            self._budget.note_nobody()
            return []
        started_s = self._clock()
        drawn = self._rows.step(n_drafts)
        if drawn:
            self._budget.note_decoding(self._clock() - started_s)
        # A sequence that fails ends before the rest of its draft.
        return [self._event(row, token) for row, token in drawn if row in self._decoding]

    def _join(self, sequence: RunningSequence) -> None:
        """Move a sequence into the batch. Its cache holds all of the prompt but the last token."""
        assert sequence.cache is not None
        choice = sequence.choice
        *tokens, last = sequence.ids.tolist()
        row = Row(tokens, last, choice.sampler, choice.processors, choice.logprobs)
        row.n_left, row.ends = choice.job.sampling.max_tokens - choice.n_output, self._loaded.eos_ids
        row.grammar = choice.look_ahead
        # How far a grammar looks ahead depends on the time that it takes, which differs between ranks.
        if not self._loaded.undrafted and (row.grammar is None or self._loaded.agree is None):
            most = choice.job.sampling.n_draft_tokens
            row.max_drafts = max(LENGTHS) if most is None else most
        if row.n_left < _LEAST_DRAFTED:
            row.max_drafts = 0
        if row.max_drafts and (self._draft_ngram or choice.prediction is not None):
            row.lookup = Lookup([*tokens, last] if self._draft_ngram else None, choice.prediction, self._chances)
        sequence.row = row
        self._rows.join(sequence.row, sequence.cache)
        sequence.cache = None
        self._decoding[sequence.row] = sequence

    def _end(self, row: Row, *, is_pause: bool = False) -> tuple[RunningSequence, int]:
        """Take a sequence out of the batch, with its cache as a kept prefix. Returns it and the token it drew last."""
        sequence = self._decoding.pop(row)
        cache, drawn = self._rows.leave(row)
        sequence.leave(self._kept, cache, is_pause=is_pause)
        return sequence, drawn

    def _score(self, n_tokens: int) -> list[tuple[Job, Event]]:
        """Score part of a prompt. A finished prompt joins the batch."""
        scoring = self._scoring[0]
        job = scoring.choice.job
        started_s = self._clock()
        n_scored = attempt(self._loaded, job, lambda: scoring.step(n_tokens))
        # Scoring also computes logits, so its speed is not noted as a prefill's.
        self._budget.note(0, self._clock() - started_s)
        if isinstance(n_scored, Failed):
            self._scoring.pop(0)
            return [(job, n_scored)]
        if n_scored and scoring.n_left:
            return []
        self._scoring.pop(0)
        if job.sampling.max_tokens:
            ids = as_ids(job.prompt.tokens)
            sequence = RunningSequence(scoring.choice, ids, scoring.cache, len(ids) - 1, has_started=True)
            sequence.enter(self._kept)
            self._prompts.prefilled.append(sequence)
        return [(job, Started(job.index, 0)), (job, scoring.event())]

    def _embed(self, n_tokens: int) -> list[tuple[Job, Event]]:
        """Run part of an input. The jobs take turns, an input at a time, so short lists do not wait for long ones.

        A turn never ends within an input, because each unfinished input holds a KV cache.
        """
        embedding = self._embedding[0]
        started_s = self._clock()
        events = attempt(self._loaded, embedding.job, lambda: embedding.step(n_tokens))
        if isinstance(events, Failed):
            self._embedding.popleft()
            return [(embedding.job, events)]
        # A chunk that ended before its limit shows the overhead rather than the speed.
        n_noted = n_tokens if embedding.n_taken == n_tokens else 0
        self._budget.note(n_noted, self._clock() - started_s)
        if any(map(is_last, events)):
            self._embedding.popleft()
        elif embedding.is_between:
            self._embedding.rotate(-1)
        return [(embedding.job, event) for event in events]

    def _event(self, row: Row, token: int) -> tuple[Job, Event]:
        sequence = self._decoding[row]
        # The sequence's first step took the prompt's last token.
        sequence.n_done = len(sequence.ids)
        choice = sequence.choice
        event = choice.event(token)
        if is_last(event):
            self._end(row)
        return choice.job, event
