"""Continuous batching, behind the Backend protocol: which prompt is prefilled next, and which sequences decode.

    insert --> prompt, waits --(nobody prefills the same)--> prefilled --> decoding, in a row --> kept prefix
      ^                                                                         |
      +----------------------------- paused, kept prefix <-------- pause --------+

Each prompt is prefilled in its own cache, alone or beside others (side_by_side.py). The sequence then joins the running
batch (rows.py) with this cache and the prompt's last token. Lives on the worker thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.backend import StepPlan, is_last
from mlx_serve.engine.cache.banks import rows_bytes
from mlx_serve.engine.cache.checkpoints import Checkpoint, cut, up_to
from mlx_serve.engine.cache.kinds import always_trims
from mlx_serve.engine.cache.loading import Loading
from mlx_serve.engine.cache.prefix_tree import Ids, as_ids
from mlx_serve.engine.cache.prefixes import is_whole
from mlx_serve.engine.cache.size import bytes_of
from mlx_serve.engine.generate.draft_length import LENGTHS
from mlx_serve.engine.generate.draft_model import Paired
from mlx_serve.engine.generate.drafts import Chances, Lookup
from mlx_serve.engine.generate.embedding import Embedder, Embedding
from mlx_serve.engine.generate.loaded import LoadedBackend
from mlx_serve.engine.generate.prefill import prefill
from mlx_serve.engine.generate.prefill_budget import PrefillBudget
from mlx_serve.engine.generate.row import Row
from mlx_serve.engine.generate.rows import Rows
from mlx_serve.engine.generate.scoring import Scoring
from mlx_serve.engine.generate.sequence import Reusable, RunningSequence
from mlx_serve.engine.generate.sharing import MIN_SHARED, Sharing
from mlx_serve.engine.generate.side_by_side import chosen, prefill_together
from mlx_serve.engine.generate.token_choice import Loaded, TokenChoice, make_choice
from mlx_serve.values import Event, Failed, Job, Started

# A step may exceed its size by so many tokens to finish a prompt. The rest would need another pass through the model.
_STRETCH = 1.25


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of the running batch, with the meaning of mlx_lm.server's flags of the same names.

    ``draft_ngram``: look up in each sequence's own text what may come next, and check it in the same pass.
    """

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048
    draft_ngram: bool = False


class BatchBackend(LoadedBackend):
    """Jobs join and leave the batch between any two steps.

    The prompt tokens of every other step go to the prompt with the fewest tokens left, those of the others to the
    oldest prompt. So a long prompt advances beside short ones and delays none of them.
    """

    def __init__(self, loaded: Loaded, options: BatchOptions, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.capacity = 1 if loaded.alone else options.decode_concurrency
        self._max_prefilling = options.prompt_concurrency
        self._most_tokens = options.prefill_step_size
        self._draft_ngram = options.draft_ngram
        self._chances = Chances()
        super().__init__(loaded)
        # What runs prompts.
        self._model = loaded.model if loaded.draft_model is None else Paired(loaded.model, loaded.draft_model)
        # Prompts, in the order of their arrival.
        self._prompts: list[RunningSequence] = []
        self._is_first_s_turn = False
        # Prefilled sequences that wait for the next step that decodes.
        self._prefilled: list[RunningSequence] = []
        self._decoding: dict[Row, RunningSequence] = {}
        self._rows = Rows(
            loaded.model,
            draft_model=loaded.draft_model,
            alone=bool(loaded.alone),
            quantization=loaded.quantization,
            agree=loaded.agree,
        )
        self._paused: dict[Job, RunningSequence] = {}
        self._sharing = Sharing(loaded.prefix_cache, shares=loaded.shares, trimmable=loaded.trimmable)
        self._scoring: list[Scoring] = []
        self._embedder = Embedder(loaded)
        self._embedding: deque[Embedding] = deque()
        self._budget = PrefillBudget(options.prefill_step_size)
        # Padding has to be cut off again.
        self._pads = not (loaded.alone or loaded.quantization) and always_trims(make_prompt_cache(self._model))

    @property
    def n_decoding(self) -> int:
        """Jobs whose prompts are done, without those that wait for a step that decodes."""
        return len(self._decoding)

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

    def missing(self, job: Job) -> tuple[int, float]:
        place = self._loaded.prefix_cache.pinned_place(job)
        if self._loaded.prefix_cache.has_disk or place is None:
            return 0, 0.0
        n_known = self._loaded.prefix_cache.covers(place)
        if self._loaded.shares:
            running = (*self._prompts, *self._prefilled, *self._decoding.values())
            in_common = [(other, place.common(other.place)) for other in running if other.place is not None]
            n_given = [other.will_give(n, trimmable=self._loaded.trimmable) for other, n in in_common]
            n_known = max([n_known, *n_given])
        n_tokens = max(1, len(job.prompt.tokens) - n_known)
        return n_tokens, self._budget.prefill_s(n_tokens)

    def insert(self, job: Job) -> None:
        """Check the job and queue its prompt for the next steps. Raises ApiError 400."""
        if job.inputs is not None:
            self._embedding.append(self._embedder.start(job))
            return
        sequence = self._paused.pop(job, None)
        if sequence is None:
            sequence = RunningSequence(make_choice(job, self._loaded), self.ids_of(job))
        if job.sampling.prompt_logprobs is not None and not sequence.has_started:
            self.let_go(job)
            self._scoring.append(Scoring(sequence.choice, self._model))
        else:
            self._loaded.prefix_cache.claim(job, sequence.ids, sequence.scope)
            self._in_line.pop(job, None)
            self._place(sequence)
            sequence.loading = self._load(sequence)
            self._prompts.append(sequence)

    def remove(self, jobs: Collection[Job]) -> None:
        """Take jobs out of the batch. What they have computed is kept: their clients may ask again."""
        self.forget(self._paused, jobs)
        self._take_out(jobs)

    def pause(self, jobs: Collection[Job]) -> Sequence[tuple[Job, Event]]:
        """Take jobs out of the batch and keep what they need to go on, their caches as kept prefixes."""
        for scoring in self._scoring:
            if scoring.choice.job in jobs:
                ids = as_ids(scoring.choice.job.prompt.tokens)
                self._paused[scoring.choice.job] = RunningSequence(scoring.choice, ids)
        for sequence in (*self._prompts, *self._prefilled):
            if sequence.choice.job in jobs:
                self._paused[sequence.choice.job] = sequence.as_new(sequence.ids)
        decoding = dict(self._decoding)
        events = []
        for row, token in self._take_out(jobs, is_pause=True).items():
            sequence, choice = decoding[row], decoding[row].choice
            event = choice.event(token, self._finish(choice, token))
            events.append((choice.job, event))
            if is_last(event):
                self._loaded.prefix_cache.unpin(choice.job)
            else:
                self._paused[choice.job] = sequence.as_new(as_ids([*row.tokens, token]))
        for job in jobs:
            if job in self._paused:
                self.hold(job, self._paused[job].ids)
        return events

    def _finish(self, choice: TokenChoice, token: int) -> Literal["stop", "length"] | None:
        if token in self._loaded.eos_ids:
            return "stop"
        return "length" if choice.n_output + 1 >= choice.job.sampling.max_tokens else None

    def _take_out(self, jobs: Collection[Job], *, is_pause: bool = False) -> dict[Row, int]:
        """Take jobs out, with their caches as kept prefixes. Returns the next token of each decoding one."""
        self._scoring = [scoring for scoring in self._scoring if scoring.choice.job not in jobs]
        self._embedding = deque(embedding for embedding in self._embedding if embedding.job not in jobs)
        for waiting in (self._prompts, self._prefilled):
            for sequence in [sequence for sequence in waiting if sequence.choice.job in jobs]:
                waiting.remove(sequence)
                cache = sequence.cache
                self._leave(sequence, is_pause=is_pause)
                if cache is not None:
                    self._store(sequence, sequence.ids[: sequence.n_done], cache, is_pause=is_pause)
                if sequence.loading is not None:
                    sequence.loading.cancel()
                sequence.loading = None
        rows = [row for row, sequence in self._decoding.items() if sequence.choice.job in jobs]
        return {row: self._end(row, is_pause=is_pause) for row in rows}

    def plan_step(self, gap_s: float) -> StepPlan:
        n_left = [prompt.n_left for prompt in self._prompts if prompt.loading is None]
        plan = self._budget.plan(gap_s, n_left, len(self._decoding))
        decodes = plan.decodes or bool(self._prefilled)
        n_drafts = self._rows.plan() if decodes else 0
        return replace(plan, decodes=decodes, max_spare=self.max_spare, n_drafts=n_drafts)

    def run_step(self, plan: StepPlan) -> Sequence[tuple[Job, Event]]:
        events: list[tuple[Job, Event]] = []
        self._rows.max_spare = math.inf if plan.max_spare is None else plan.max_spare
        n_tokens = max(1, plan.n_tokens // max(1, sum(map(bool, (self._prompts, self._scoring, self._embedding)))))
        self._poll_disk()
        if self._prompts or self._scoring or self._embedding:
            self._rows.interrupted()
        if self._prompts:
            n_left = n_tokens - self._feed_together(n_tokens, plan.n_overhead, events)
            if n_left > 0:
                events += self._prefill(n_left, math.inf if plan.n_held is None else plan.n_held)
        if self._scoring:
            events += self._score(n_tokens)
        if self._embedding:
            events += self._embed(n_tokens)
        if plan.decodes:
            events += self._decode(plan.n_drafts)
        return events

    def late(self) -> list[Job]:
        return [sequence.choice.job for sequence in self._decoding.values() if sequence.choice.is_late]

    def give_up(self, jobs: Collection[Job]) -> None:
        for sequence in self._decoding.values():
            if sequence.choice.job in jobs and sequence.choice.constraint is not None:
                sequence.choice.constraint.give_up()

    def wait_for_disk(self, timeout_s: float) -> None:
        loading = self._loading()
        others = (self._prefilled, self._decoding, self._scoring, self._embedding)
        if loading and len(loading) == len(self._prompts) and not any(others):
            assert loading[0].loading is not None
            loading[0].loading.wait(timeout_s)

    def close(self) -> None:
        """Nothing is held outside this object."""
        for prompt in self._prompts:
            if prompt.loading is not None:
                prompt.loading.cancel()

    # Prompts.

    def _load(self, prompt: RunningSequence) -> Loading | None:
        """Begin to read a prompt's cache from disk, if that gives more than memory and the reads that are under way."""
        begun = [other for other in self._prompts if other.cache is not None]
        loading = self._loading()
        self._sharing.update(begun, [*self._prefilled, *self._decoding.values()])
        self._sharing.waits(prompt, loading)
        n_held = max(prompt.n_done, self._sharing.to_load(prompt, loading))
        return self._loaded.prefix_cache.load(prompt.ids, prompt.scope, n_held, self._budget.prefill_s)

    def _loading(self) -> list[RunningSequence]:
        """The prompts whose caches are being read from disk."""
        return [prompt for prompt in self._prompts if prompt.loading is not None]

    def _poll_disk(self) -> None:
        for prompt in self._prompts:
            if prompt.loading is not None and prompt.loading.poll():
                prompt.loading = None
                self._loaded.prefix_cache.claim(prompt.choice.job, prompt.ids, prompt.scope)

    def _prefill(self, n_tokens: int, n_held: float) -> list[tuple[Job, Event]]:
        events: list[tuple[Job, Event]] = []
        least = max(1, n_tokens // 2)
        self._is_first_s_turn = not self._is_first_s_turn
        if self._is_first_s_turn and (ready := self._ready()):
            n_tokens -= self._feed(ready[0], n_tokens, events)
        while ready := self._ready():
            soonest = _soonest(ready)
            # Each part of a prompt costs a full pass through the model, however small it is.
            if n_tokens < min(soonest.n_left, least):
                break
            if self._prefilled:
                if n_held < soonest.n_left:
                    break
                n_held -= soonest.n_left
            n_tokens -= self._feed(soonest, n_tokens, events)
        return events

    def _feed_together(self, n_tokens: int, n_overhead: int, events: list[tuple[Job, Event]]) -> int:
        """Run short prompts in one pass, where that is quicker, and return how many tokens ran."""
        if not n_overhead or not self._pads:
            return 0
        fresh: list[RunningSequence] = []
        for prompt in self._ready():
            # Prompts that have much in common compute it once, one after the other.
            apart = all(prompt.common(other) < MIN_SHARED for other in fresh)
            if prompt.cache is None and not prompt.n_done and prompt.n_left > 0 and apart:
                fresh.append(prompt)
        prompts = [fresh[i] for i in chosen([prompt.n_left for prompt in fresh], n_overhead, n_tokens)]
        if not prompts:
            return 0
        started_s = self._clock()
        filled = self.attempt(prompts[0].choice.job, lambda: self._fill_together(prompts, events))
        if isinstance(filled, Failed):
            # Each then runs alone, and fails alone.
            for prompt in prompts:
                prompt.cache = None
            self._pads = False
            return 0
        n = len(prompts) * max(prompt.n_left for prompt in prompts)
        self._budget.note(n, self._clock() - started_s)
        for prompt, cache in zip(prompts, filled, strict=True):
            prompt.cache, prompt.n_done = cache, len(prompt.ids) - 1
            prompt.choice.job.n_prefilled = prompt.n_done
            self._prompts.remove(prompt)
            self._prefilled.append(prompt)
        return n

    def _fill_together(self, prompts: Sequence[RunningSequence], events: list[tuple[Job, Event]]) -> list[list[Any]]:
        caches = [self._started(prompt, events) for prompt in prompts]
        return prefill_together(self._model, caches, [prompt.ids[:-1].tolist() for prompt in prompts])

    def _ready(self) -> list[RunningSequence]:
        """The prompts that can advance: those that have begun, and those that gain nothing by waiting."""
        begun = [prompt for prompt in self._prompts if prompt.cache is not None]
        if len(begun) >= self._max_prefilling:
            return begun
        self._sharing.update(begun, [*self._prefilled, *self._decoding.values()])
        loading = self._loading()
        read = [prompt for prompt in self._prompts if prompt.loading is None]
        return [p for p in read if p.cache is not None or not self._sharing.waits(p, loading)]

    def _feed(self, prompt: RunningSequence, n_tokens: int, events: list[tuple[Job, Event]]) -> int:
        """Run up to ``n_tokens`` of a prompt and return how many ran. A failure removes this prompt alone."""
        job = prompt.choice.job
        n_fed = self.attempt(job, lambda: self._advance(prompt, n_tokens, events))
        if not isinstance(n_fed, Failed):
            return n_fed
        self._prompts.remove(prompt)
        self._leave(prompt)
        events.append((job, n_fed))
        return 0

    def _advance(self, prompt: RunningSequence, n_tokens: int, events: list[tuple[Job, Event]]) -> int:
        """Run up to ``n_tokens`` of a prompt and return how many ran. The last token is left for the batch."""
        cache = prompt.cache if prompt.cache is not None else self._started(prompt, events)
        if prompt.n_left <= min(n_tokens * _STRETCH, self._most_tokens):
            n_tokens = prompt.n_left
        end = min(prompt.trail.end(prompt.n_done, n_tokens), len(prompt.ids) - 1)
        n = end - prompt.n_done
        if n:
            started_s = self._clock()
            prefill(self._model, cache, prompt.ids[prompt.n_done : end].tolist(), self._loaded.quantization)
            self._budget.note(n, self._clock() - started_s)
            prompt.n_done = end
            prompt.trail.reached(cache, end)
        prompt.choice.job.n_prefilled = end
        if not prompt.n_left:
            self._prompts.remove(prompt)
            self._prefilled.append(prompt)
        return n

    def _started(self, prompt: RunningSequence, events: list[tuple[Job, Event]]) -> list[Any]:
        """Begin a prompt, and tell its client so."""
        cache = self._begin(prompt)
        if not prompt.has_started:
            prompt.has_started = True
            events.append((prompt.choice.job, Started(prompt.choice.job.index, prompt.n_done)))
        return cache

    def _begin(self, prompt: RunningSequence) -> list[Any]:
        """Give a prompt its cache, with the prefix that it can reuse."""
        cache = self._share(prompt, prompt.donor) if prompt.donor is not None else None
        if cache is None:
            cache, prompt.n_done, prompt.trail.kept = self._loaded.prefix_cache.fetch(
                prompt.ids, prompt.scope, prompt.choice.job
            )
        if cache is None:
            cache = make_prompt_cache(self._model)
        prompt.cache = cache
        self._loaded.prefix_cache.unpin(prompt.choice.job)
        # Drop the references to others, so that ended sequences are freed.
        prompt.donor, prompt.found = None, Reusable()
        waiting = [prompt.common(other) for other in self._prompts if other.cache is None]
        self.plan_stops(prompt.trail, prompt.ids, prompt.scope, prompt.n_done, cache, waiting)
        return cache

    def _share(self, prompt: RunningSequence, donor: RunningSequence) -> list[Any] | None:
        """A copy of the first tokens of a running sequence's cache; None when its length is not as expected."""
        cache = donor.cache
        if cache is None:
            assert donor.row is not None
            shared = self._of_row(donor.row, donor.trail.kept, prompt.n_done)
        else:
            # Until the donor decodes, its cache is its own.
            shared = cut(cache, donor.n_done, donor.trail.kept, prompt.n_done)
        if not is_whole(shared, prompt.n_done):
            return None
        prompt.trail.kept = up_to(donor.trail.kept, prompt.n_done)
        return shared

    def _of_row(self, row: Row, checkpoints: Sequence[Checkpoint], n_tokens: int) -> list[Any]:
        """A copy of the first tokens of a sequence in the batch."""
        if self._loaded.trimmable:
            return self._rows.copy(row, n_tokens)
        return cut(self._rows.copy(row), len(row.tokens), checkpoints, n_tokens, is_own=True)

    # Decoding, scoring and embedding.

    def _decode(self, n_drafts: int) -> list[tuple[Job, Event]]:
        if self._prefilled:
            # The plan was made for the rows without them.
            n_drafts = 0
        for sequence in self._prefilled:
            self._join(sequence)
        self._prefilled.clear()
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
        if row.max_drafts and (self._draft_ngram or choice.prediction is not None):
            row.lookup = Lookup([*tokens, last] if self._draft_ngram else None, choice.prediction, self._chances)
        sequence.row = row
        self._rows.join(sequence.row, sequence.cache)
        sequence.cache = None
        self._decoding[sequence.row] = sequence

    def _end(self, row: Row, *, is_pause: bool = False) -> int:
        """Take a sequence out of the batch, and keep its cache as a prefix. Returns the token that it drew last."""
        sequence = self._decoding.pop(row)
        self._leave(sequence, is_pause=is_pause)
        cache, drawn = self._rows.leave(row)
        self._store(sequence, as_ids(row.tokens), cache, is_pause=is_pause)
        return drawn

    def _score(self, n_tokens: int) -> list[tuple[Job, Event]]:
        """Score part of a prompt. A finished prompt joins the batch."""
        scoring = self._scoring[0]
        job = scoring.choice.job
        started_s = self._clock()
        n_scored = self.attempt(job, lambda: scoring.step(n_tokens))
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
            self._place(sequence)
            self._prefilled.append(sequence)
        return [(job, Started(job.index, 0)), (job, scoring.event())]

    def _embed(self, n_tokens: int) -> list[tuple[Job, Event]]:
        """Run part of an input. The jobs take turns, an input at a time, so short lists do not wait for long ones.

        A turn never ends within an input, because each unfinished input holds a KV cache.
        """
        embedding = self._embedding[0]
        started_s = self._clock()
        events = self.attempt(embedding.job, lambda: embedding.step(n_tokens))
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
        event = choice.event(token, self._finish(choice, token))
        if is_last(event):
            self._end(row)
        return choice.job, event

    def _place(self, sequence: RunningSequence) -> None:
        sequence.place = self._loaded.prefix_cache.place(sequence.ids, sequence.scope)

    def _leave(self, sequence: RunningSequence, *, is_pause: bool = False) -> None:
        """A sequence leaves the batch. Waiting prompts may keep a reference to it until their next look-up."""
        sequence.cache = None
        if not is_pause:
            self._loaded.prefix_cache.unpin(sequence.choice.job)
        assert sequence.place is not None
        self._loaded.prefix_cache.leave(sequence.place)

    def _store(self, sequence: RunningSequence, ids: Ids, cache: list[Any], *, is_pause: bool) -> None:
        """Keep the cache of a prompt and its answer so far."""
        self._loaded.prefix_cache.store(
            ids,
            cache,
            sequence.scope,
            n_prompt=min(len(sequence.choice.job.prompt.tokens), len(ids)),
            checkpoints=sequence.trail.kept,
            paused=sequence.choice.job if is_pause else None,
        )


def _soonest(prompts: Iterable[RunningSequence]) -> RunningSequence:
    """The prompt with the fewest tokens left; of equals, the first."""
    return min(prompts, key=lambda prompt: prompt.n_left)
