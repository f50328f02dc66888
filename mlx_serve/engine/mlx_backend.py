"""Continuous batching through mlx-lm's BatchGenerator, behind the Backend protocol. Lives on the worker thread.

    insert --> pending --(a place in the prefill, and nobody prefills the same)--> prefill --> decoding --> kept prefix

All that the project knows of BatchGenerator is in this module; what cannot be batched runs in single_backend.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import trim_prompt_cache

from mlx_serve.core import Event, Failed, Job, Started
from mlx_serve.engine.backend import is_last
from mlx_serve.engine.choice import Choice, Loaded, make_choice
from mlx_serve.engine.embedding import Embedder, Embedding
from mlx_serve.engine.prefill import CROWDED_SHARE, SHARE, PrefillBudget
from mlx_serve.engine.prefix_cache import Ids, as_ids, common
from mlx_serve.engine.scoring import Scoring

# What another's prefill must give more than what is there already, to be waited for.
_MIN_SHARED = 32
# So many prompts are prefilled at a time where one of them is long.
_MOST_BESIDE = 3
# A prompt that waits for every so many streams that decode is a crowd.
_CROWD = 3
# How far from the end of a prompt its last turn may begin: the opening of the answer, with its reasoning, lies behind.
_TAIL = 16


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of the running batch, as mlx_lm.server's flags of the same names have them."""

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048


class BatchBackend:
    """Jobs join and leave the batch between any two steps.

    Prompts that one step can end are prefilled together, and some beside one long one: the long ones come after each
    other, so that each gets its first token as soon as it can, and no short one waits behind them.
    """

    def __init__(self, loaded: Loaded, options: BatchOptions) -> None:
        self.capacity = options.decode_concurrency
        self._max_prefilling = options.prompt_concurrency
        self._loaded = loaded
        self._pending: list[_Pending] = []
        self._scoring: list[Scoring] = []
        self._embedder = Embedder(loaded)
        self._embedding: deque[Embedding] = deque()
        self._running: dict[int, _Running] = {}
        self._budget = PrefillBudget(options.prefill_step_size)
        self._stops = StopSequences([(token,) for token in sorted(loaded.eos_ids)])
        self._generator = BatchGenerator(
            loaded.model,
            completion_batch_size=options.decode_concurrency,
            prefill_batch_size=options.prompt_concurrency,
            prefill_step_size=options.prefill_step_size,
        )

    @property
    def n_decoding(self) -> int:
        """Jobs whose prompts are done."""
        return sum(running.is_decoding for running in self._running.values())

    @property
    def cache_bytes(self) -> int:
        """What kept prefixes hold."""
        return self._loaded.prefix_cache.n_bytes

    @property
    def n_cached(self) -> int:
        """Kept prefixes."""
        return len(self._loaded.prefix_cache)

    @property
    def n_evicted(self) -> int:
        """Prefixes given up for room."""
        return self._loaded.prefix_cache.n_evicted

    def kv_bytes(self, jobs: Collection[Job]) -> int:
        """A batch's caches are as long as the longest of them. Of what is embedded there is one cache at a time."""
        in_batch = [len(job.prompt.tokens) + job.sampling.max_tokens for job in jobs if job.inputs is None]
        embedded = [len(job.prompt.tokens) for job in jobs if job.inputs is not None]
        n_bytes = len(in_batch) * self._loaded.kv_size.bytes(max(in_batch, default=0))
        return n_bytes + (self._loaded.kv_size.bytes(max(embedded)) if embedded else 0)

    def insert(self, job: Job) -> None:
        """Check the job; the next step may begin with it. Raises ApiError 400."""
        if job.inputs is not None:
            self._embedding.append(self._embedder.start(job))
            return
        choice = make_choice(job, self._loaded)
        if job.sampling.prompt_logprobs is not None:
            self._scoring.append(Scoring(choice, self._loaded.model))
        else:
            self._pending.append(_Pending(choice, as_ids(job.prompt.tokens)))

    def remove(self, jobs: Collection[Job]) -> None:
        """Take jobs out of the batch. What was computed for them is kept, if others could use it."""
        self._pending = [pending for pending in self._pending if pending.choice.job not in jobs]
        self._scoring = [scoring for scoring in self._scoring if scoring.choice.job not in jobs]
        self._embedding = deque(embedding for embedding in self._embedding if embedding.job not in jobs)
        uids = [uid for uid, running in self._running.items() if running.choice.job in jobs]
        kept = self._generator.remove(uids, return_prompt_caches=self._loaded.trimmable)
        for uid in uids:
            del self._running[uid]
        for cache, tokens in kept.values():
            self._loaded.prefix_cache.store(as_ids(tokens), cache)

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        """Decode one token of each running sequence, then prefill about ``gap_s`` seconds of the new ones."""
        return self.step_tokens(self.prefill_tokens(gap_s))

    def prefill_tokens(self, gap_s: float) -> int:
        """How many prompt tokens a step may take: more while many wait beside those that decode."""
        n_waiting = len(self._pending) + len(self._prefilling())
        crowded = n_waiting * _CROWD >= self.n_decoding
        return self._budget.tokens(gap_s, CROWDED_SHARE if crowded else SHARE)

    def step_tokens(self, n_tokens: int) -> Sequence[tuple[Job, Event]]:
        """A step with up to ``n_tokens`` prompt tokens."""
        events: list[tuple[Job, Event]] = self._start_pending(n_tokens)
        n_prefilling = len(self._prefilling())
        n_shares = (n_prefilling > 0) + bool(self._scoring) + bool(self._embedding)
        n_tokens = max(1, n_tokens // max(1, n_shares))
        if self._scoring:
            events += self._score(n_tokens)
        if self._embedding:
            events += self._embed(n_tokens)
        # It takes so many tokens of each prompt.
        self._generator.prefill_step_size = max(1, n_tokens // max(1, n_prefilling))
        with self._generator.stats() as work:
            prompts, tokens = self._generator.next()
        self._budget.note(work.prompt_tokens, work.prompt_time)
        self._budget.note_decoding(work.decode_time)
        for response in prompts:
            self._advance(response)
        return events + [self._event(response) for response in tokens]

    def late(self) -> list[Job]:
        """Jobs whose grammars have taken more time than they may."""
        return [running.choice.job for running in self._running.values() if running.choice.is_late]

    def give_up(self, jobs: Collection[Job]) -> None:
        """Fail the grammars of these jobs."""
        for running in self._running.values():
            if running.choice.job in jobs and running.choice.constraint is not None:
                running.choice.constraint.give_up()

    def shrink_cache(self, max_bytes: int) -> None:
        """Give up kept prefixes."""
        self._loaded.prefix_cache.shrink(max_bytes)

    def close(self) -> None:
        """Restore what the generator set of the device."""
        self._generator.close()

    # Beginning.

    def _prefilling(self) -> list[_Running]:
        return [running for running in self._running.values() if not running.is_decoding]

    def _start_pending(self, n_tokens: int) -> list[tuple[Job, Event]]:
        events: list[tuple[Job, Event]] = []
        for pending in list(self._pending):
            prefilling = self._prefilling()
            if len(prefilling) >= self._max_prefilling:
                break
            donor, n_there = self._best_source(pending)
            if self._to_come(pending, prefilling) >= n_there + _MIN_SHARED:
                continue
            if not _goes_along(len(pending.ids) - n_there, [running.n_left for running in prefilling], n_tokens):
                continue
            self._pending.remove(pending)
            events.append(self._start(pending, donor, n_there))
        return events

    def _best_source(self, pending: _Pending) -> tuple[_Running | None, int]:
        """Where the longest prefix of a prompt is to be had now: of a running sequence, or (None) of the kept ones."""
        cache = self._loaded.prefix_cache
        if pending.cache_version != cache.version:
            pending.cache_version, pending.n_kept = cache.version, cache.covers(pending.ids)
        best: _Running | None = None
        best_n = pending.n_kept
        if self._loaded.trimmable:
            for running in self._running.values():
                n = min(pending.common(running), running.n_done)
                if n >= best_n + _MIN_SHARED:
                    best, best_n = running, n
        return best, best_n

    def _to_come(self, pending: _Pending, prefilling: Sequence[_Running]) -> int:
        """The longest prefix of a prompt that a prefill under way will give."""
        trimmable = self._loaded.trimmable
        return max(
            (running.will_give(pending.common(running), trimmable=trimmable) for running in prefilling), default=0
        )

    def _start(self, pending: _Pending, donor: _Running | None, n_cached: int) -> tuple[Job, Event]:
        cache: list[Any] | None
        if donor is not None:
            cache, held = self._generator.extract_cache([donor.uid])[donor.uid]
            trim_prompt_cache(cache, len(held) - n_cached)
        else:
            cache, n_cached = self._loaded.prefix_cache.fetch(pending.ids)
        running = _Running(pending.choice, pending.ids, n_cached, self._marks(pending, n_cached))
        self._insert(running, cache)
        return pending.choice.job, Started(pending.choice.job.index, n_cached)

    def _insert(self, running: _Running, cache: list[Any] | None) -> None:
        choice = running.choice
        tokens = list(choice.job.prompt.tokens)
        borders = [running.n_cached, *running.marks, len(tokens)]
        (running.uid,) = self._generator.insert_segments(
            [[tokens[a:b] for a, b in pairwise(borders)]],
            max_tokens=[choice.job.sampling.max_tokens],
            caches=[cache],
            all_tokens=[tokens[: running.n_cached]],
            samplers=[choice.sampler],
            logits_processors=[choice.processors],
            stop_sequences=[self._stops],
        )
        self._running[running.uid] = running

    def _marks(self, pending: _Pending, n_cached: int) -> list[int]:
        """Where to keep a copy on the way, of caches that cannot be cut back later.

        Where others that wait go another way, where what was kept before did, and where the last turn begins.
        """
        if self._loaded.trimmable:
            return []
        ids = pending.ids
        wanted = {self._loaded.prefix_cache.shared(ids), self._last_turn(ids)}
        wanted |= {common(ids, other.ids) for other in self._pending}
        most = len(ids) - 1
        return sorted({min(mark, most) for mark in wanted if min(mark, most) >= n_cached + _MIN_SHARED})

    def _last_turn(self, ids: Ids) -> int:
        controls = self._loaded.control_ids
        tail = range(max(0, len(ids) - _TAIL), len(ids))
        return next((i for i in tail if int(ids[i]) in controls), 0)

    # Going on.

    def _advance(self, response: Any) -> None:
        running = self._running.get(response.uid)
        if running is None:
            return
        if response.end_of_prompt:
            running.n_done, running.is_decoding = len(running.ids), True
            return
        running.n_done = running.n_cached + response.progress[0]
        if running.marks and running.n_done == running.marks[0]:
            cache, _ = self._generator.extract_cache([response.uid])[response.uid]
            self._loaded.prefix_cache.store(running.ids[: running.marks.pop(0)], cache)

    def _score(self, n_tokens: int) -> list[tuple[Job, Event]]:
        """Score some of a prompt; hand it on when it is done."""
        scoring = self._scoring[0]
        job = scoring.choice.job
        if scoring.step(n_tokens) and scoring.n_left:
            return []
        self._scoring.pop(0)
        tokens = job.prompt.tokens
        if job.sampling.max_tokens:
            self._insert(_Running(scoring.choice, as_ids(tokens), len(tokens) - 1, []), scoring.cache)
        return [(job, Started(job.index, 0)), (job, scoring.event())]

    def _embed(self, n_tokens: int) -> list[tuple[Job, Event]]:
        """Some of an input; after its end it is the next job's turn, so that a short list does not wait for long ones.

        But never before: each input on its way has a KV cache.
        """
        embedding = self._embedding[0]
        started_s = time.perf_counter()
        events = embedding.step(n_tokens)
        if embedding.n_taken == n_tokens:
            # What was not cut short here tells more about the overhead than about the speed.
            self._budget.note(n_tokens, time.perf_counter() - started_s)
        if any(map(is_last, events)):
            self._embedding.popleft()
        elif embedding.is_between:
            self._embedding.rotate(-1)
        return [(embedding.job, event) for event in events]

    def _event(self, response: Any) -> tuple[Job, Event]:
        choice = self._running[response.uid].choice
        event = choice.event(response.token, response.finish_reason, response.logprobs)
        if response.finish_reason is not None:
            del self._running[response.uid]
            self._loaded.prefix_cache.store(as_ids(response.all_tokens), response.prompt_cache)
        elif isinstance(event, Failed):
            self.remove([choice.job])
        return choice.job, event


def _goes_along(n_left: int, others: Sequence[int], n_tokens: int) -> bool:
    """Whether a prompt may be prefilled beside others, with so many tokens left of each, in steps of ``n_tokens``.

    mlx-lm pads the prompts of a step to the longest of them, so only those go together that one step can end; and
    a few short ones beside a long one, which would else hold them up.
    """
    longest = max(others, default=0)
    if longest > n_tokens:
        return n_left <= n_tokens and len(others) < _MOST_BESIDE
    return not others or (len(others) + 1) * max(longest, n_left) <= n_tokens


@dataclass(slots=True, eq=False)
class _Running:
    """A sequence in the generator. ``n_done`` tokens of its prompt are in its KV cache, ``n_cached`` from the start.

    ``marks``: where a copy of the cache is still to be kept.
    """

    choice: Choice
    ids: Ids
    n_cached: int
    marks: list[int]
    uid: int = -1
    n_done: int = 0
    is_decoding: bool = False

    def __post_init__(self) -> None:
        self.n_done = self.n_cached

    @property
    def n_left(self) -> int:
        return len(self.ids) - self.n_done

    def will_give(self, n_common: int, *, trimmable: bool) -> int:
        """How much of what it has in common with another prompt can be had once it has got there."""
        if trimmable:
            return n_common
        return max((mark for mark in self.marks if mark <= n_common), default=0)


@dataclass(slots=True, eq=False)
class _Pending:
    """A job that has not begun."""

    choice: Choice
    ids: Ids
    cache_version: int = -1
    n_kept: int = 0
    _common: dict[int, int] = field(default_factory=dict)

    def common(self, running: _Running) -> int:
        """How much of the prompt is a running one's too; never all of it, for one token has to be left."""
        if running.uid not in self._common:
            self._common[running.uid] = min(common(self.ids, running.ids), len(self.ids) - 1)
        return self._common[running.uid]
