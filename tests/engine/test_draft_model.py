"""The draft model's rows keep up with the model's: then one that is the model itself is right in every draft."""

from dataclasses import replace

import pytest

from mlx_serve.engine.backend import is_last
from mlx_serve.engine.cache import banks
from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.values import Started, TokenEvent
from tests.engine.test_drafts_in_batch import PROMPTS, Always, drafting, job, replace_queue, step
from tests.engine.tinymodel import loaded, tiny_gemma, tiny_llama

SYSTEM = [i % 250 for i in range(3, 63)]


class Session:
    """A backend with a draft model, by default the model itself, and what came of its jobs.

    No answer ends before its last token: what was drafted behind its end would count as wrong.
    """

    def __init__(self, make=tiny_llama, length=None, draft=None, **changes):
        whole = replace(loaded(make()), eos_ids=frozenset(), **changes)
        self.backend = drafting(whole, "model", Always(length), (draft or make)())
        self.tokens, self.cached, self._running = {}, {}, set()

    def insert(self, *jobs):
        for one in jobs:
            self.backend.insert(one)
            self._running.add(one)

    def take_out(self, take, *jobs):
        """By ``remove`` or ``pause`` of the backend."""
        self._note(take(jobs) or ())
        self._running -= set(jobs)

    def step(self, n_steps=500):
        """So many steps, or until all jobs have ended."""
        while self._running and n_steps:
            self._note(step(self.backend))
            n_steps -= 1

    def _note(self, events):
        for one, event in events:
            if isinstance(event, Started):
                self.cached[one] = event.cached_tokens
            elif isinstance(event, TokenEvent):
                self.tokens.setdefault(one, []).append(event.token)
            if is_last(event):
                self._running.discard(one)

    def end(self):
        """All jobs end, and no draft was wrong."""
        self.step()
        assert not self._running
        assert self.backend.n_accepted == self.backend.n_drafted > 30


@pytest.mark.parametrize(
    ("make", "quantization"),
    [
        (tiny_llama, None),
        (tiny_gemma, None),
        # Long enough answers are quantized on their way.
        (lambda: tiny_llama(head_dim=32), Quantization(8, 32, start=40)),
    ],
    ids=["plain", "windows", "quantized"],
)
def test_rows_that_join_leave_and_move_are_followed(make, quantization, monkeypatch):
    monkeypatch.setattr(banks, "_FIRST_BANK", 32)
    session = Session(make, quantization=quantization)
    for prompt, n in zip(PROMPTS * 3, [1, 40, 9, 60] * 3, strict=True):
        session.insert(job(prompt, n))
        session.step(3)
    session.end()


def test_kept_prefixes_come_back_with_both_models_caches():
    session = Session()
    session.insert(first := job(SYSTEM, 20))
    session.step()
    turn = [*SYSTEM, *session.tokens[first]]
    session.insert(second := job([*turn, 5, 6, 7], 60))
    session.end()
    assert session.cached[second] >= len(turn) - 1


def test_a_running_sequence_gives_others_both_models_caches():
    session = Session()
    session.insert(job([*SYSTEM, 1], 60))
    session.step(8)
    others = [job([*SYSTEM, *more], 40) for more in ([1, 2, 3], [8])]
    session.insert(*others)
    session.end()
    assert all(session.cached[one] >= len(SYSTEM) for one in others)


def test_jobs_that_pause_or_are_cancelled_are_kept_with_both_models_caches():
    session = Session()
    gone, paused, stays = [job(prompt, 100) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
    session.insert(gone, paused, stays)
    session.step(12)
    session.take_out(session.backend.remove, gone)
    session.take_out(session.backend.pause, paused)
    session.step(2)
    again = replace_queue(gone)
    session.insert(paused, again)
    session.end()
    assert session.cached[again] == len(PROMPTS[0]) - 1
    assert len(session.tokens[paused]) == 100


@pytest.mark.parametrize("most", [0, 1])
def test_a_request_limits_its_drafts(most):
    session = Session(length=7)
    session.insert(job(PROMPTS[0], 60, n_draft_tokens=most), job(PROMPTS[1], 100))
    session.step(3)
    n_before, n_steps = session.backend.n_drafted, 4
    session.step(n_steps)
    assert session.backend.n_drafted - n_before == n_steps * (7 + most)
    session.end()


def test_without_drafts_the_draft_model_follows_in_a_few_passes():
    session = Session(length=0)
    rows, passes = session.backend._rows, []
    model = rows._draft_model
    rows._draft_model = lambda inputs, cache: (passes.append(inputs.shape), model(inputs, cache=cache))[1]
    session.insert(*[job(prompt, 120) for prompt in PROMPTS[:2]])
    session.step(70)
    assert 3 <= len(passes) <= 70 / 14
    assert all(n_rows == 2 for n_rows, _ in passes)
    rows.draft_length = Always(7)
    session.end()


@pytest.mark.parametrize(("seed", "low", "high"), [(0, 0.95, 1), (3, 0, 0.3)])
def test_how_often_it_would_be_right_is_known_without_drafts(seed, low, high):
    session = Session(length=0, draft=lambda: tiny_llama(seed))
    session.insert(*[job(prompt, 200) for prompt in PROMPTS[:2]])
    session.step(150)
    # What comes later is expected to be like what was.
    session.insert(job(PROMPTS[3], 9))
    session.step(2)
    chances = [row.guesses.value for row in session.backend._decoding]
    assert len(chances) == 3
    assert all(low <= chance <= high for chance in chances)
