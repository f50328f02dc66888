"""Prompts on their way into the batch. Each is prefilled in its own cache, alone or beside others (side_by_side.py).

    add --> waits --(nobody prefills or loads the same)--> begun --> prefilled --> take

A prompt begins with what it can reuse: from disk, of the kept prefixes, or of a running sequence (sharing.py). Its last
token is left for the batch. Knows no backend. Worker thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.backend import ALIKE
from mlx_serve.engine.cache.checkpoints import borders, cut, up_to
from mlx_serve.engine.cache.kinds import always_trims
from mlx_serve.engine.cache.prefixes import PromptPlace, is_whole
from mlx_serve.engine.generate.draft_model import Paired
from mlx_serve.engine.generate.prefill import prefill
from mlx_serve.engine.generate.prefill_budget import STRETCH, PrefillBudget
from mlx_serve.engine.generate.row import Row
from mlx_serve.engine.generate.sequence import Reusable, RunningSequence
from mlx_serve.engine.generate.sharing import MIN_SHARED, Sharing
from mlx_serve.engine.generate.side_by_side import chosen, prefill_together
from mlx_serve.engine.generate.token_choice import Loaded
from mlx_serve.values import Event, Failed, Job, Started, internal_error

log = logging.getLogger(__name__)

T = TypeVar("T")

# MLX raises these when it can't allocate a buffer, and for any other failure while a pass is computed.
_OF_MLX = (MemoryError, RuntimeError)


class Prompts:
    """The prompts of one model: ``waiting`` ones, begun or not, in the order of their arrival, and ``prefilled`` ones.

    Every other step begins with the prompt that has the fewest tokens left, the others with the oldest prompt. So a
    long prompt advances beside short ones, which have the other steps. Short ones may share a pass.

    ``decoding``: a view of the sequences in the batch; ``copy`` copies the first so many tokens of a row's cache (None:
    all). ``max_begun``: how many prompts may be on the way at a time. ``model``: what runs prompts.
    """

    def __init__(
        self,
        loaded: Loaded,
        decoding: Collection[RunningSequence],
        copy: Callable[[Row, int | None], list[Any]],
        budget: PrefillBudget,
        clock: Callable[[], float],
        max_begun: int,
    ) -> None:
        self.waiting: list[RunningSequence] = []
        self.prefilled: list[RunningSequence] = []
        self.model = loaded.model if loaded.draft_model is None else Paired(loaded.model, loaded.draft_model)
        self._loaded = loaded
        self._kept = loaded.prefix_cache
        self._decoding = decoding
        self._copy = copy
        self._budget = budget
        self._clock = clock
        self._max_begun = max_begun
        self._sharing = Sharing(self._kept, shares=loaded.shares, trimmable=loaded.trimmable)
        self._is_first_s_turn = False
        # Padding has to be cut off again.
        self._pads = not (loaded.alone or loaded.quantization) and always_trims(make_prompt_cache(self.model))

    def add(self, prompt: RunningSequence) -> None:
        """Queue a prompt, and read its cache from disk if that gives more than memory and the reads under way."""
        prompt.enter(self._kept)
        self._sharing.update(self.waiting, [*self.prefilled, *self._decoding])
        self._sharing.waits(prompt)
        n_held = max(prompt.n_done, self._sharing.to_load(prompt))
        prompt.loading = self._kept.load(prompt.ids, prompt.scope, n_held, self._budget.prefill_s)
        self.waiting.append(prompt)

    def take(self) -> list[RunningSequence]:
        """Take the prefilled prompts. Their caches hold all tokens but the last."""
        taken, self.prefilled = self.prefilled, []
        return taken

    def take_out(self, jobs: Collection[Job]) -> list[RunningSequence]:
        """Take the prompts of these jobs, whatever their stage. The caller lets them ``leave``."""
        taken = [prompt for prompt in (*self.waiting, *self.prefilled) if prompt.choice.job in jobs]
        self.waiting = [prompt for prompt in self.waiting if prompt not in taken]
        self.prefilled = [prompt for prompt in self.prefilled if prompt not in taken]
        return taken

    def will_cover(self, place: PromptPlace) -> int:
        """How many tokens of another prompt need not be computed for it alone, once the running ones have theirs."""
        running = (*self.waiting, *self.prefilled, *self._decoding) if self._loaded.shares else ()
        in_common = [(other, place.common(other.place)) for other in running if other.place is not None]
        n_given = [other.will_give(n, trimmable=self._loaded.trimmable) for other, n in in_common]
        return max([self._kept.covers(place), *n_given])

    def wait_for_disk(self, timeout_s: float) -> None:
        """Wait a moment if all prompts are being read from disk."""
        loading = [prompt.loading for prompt in self.waiting if prompt.loading is not None]
        if loading and len(loading) == len(self.waiting) and not self.prefilled:
            loading[0].wait(timeout_s)

    def run(self, n_tokens: int, n_held: int | None, n_overhead: int) -> list[tuple[Job, Event]]:
        """Run about ``n_tokens``; the rest is as in ``StepPlan``. A prompt that fails is taken out."""
        events: list[tuple[Job, Event]] = []
        for prompt in self.waiting:
            if prompt.loading is not None and prompt.loading.poll():
                prompt.loading = None
                self._kept.claim(prompt.choice.job, prompt.ids, prompt.scope)
        most_held = math.inf if n_held is None else n_held
        # Each part of a prompt costs a full pass through the model, however small it is.
        least = max(1, n_tokens // 2)
        ready = self._ready()
        together = self._chosen(ready, n_tokens, n_overhead, most_held)
        self._is_first_s_turn = not self._is_first_s_turn
        first = ready[0] if ready and self._is_first_s_turn else min(ready, key=_n_left, default=None)
        if first is not None and first not in together:
            n_tokens -= _cost(self._feed(first, n_tokens, events), n_overhead)
            together = self._chosen(self._ready(), n_tokens, n_overhead, most_held)
        if together:
            n_alone = self._n_unheld(together, n_overhead)
            cost = _cost(self._feed_together(together, events), n_overhead)
            n_tokens -= cost
            most_held -= max(0, cost - n_alone)
        self._feed_each(n_tokens, n_overhead, least, most_held, events)
        return events

    def _ready(self) -> list[RunningSequence]:
        """The prompts that can advance: those that have begun, and those that gain nothing by waiting."""
        begun = [prompt for prompt in self.waiting if prompt.cache is not None]
        if len(begun) >= self._max_begun:
            return begun
        self._sharing.update(self.waiting, [*self.prefilled, *self._decoding])
        return [p for p in self.waiting if p.cache is not None or (p.loading is None and not self._sharing.waits(p))]

    def _feed_each(
        self, n_tokens: int, n_overhead: int, least: int, n_held: float, events: list[tuple[Job, Event]]
    ) -> None:
        """Run prompts one by one. Once one is done, the others run at most ``n_held`` tokens.

        What is left of a step is not spent on a part of a prompt that is shorter than ``least``.
        """
        while ready := self._ready():
            soonest = min(ready, key=_n_left)
            n_left, holds = soonest.n_left, bool(self.prefilled)
            is_too_long = n_tokens < least and n_tokens * STRETCH < n_left
            if n_left and (is_too_long or (holds and n_held < n_left)):
                break
            cost = _cost(self._feed(soonest, n_tokens if n_left else 0, events), n_overhead)
            n_tokens -= cost
            n_held -= cost if holds else 0

    def _chosen(
        self, ready: Sequence[RunningSequence], n_tokens: int, n_overhead: int, n_held: float
    ) -> list[RunningSequence]:
        """Short prompts that are quicker in one pass of at most ``n_tokens`` than in passes of their own.

        None of them waits for more than about ``n_held`` tokens of the others.
        """
        if not n_overhead or not self._pads:
            return []
        fresh: list[RunningSequence] = []
        for prompt in ready:
            is_fresh = prompt.cache is None and not prompt.n_done
            # Prompts that have much in common compute it once, one after the other.
            if is_fresh and 0 < prompt.n_left <= n_tokens // 2 and all(p.common(prompt) < MIN_SHARED for p in fresh):
                fresh.append(prompt)
        most = min(n_tokens, self._n_unheld(fresh, n_overhead) + n_held)
        return [fresh[i] for i in chosen([prompt.n_left for prompt in fresh], n_overhead, most)]

    def _n_unheld(self, prompts: Sequence[RunningSequence], n_overhead: int) -> int:
        """How much of a pass for these prompts holds nobody: what the shortest of them would cost alone."""
        return 0 if self.prefilled else _cost(min(map(_n_left, prompts), default=0), n_overhead)

    def _feed_together(self, prompts: Sequence[RunningSequence], events: list[tuple[Job, Event]]) -> int:
        """Run short prompts in one pass, and return how many tokens ran."""
        started_s = self._clock()
        filled = attempt(self._loaded, prompts[0].choice.job, lambda: self._fill_together(prompts, events))
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
            self._advanced(prompt)
        return n

    def _fill_together(self, prompts: Sequence[RunningSequence], events: list[tuple[Job, Event]]) -> list[list[Any]]:
        caches = [self._begin(prompt, events) for prompt in prompts]
        return prefill_together(self.model, caches, [prompt.ids[:-1].tolist() for prompt in prompts])

    def _feed(self, prompt: RunningSequence, n_tokens: int, events: list[tuple[Job, Event]]) -> int:
        """Run up to ``n_tokens`` of a prompt and return how many ran. A failure removes this prompt alone."""
        job = prompt.choice.job
        n_fed = attempt(self._loaded, job, lambda: self._advance(prompt, n_tokens, events))
        if not isinstance(n_fed, Failed):
            return n_fed
        self.waiting.remove(prompt)
        prompt.leave(self._kept)
        events.append((job, n_fed))
        return 0

    def _advance(self, prompt: RunningSequence, n_tokens: int, events: list[tuple[Job, Event]]) -> int:
        """Run up to ``n_tokens`` of a prompt and return how many ran. The last token is left for the batch."""
        cache = prompt.cache if prompt.cache is not None else self._begin(prompt, events)
        if prompt.n_left <= min(n_tokens * STRETCH, self._budget.step_size):
            n_tokens = prompt.n_left
        end = min(prompt.trail.end(prompt.n_done, n_tokens), len(prompt.ids) - 1)
        n = end - prompt.n_done
        if n:
            started_s = self._clock()
            prefill(self.model, cache, prompt.ids[prompt.n_done : end].tolist(), self._loaded.quantization)
            self._budget.note(n, self._clock() - started_s)
            prompt.n_done = end
            prompt.trail.reached(cache, end)
        self._advanced(prompt)
        return n

    def _advanced(self, prompt: RunningSequence) -> None:
        prompt.choice.job.n_prefilled = prompt.n_done
        if not prompt.n_left:
            self.waiting.remove(prompt)
            self.prefilled.append(prompt)

    def _begin(self, prompt: RunningSequence, events: list[tuple[Job, Event]]) -> list[Any]:
        """Give a prompt its cache, with the prefix that it can reuse, and tell its client so."""
        job = prompt.choice.job
        cache = self._share(prompt, prompt.donor) if prompt.donor is not None else None
        if cache is None:
            cache, prompt.n_done, prompt.trail.kept = self._kept.fetch(prompt.ids, prompt.scope, job)
        if cache is None:
            cache = make_prompt_cache(self.model)
        prompt.cache = cache
        self._kept.unpin(job)
        # Drop the references to others, so that ended sequences are freed.
        prompt.donor, prompt.found = None, Reusable()
        if not self._loaded.trimmable:
            self._plan_stops(prompt, cache)
        if not prompt.has_started:
            prompt.has_started = True
            events.append((job, Started(job.index, prompt.n_done)))
        return cache

    def _plan_stops(self, prompt: RunningSequence, cache: list[Any]) -> None:
        """Choose where the slices of a prompt end whose cache can't be cut back later.

        They end where kept prefixes and waiting prompts part from it, at borders of turns, and at the prompt's end.
        """
        most = len(prompt.ids) - 1
        in_common = [prompt.common(other) for other in self.waiting if other.cache is None]
        wanted = {self._kept.shared(prompt.ids, prompt.scope), *in_common}
        prompt.trail.resume(cache, prompt.n_done)
        likely = {*borders(prompt.ids, prompt.n_done, self._loaded.control_ids), most}
        prompt.trail.plan(prompt.n_done, {min(position, most) for position in wanted}, likely)

    def _share(self, prompt: RunningSequence, donor: RunningSequence) -> list[Any] | None:
        """A copy of the first tokens of a running sequence's cache; None when its length is not as expected."""
        row, checkpoints = donor.row, donor.trail.kept
        if row is None:
            # Until the donor decodes, its cache is its own.
            assert donor.cache is not None
            shared = cut(donor.cache, donor.n_done, checkpoints, prompt.n_done)
        elif self._loaded.trimmable:
            shared = self._copy(row, prompt.n_done)
        else:
            shared = cut(self._copy(row, None), len(row.tokens), checkpoints, prompt.n_done, is_own=True)
        if not is_whole(shared, prompt.n_done):
            return None
        prompt.trail.kept = up_to(checkpoints, prompt.n_done)
        return shared


def _n_left(prompt: RunningSequence) -> int:
    return prompt.n_left


def _cost(n_tokens: int, n_overhead: int) -> int:
    """What is left of a step's tokens is this much less after a pass: the next one has an overhead too."""
    return n_tokens + n_overhead if n_tokens else 0


def attempt(loaded: Loaded, job: Job, work: Callable[[], T]) -> T | Failed:
    """The result of ``work``, which runs one job's prompt. If it raises, that job alone fails.

    With several ranks this holds only for errors that all ranks raise alike. Other errors propagate and end them.
    """
    own = ALIKE if loaded.agree is not None else (*ALIKE, *_OF_MLX)
    try:
        return work()
    except own as error:
        log.exception("a prompt could not be run through the model")
        if isinstance(error, _OF_MLX):
            # The error may be a lack of memory.
            loaded.prefix_cache.shrink(0)
        return Failed(job.index, internal_error())
