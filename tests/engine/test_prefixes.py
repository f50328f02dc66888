"""What is reused of former and of concurrent prompts, and that nothing that is reused changes a token."""

import weakref
from dataclasses import replace
from itertools import count
from queue import SimpleQueue

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, make_prompt_cache

from mlx_serve.engine.backend import StepPlan
from mlx_serve.engine.cache.checkpoints import Checkpoint
from mlx_serve.engine.cache.kinds import cut_back
from mlx_serve.engine.cache.lone import LoneCache
from mlx_serve.engine.cache.prefix_tree import as_ids, common
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.cache.size import measure
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.side_by_side import prefill_together
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.testing import FakeModels
from mlx_serve.values import Job, Prompt, PromptLogprobs, Sampling, Started, TokenEvent
from tests.engine.tinymodel import loaded, one_by_one, tiny_gemma, tiny_lfm2, tiny_llama

GAP_S = 0.2
SYSTEM = [i % 250 for i in range(3, 123)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def batch_of(model, options=None, **kwargs):
    trimmable = kwargs.pop("trimmable", True)
    return BatchBackend(replace(loaded(model, **kwargs), trimmable=trimmable), options or BatchOptions())


def single_of(model, options=None, **kwargs):
    trimmable = kwargs.pop("trimmable", True)
    return one_by_one(replace(loaded(model, **kwargs), trimmable=trimmable), options)


def job(prompt, max_tokens=6, scope="", **sampling):
    return Job("m", Prompt(tuple(prompt)), Sampling(max_tokens, **sampling), 0, SimpleQueue(), scope=scope)


class Seen:
    """Runs jobs on a backend, and notes what came of each."""

    def __init__(self, backend):
        self.backend = backend
        self.cached = {}
        self.tokens = {}
        self.order = []
        self.scores = {}

    def step(self, plan=None):
        """As planned here, or by what was measured."""
        events = self.backend.step(GAP_S) if plan is None else self.backend.run_step(plan)
        for a_job, event in events:
            if isinstance(event, Started):
                self.cached[a_job] = event.cached_tokens
                self.order.append(a_job)
            elif isinstance(event, TokenEvent):
                self.tokens.setdefault(a_job, []).append(event.token)
            elif isinstance(event, PromptLogprobs):
                self.scores[a_job] = event.logprobs
        return [a_job for a_job, event in events if getattr(event, "finish", None) or getattr(event, "is_last", False)]

    def run(self, *jobs, plan=None):
        for a_job in jobs:
            self.backend.insert(a_job)
        left = set(jobs)
        while left:
            left -= set(self.step(plan))
        return [self.tokens[a_job] for a_job in jobs]


def fresh(make, model, prompt, max_tokens=6, **kwargs):
    """What a backend that has seen nothing yet generates."""
    return Seen(make(model, **kwargs)).run(job(prompt, max_tokens))[0]


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_the_next_turn_prefills_what_is_new(model, make):
    seen = Seen(make(model))
    first = job(SYSTEM)
    (answer,) = seen.run(first)
    turn = [*SYSTEM, *answer[:-1], 5, 6, 7]
    second, again = job(turn), job(SYSTEM)
    assert seen.run(second) == [fresh(make, model, turn)]
    assert seen.cached[second] >= len(SYSTEM) + len(answer) - 1
    assert seen.run(again) == [answer]
    assert seen.cached[again] == len(SYSTEM) - 1


def test_concurrent_prompts_share_one_prefill(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16)))
    jobs = [job([*SYSTEM, i, i + 1, i + 2]) for i in range(8)]
    prompts = [list(a_job.prompt.tokens) for a_job in jobs]
    answers = seen.run(*jobs)
    assert answers == [fresh(batch_of, model, prompt) for prompt in prompts]
    assert seen.order[0] is jobs[0]
    assert seen.cached[jobs[0]] == 0
    # The last few tokens are not worth waiting for.
    assert all(seen.cached[a_job] > len(SYSTEM) - 32 for a_job in jobs[1:])


def test_a_step_of_one_token_goes_on_too(model):
    backend = batch_of(model)
    two = [job(SYSTEM, 1000), job(SYSTEM[::-1], 1000)]
    for a_job in two:
        backend.insert(a_job)
    for _ in range(len(SYSTEM) * 2):
        backend.run_step(StepPlan(1))
    assert backend.n_decoding == 2


def test_the_samples_of_a_request_share_one_prefill(model):
    seen = Seen(batch_of(model))
    jobs = [job(SYSTEM, temperature=1.0, seed=i) for i in range(4)]
    answers = seen.run(*jobs)
    assert [seen.cached[a_job] for a_job in jobs] == [0, *[len(SYSTEM) - 1] * 3]
    assert answers == [Seen(batch_of(model)).run(job(SYSTEM, temperature=1.0, seed=i))[0] for i in range(4)]


def test_a_prompt_shares_what_a_decoding_one_holds(model):
    seen = Seen(batch_of(model))
    first, second = job(SYSTEM, 50), job([*SYSTEM, 9])
    seen.backend.insert(first)
    while first not in seen.tokens:
        seen.step()
    assert seen.run(second) == [fresh(batch_of, model, [*SYSTEM, 9])]
    assert seen.cached[second] == len(SYSTEM)


def test_who_waits_for_a_prefill_that_is_cancelled_does_it_itself(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16), max_sequences=0))
    first, second = job([*SYSTEM, 1]), job([*SYSTEM, 2])
    seen.backend.insert(first)
    seen.backend.insert(second)
    seen.step()
    assert seen.order == [first]
    seen.backend.remove([first])
    while second not in seen.tokens:
        seen.step()
    assert seen.cached[second] == 0


def test_what_a_cancelled_job_computed_is_kept(model):
    seen = Seen(batch_of(model))
    first, second = job(SYSTEM, 50), job([*SYSTEM, 9])
    seen.backend.insert(first)
    while first not in seen.tokens:
        seen.step()
    seen.backend.remove([first])
    seen.run(second)
    assert seen.cached[second] == len(SYSTEM)


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_penalties_count_the_tokens_of_a_reused_prefix(model, make):
    prompt, penalty = [*SYSTEM, 9], {"repetition_penalty": 3.0, "repetition_context_size": 200}

    def answer(*before, **sampling):
        seen = Seen(make(model))
        for one in before:
            seen.run(one)
        last = job(prompt, 12, **sampling)
        return seen.run(last)[0], seen.cached[last]

    want, n_cached = answer(**penalty)
    assert n_cached == 0
    assert answer(job(SYSTEM), **penalty) == (want, len(SYSTEM))
    # They look so far back that it is felt.
    assert want not in (answer()[0], answer(**(penalty | {"repetition_context_size": 12}))[0])


@pytest.mark.parametrize("n_steps", [0, 1, 2])
def test_a_cancelled_scoring_job_runs_no_further(model, n_steps):
    seen = Seen(batch_of(model))
    scored, other = job(SYSTEM, 3, prompt_logprobs=1), job([1, 2, 3], 6)
    seen.backend.insert(scored)
    seen.backend.insert(other)
    for _ in range(n_steps):
        seen.step(StepPlan(16))
    assert scored not in seen.scores
    seen.backend.remove([scored])
    while len(seen.tokens.get(other, ())) < 6:
        assert scored not in seen.step(StepPlan(200))
    assert scored not in seen.cached
    assert scored not in seen.tokens
    assert seen.tokens[other] == fresh(batch_of, model, [1, 2, 3])


WINDOWED = {"gemma": tiny_gemma, "lfm2": tiny_lfm2}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_cache_that_cannot_be_cut_back_is_reused_only_where_a_copy_was_kept(name):
    model = WINDOWED[name]()

    def make():
        return batch_of(model, trimmable=False)

    seen = Seen(make())
    first = job(SYSTEM)
    (answer,) = seen.run(first)
    again = job(SYSTEM)
    assert seen.run(again) == [answer]
    # Its second prompt shows where prompts have a beginning in common; a copy is kept there.
    third, fourth = job([*SYSTEM[:80], 1, 2, 3]), job([*SYSTEM[:80], 4, 5, 6])
    prompts = [list(a_job.prompt.tokens) for a_job in (third, fourth)]
    assert seen.run(third) == [Seen(make()).run(job(prompts[0]))[0]]
    assert seen.cached[third] == 0
    assert seen.run(fourth) == [Seen(make()).run(job(prompts[1]))[0]]
    assert seen.cached[fourth] == 80


@pytest.mark.parametrize("name", WINDOWED)
def test_concurrent_prompts_share_caches_that_cannot_be_cut_back(name):
    model = WINDOWED[name]()
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16), trimmable=False))
    jobs = [job([*SYSTEM, i, i + 1, i + 2]) for i in range(4)]
    answers = seen.run(*jobs)
    alone = [Seen(batch_of(model, trimmable=False)).run(job(a_job.prompt.tokens))[0] for a_job in jobs]
    assert answers == alone
    assert [seen.cached[a_job] for a_job in jobs] == [0, *[len(SYSTEM)] * 3]


def test_the_last_turn_s_beginning_is_kept_of_what_cannot_be_cut_back():
    model = tiny_gemma()
    backend = BatchBackend(replace(loaded(model), trimmable=False, control_ids=frozenset([251])), BatchOptions())
    seen = Seen(backend)
    # 251 opens the answer; the next turn puts something else behind it (a thought was dropped).
    first, second = job([*SYSTEM, 251, 7, 8]), job([*SYSTEM, 251, 9, 10, 11])
    seen.run(first)
    seen.run(second)
    assert seen.cached[second] == len(SYSTEM)


def test_a_short_prompt_does_not_wait_behind_long_ones(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=8)))
    long = [job([i, *SYSTEM, *SYSTEM], 2) for i in (1, 2)]
    short = job([3, 4, 5], 2)
    seen.run(*long, short)
    assert seen.order == [long[0], short, long[1]]


def test_the_first_prompt_is_not_held_back_by_short_ones(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=8, prompt_concurrency=2)))
    long = job([1, *SYSTEM], 2)
    seen.backend.insert(long)
    for i in range(60):
        if long in seen.tokens:
            break
        seen.backend.insert(job([i, i], 1))
        seen.step(StepPlan(8))
    assert long in seen.tokens


def test_every_other_turn_is_the_first_prompt_s_and_the_others_go_to_the_one_soonest_done(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16)))
    first, second = job([1, *range(120)]), job([2, *range(80)])
    seen.backend.insert(first)
    seen.backend.insert(second)
    left = []
    for _ in range(6):
        seen.step(StepPlan(16, decodes=False))
        left.append([sequence.n_left for sequence in seen.backend._prompts.waiting])
    assert left == [[104, 80], [104, 64], [88, 64], [88, 48], [72, 48], [72, 32]]


def test_a_short_prompt_beside_a_long_one_is_done_first(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16)))
    long, short = job([1, *SYSTEM]), job([2, 3, 4])
    seen.backend.insert(long)
    seen.step(StepPlan(16))
    assert seen.run(short, plan=StepPlan(16)) == [fresh(batch_of, model, [2, 3, 4])]
    assert long not in seen.tokens


def test_what_is_left_of_a_step_is_spent_on_the_next_prompts(model):
    seen = Seen(batch_of(model))
    for i in range(5):
        seen.backend.insert(job([i, i]))
    seen.step(StepPlan(64, decodes=False))
    assert len(seen.backend._prompts.prefilled) == 5


def test_prompts_that_came_together_get_their_first_token_in_the_same_step(model):
    seen = Seen(batch_of(model))
    jobs = [job([i, *SYSTEM]) for i in range(3)]
    for a_job in jobs:
        seen.backend.insert(a_job)
    while seen.backend._prompts.waiting:
        seen.step(StepPlan(32, decodes=False))
        assert not seen.tokens
    while len(seen.tokens.get(jobs[0], ())) < 6:
        seen.step()
        assert len({len(seen.tokens.get(a_job, ())) for a_job in jobs}) == 1
    assert [seen.tokens[a_job] for a_job in jobs] == [fresh(batch_of, model, a_job.prompt.tokens) for a_job in jobs]


@pytest.mark.parametrize("n_steps", [0, 1, 20])
def test_a_job_is_cancelled_before_in_and_after_its_prefill(model, n_steps):
    seen = Seen(batch_of(model))
    first, second = job(SYSTEM), job([*SYSTEM, 9])
    seen.backend.insert(first)
    for _ in range(n_steps):
        seen.step(StepPlan(32, decodes=False))
    seen.backend.remove([first])
    assert [*seen.backend._prompts.waiting, *seen.backend._prompts.prefilled] == []
    assert seen.backend.n_cached == (n_steps > 0)
    assert seen.run(second) == [fresh(batch_of, model, [*SYSTEM, 9])]
    assert seen.cached[second] == {0: 0, 1: 32, 20: len(SYSTEM) - 1}[n_steps]


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize("of", [tiny_llama, tiny_gemma, tiny_lfm2])
def test_who_asks_again_after_a_time_out_gets_further_each_time(make, of):
    model = of()
    seen = Seen(make(model, trimmable=of is tiny_llama))
    for n_done in (0, 40, 80):
        tried = job(SYSTEM)
        seen.backend.insert(tried)
        seen.step(StepPlan(40))
        assert seen.cached[tried] == n_done
        seen.backend.remove([tried])
    assert seen.run(job(SYSTEM)) == [fresh(make, model, SYSTEM)]


def test_a_prompt_that_fails_on_the_way_leaves_no_cache(model, monkeypatch):
    seen = Seen(single_of(model))
    seen.backend.insert(job(SYSTEM))
    seen.step(StepPlan(40))
    monkeypatch.setattr("mlx_serve.engine.generate.prompts.prefill", lambda *_: 1 / 0)
    seen.step(StepPlan(40))
    assert not seen.backend._prompts.waiting
    assert seen.backend.n_cached == 0


def test_what_a_cancelled_job_computed_is_held_by_nobody_who_waits_for_it(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16), max_sequences=0))
    first, second = job([*SYSTEM, 1]), job([*SYSTEM, 2])
    seen.backend.insert(first)
    seen.backend.insert(second)
    seen.step()
    cache = weakref.ref(seen.backend._prompts.waiting[0].cache[0])
    seen.backend.remove([first])
    assert cache() is None


@pytest.mark.parametrize("step_size", [1, 2, 3])
def test_the_smallest_steps_come_to_an_end(model, step_size):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=step_size)))
    scored = job([1, 2, 3, 4], 2, prompt_logprobs=1)
    seen.backend.insert(scored)
    assert seen.run(job([5, 6, 7], 2)) == [fresh(batch_of, model, [5, 6, 7], 2)]


@pytest.mark.parametrize("runs", [True, False])
def test_a_short_prompt_takes_no_room_for_the_long_one_whose_beginning_it_has(model, runs):
    seen = Seen(batch_of(model))
    long, short = job([*SYSTEM, *SYSTEM[::-1], *SYSTEM, *SYSTEM], 50 if runs else 2), job([*SYSTEM, 1, 2, 3])
    if runs:
        seen.backend.insert(long)
        while long not in seen.tokens:
            seen.step()
    else:
        seen.run(long)
    seen.backend.insert(short)
    seen.step(StepPlan(64, decodes=False))
    (sequence,) = seen.backend._prompts.prefilled
    assert sequence.n_done == len(SYSTEM) + 2
    # mlx-lm gets room for 256 tokens at a time.
    assert all(layer.keys.shape[2] <= len(SYSTEM) + 256 for layer in sequence.cache)
    while len(seen.tokens.get(short, ())) < 6:
        seen.step()
    assert seen.tokens[short] == fresh(batch_of, model, [*SYSTEM, 1, 2, 3])


def test_streams_wait_for_scores_no_longer_than_for_prompts(model):
    ticks = count()
    # A pass takes a second, whatever it is: a stream waits for 16 of them at most.
    backend = BatchBackend(loaded(model), BatchOptions(prefill_step_size=16), lambda: float(next(ticks)))
    seen = Seen(backend)
    stream = job([1, 2, 3], 50)
    seen.run(job([1, 2], 3))
    seen.backend.insert(stream)
    while stream not in seen.tokens:
        seen.step()
    seen.backend.insert(job([*SYSTEM, *SYSTEM]))
    seen.backend.insert(job(SYSTEM, 0, prompt_logprobs=1))
    n_plans = 0
    while not (plan := seen.backend.plan_step(GAP_S)).decodes:
        seen.step(plan)
        n_plans += 1
    assert n_plans == 8


def test_short_prompts_run_in_one_pass_with_the_tokens_of_each_alone(model, monkeypatch):
    passes = []

    def spied(model, caches, prompts):
        passes.append(sorted(map(len, prompts)))
        return prefill_together(model, caches, prompts)

    monkeypatch.setattr("mlx_serve.engine.generate.prompts.prefill_together", spied)
    prompts = [list(range(start, start + n)) for start, n in ((1, 11), (20, 16), (40, 13), (70, 61))]
    seen = Seen(batch_of(model))
    jobs = [job(prompt, 6) for prompt in prompts]
    for each in jobs:
        seen.backend.insert(each)
    # Three are alike in length; to pad them to the fourth would cost more than a pass.
    seen.step(StepPlan(45, n_overhead=20))
    assert passes == [[10, 12, 15]]
    assert [each.n_prefilled for each in jobs] == [10, 15, 12, 0]
    assert set(seen.order) == set(jobs[:3])
    while len(seen.tokens.get(jobs[3], [])) < 6:
        seen.step(StepPlan(64))
    assert [seen.tokens[each] for each in jobs] == [fresh(batch_of, model, prompt) for prompt in prompts]


def test_the_oldest_prompt_has_every_other_step_also_beside_short_ones_in_one_pass(model):
    prompts = [list(range(60, 260)), list(range(1, 12)), list(range(20, 36)), list(range(40, 53))]
    seen = Seen(batch_of(model))
    jobs = [job(prompt, 6) for prompt in prompts]
    for each in jobs:
        seen.backend.insert(each)
    seen.step(StepPlan(64, n_overhead=20))
    assert [each.n_prefilled for each in jobs] == [64, 0, 0, 0]
    # What the three leave of a step is too little for a pass.
    seen.step(StepPlan(64, n_overhead=20))
    assert [each.n_prefilled for each in jobs] == [64, 10, 15, 12]
    seen.step(StepPlan(64, n_overhead=20))
    assert jobs[0].n_prefilled == 128


def test_prompts_that_are_nearly_as_long_as_a_step_run_in_it_one_by_one(model):
    seen = Seen(batch_of(model))
    jobs = [job(list(range(start, start + 61)), 6) for start in (1, 70)]
    for each in jobs:
        seen.backend.insert(each)
    # A second pass for the ten tokens too many would cost more than they do.
    seen.step(StepPlan(110))
    assert [each.n_prefilled for each in jobs] == [60, 60]


@pytest.mark.parametrize(("n_held", "n_done"), [(21, [40, 0]), (22, [40, 41])])
def test_prompts_in_one_pass_hold_none_of_them_for_long(model, n_held, n_done):
    seen = Seen(batch_of(model))
    jobs = [job(list(range(start, start + n)), 6) for start, n in ((1, 41), (60, 42))]
    for each in jobs:
        seen.backend.insert(each)
    # A pass for both has 42 tokens more than one for the first, and one overhead of 20 less than two passes.
    seen.step(StepPlan(500, n_held=n_held, n_overhead=20))
    assert [each.n_prefilled for each in jobs] == n_done


def test_a_prompt_with_few_tokens_left_does_not_wait_for_others_in_one_pass(model):
    prompts = [list(range(60, 100)), list(range(1, 12)), list(range(20, 36)), list(range(40, 53))]
    seen = Seen(batch_of(model))
    jobs = [job(prompt, 6) for prompt in prompts]
    seen.backend.insert(jobs[0])
    seen.step(StepPlan(30, decodes=False))
    for each in jobs[1:]:
        seen.backend.insert(each)
    seen.step(StepPlan(64, n_held=30, n_overhead=20))
    assert [each.n_prefilled for each in jobs] == [39, 10, 0, 12]


@pytest.mark.parametrize(("n_held", "n_done"), [(68, [10, 12, 0]), (69, [10, 12, 55])])
def test_prompts_in_one_pass_are_held_by_each_other_and_by_the_next(model, n_held, n_done):
    seen = Seen(batch_of(model))
    jobs = [job(list(range(start, start + n)), 6) for start, n in ((1, 11), (20, 13), (60, 56))]
    for each in jobs:
        seen.backend.insert(each)
    # The pass for two has 24 tokens, 14 more than the first needs.
    seen.step(StepPlan(500, n_held=n_held, n_overhead=20))
    assert [each.n_prefilled for each in jobs] == n_done


def test_what_needs_no_pass_begins_with_those_that_ran_in_one(model):
    seen = Seen(batch_of(model))
    prompts = [list(range(1, 42)), list(range(1, 42)), list(range(60, 101))]
    for prompt in prompts:
        seen.backend.insert(job(prompt, 6))
    seen.step(StepPlan(90, n_held=42, n_overhead=20))
    assert seen.backend.n_decoding == 3


def test_every_pass_of_a_step_counts_with_its_overhead(model):
    seen = Seen(batch_of(model))
    jobs = [job(list(range(start, start + n)), 6) for start, n in ((1, 11), (60, 41), (130, 46))]
    for each in jobs:
        seen.backend.insert(each)
    seen.step(StepPlan(100, n_overhead=30))
    assert [each.n_prefilled for each in jobs] == [10, 40, 0]


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("[metal::malloc] no memory")])
def test_prompts_that_do_not_run_side_by_side_run_alone(model, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr("mlx_serve.engine.generate.prompts.prefill_together", refuse)
    seen = Seen(batch_of(model))
    prompts = [list(range(1, 12)), list(range(20, 31))]
    jobs = [job(prompt, 6) for prompt in prompts]
    for each in jobs:
        seen.backend.insert(each)
    while len(seen.tokens) < 2 or min(map(len, seen.tokens.values())) < 6:
        seen.step(StepPlan(64, n_overhead=20))
    assert [seen.tokens[each] for each in jobs] == [fresh(batch_of, model, prompt) for prompt in prompts]


def test_prompts_with_much_in_common_do_not_compute_it_side_by_side(model):
    seen = Seen(batch_of(model))
    jobs = [job([*SYSTEM, end, end + 1], 2) for end in (1, 5)]
    for each in jobs:
        seen.backend.insert(each)
    seen.step(StepPlan(2048, n_overhead=1000))
    assert seen.cached == {jobs[0]: 0, jobs[1]: len(SYSTEM)}


def test_a_prompt_that_is_done_is_held_for_those_alone_that_are_done_soon(model):
    seen = Seen(batch_of(model))
    first, soon, later = (job(list(range(start, start + n)), 4) for start, n in ((1, 11), (20, 16), (40, 17)))
    for each in (first, soon, later):
        seen.backend.insert(each)
    # 10, 15 and 16 tokens, and 20 may follow the first.
    seen.step(StepPlan(500, n_held=20))
    assert [each.n_prefilled for each in (first, soon, later)] == [10, 15, 0]
    assert seen.backend.n_decoding == 2


@pytest.mark.parametrize("kind", [KVCache, ConcatenateKVCache, lambda: ChunkedKVCache(400)])
def test_what_was_cut_back_goes_on_where_it_was_cut(kind):
    numbers = mx.arange(300.0)[None, None, :, None]
    layer = kind()
    layer.update_and_fetch(numbers, numbers)
    cut_back([layer], 297)
    keys, values = layer.update_and_fetch(numbers[..., 7:8, :], numbers[..., 8:9, :])
    assert keys.flatten().tolist() == [0, 1, 2, 7]
    assert values.flatten().tolist() == [0, 1, 2, 8]
    assert layer.offset == 4
    assert layer.keys.shape[2] <= 3 + 256


@pytest.mark.parametrize("kind", [KVCache, ConcatenateKVCache])
def test_a_sequence_that_runs_alone_drops_wrong_drafts(kind):
    numbers = mx.arange(300.0)[None, None, :, None]
    alone, layer = LoneCache(), kind()
    layer.update_and_fetch(numbers[..., :3, :], numbers[..., :3, :])
    alone.join([layer], 3)
    alone.begin(4)
    layer.update_and_fetch(numbers[..., 3:7, :], numbers[..., 3:7, :])
    alone.advance([1])
    keys, values = layer.update_and_fetch(numbers[..., 7:8, :], numbers[..., 8:9, :])
    assert keys.flatten().tolist() == [0, 1, 2, 3, 7]
    assert values.flatten().tolist() == [0, 1, 2, 3, 8]


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_s_own_probabilities(model, make, max_tokens):
    prompt = SYSTEM[:40]
    logits = model(mx.array(prompt)[None])[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    seen = Seen(make(model))
    scored = job(prompt, max_tokens, prompt_logprobs=2)
    seen.backend.insert(scored)
    while scored not in seen.step():
        pass
    scores = seen.scores[scored]
    assert len(scores) == len(prompt) - 1
    for i, (logprob, top) in enumerate(scores):
        assert logprob == pytest.approx(float(logprobs[i, prompt[i + 1]]), abs=1e-4)
        assert top[0][1] == pytest.approx(float(logprobs[i].max()), abs=1e-4)
        assert len(top) == 2
    if max_tokens:
        assert seen.tokens[scored] == fresh(make, model, prompt, max_tokens)


class Layer:
    """Stands for a layer's cache."""

    def __init__(self, n_bytes, trims):
        self.nbytes, self.trims, self.state, self.n_trimmed = n_bytes, trims, [], 0

    def is_trimmable(self):
        return self.trims

    def trim(self, n):
        self.n_trimmed += n
        return n


@pytest.fixture
def layer():
    """The prefix cache by itself, on layers that only count."""
    return lambda n_bytes=10, trims=True: [Layer(n_bytes, trims)]


def covers(cache, prompt, scope=""):
    place = cache.place(prompt, scope)
    n = cache.covers(place)
    cache.leave(place)
    return n


def ids(*parts):
    return as_ids([token for part in parts for token in part])


A, B, C, D = [1] * 20, [2] * 20, [3] * 20, [4] * 20


def test_what_was_used_last_goes_last(layer):
    cache = PrefixCache(2, None)
    cache.store(ids(A), layer())
    cache.store(ids(B), layer())
    assert cache.fetch(ids(A, [9]))[1] == 20
    cache.store(ids(C), layer())
    assert [covers(cache, ids(one, [9])) for one in (A, B, C)] == [20, 0, 20]
    assert (len(cache), cache.n_bytes, cache.n_evicted) == (2, 20, 1)


def test_bytes_are_bounded(layer):
    cache = PrefixCache(100, 25)
    for one in (A, B, C):
        cache.store(ids(one), layer())
    assert (len(cache), cache.n_bytes) == (2, 20)
    cache.shrink(0)
    assert (len(cache), cache.n_bytes) == (0, 0)


def test_a_longer_sequence_takes_the_place_of_its_prefix_where_caches_can_be_cut_back(layer):
    cache = PrefixCache(10, None)
    cache.store(ids(A), layer())
    cache.store(ids(A, B), layer())
    assert len(cache) == 1
    cache.store(ids(A), layer())
    assert len(cache) == 1
    found, n, _ = cache.fetch(ids(A, C))
    assert (n, found[0].n_trimmed) == (20, 20)
    whole = PrefixCache(10, None)
    whole.store(ids(A), layer(trims=False))
    whole.store(ids(A, B), layer(trims=False))
    assert len(whole) == 2
    assert [covers(whole, ids(A, C)), covers(whole, ids(A, B, C)), covers(whole, ids(A))] == [20, 40, 0]


def test_what_is_pinned_is_evicted_last_and_the_latest_pin_first(layer):
    cache = PrefixCache(10, None)
    for one in (A, B, C, D):
        cache.store(ids(one), layer())
    for owner, one in (("first", A), ("second", C), ("third", A), ("fourth", B), ("none", [5] * 20)):
        cache.pin(owner, ids(one, [9]))
    cache.unpin("fourth")
    left = []
    for max_bytes in (30, 20, 10, 0):
        (number,) = cache.shrink(max_bytes)
        left.append("ABCD"[number])
    assert left == ["B", "D", "C", "A"]
    assert not cache._pins


def test_what_is_pinned_or_was_used_of_late_is_wanted(layer):
    now_s = 0.0
    cache = PrefixCache(10, None, clock=lambda: now_s)
    for i, one in enumerate((A, B, C)):
        cache.store(ids(one), layer(2**i))
    assert cache.wanted_bytes(5) == 7
    now_s = 10.0
    assert cache.wanted_bytes(5) == 0
    cache.pin("owner", ids(A, [9]))
    assert (cache.wanted_bytes(5), cache.covers(cache.pinned_place("owner")), cache.pinned_place("other")) == (
        1,
        20,
        None,
    )
    cache.fetch(ids(B, [9]))
    assert cache.wanted_bytes(5) == 3


def test_a_job_in_line_misses_what_no_kept_prefix_covers(model):
    backend = batch_of(model)
    seen = Seen(backend)
    seen.run(job(SYSTEM))
    known, unknown, of_others = job([*SYSTEM, 10, 11]), job([9] * 50), job([8] * 50)
    backend.pin([known, unknown])
    assert [backend.missing(one)[0] for one in (known, unknown, of_others)] == [2, 50, 0]
    assert backend.missing(unknown)[1] > backend.missing(known)[1]
    # A sequence that runs gives its own.
    sibling, running = job([9] * 50), job([9] * 50, 50)
    backend.insert(running)
    for _ in range(3):
        seen.step(StepPlan(512))
    backend.pin([known, unknown, sibling])
    assert [backend.missing(one)[0] for one in (known, unknown, sibling)] == [2, 1, 1]
    backend.remove([running])
    # The pins follow what is kept.
    backend.shrink_cache(0)
    backend.pin([known, unknown])
    assert backend.missing(known)[0] == len(SYSTEM) + 2


def test_what_is_pinned_stays_unless_it_is_asked_for(layer):
    cache = PrefixCache(2, None)
    cache.store(ids(A), layer())
    cache.store(ids(B), layer())
    cache.pin("owner", ids(A, [9]))
    cache.shrink(0, pinned=False)
    assert covers(cache, ids(A, [9])) == 20
    # A pin goes on to the sequence that takes the place of the pinned one.
    cache.store(ids(A, B), layer())
    cache.store(ids(C), layer())
    cache.shrink(10, pinned=False)
    assert [covers(cache, ids(one, [9])) for one in (A, C)] == [20, 0]
    # The number of sequences is bounded without regard to pins.
    cache.store(ids(B), layer())
    cache.store(ids(C), layer())
    assert covers(cache, ids(A, [9])) == 0


def test_what_is_claimed_is_not_counted_and_goes_to_its_owner(layer):
    cache = PrefixCache(10, None)
    kept = layer()
    cache.store(ids(A), kept)
    cache.claim("owner", ids(A, B))
    assert (len(cache), cache.n_bytes) == (0, 0)
    cache.shrink(0)
    # Others can still copy it, but have no claim of their own.
    cache.claim("other", ids(A, C))
    assert covers(cache, ids(A, C)) == 20
    copied, *_ = cache.fetch(ids(A, C), "", "other")
    assert copied is not kept
    assert cache.fetch(ids(A, B), "", "owner") == (kept, 20, [])
    assert covers(cache, ids(A, C)) == 0
    assert not cache._pins | cache._claims


def test_a_claim_that_is_given_up_is_kept_again(layer):
    cache = PrefixCache(1, 15)
    cache.store(ids(A), layer())
    cache.claim("owner", ids(A, B))
    cache.store(ids(C), layer())
    cache.unpin("owner")
    assert (len(cache), cache.n_bytes, covers(cache, ids(A, B)), covers(cache, ids(C, B))) == (1, 10, 20, 0)
    cache.claim("owner", ids(A, B))
    cache.forget_jobs()
    assert len(cache) == 1
    cache.claim("owner", ids(A, B))
    cache.clear()
    assert covers(cache, ids(A, B)) == 0


def test_what_cannot_be_cut_back_goes_to_its_owner_with_its_checkpoints(layer):
    cache = PrefixCache(10, None)
    kept, checkpoints = layer(trims=False), [Checkpoint(n, (Layer(1, trims=False),), 1) for n in (40, 200)]
    cache.store(ids(A * 10, B), kept, checkpoints=checkpoints)
    assert cache.n_bytes == 12
    cache.claim("owner", ids(A * 10, B, C))
    assert cache.n_bytes == 0
    assert [covers(cache, ids(A * n, C)) for n in (1, 3, 10)] == [0, 40, 200]
    assert cache.fetch(ids(A * 10, B, C), "", "owner") == (kept, 220, checkpoints)
    assert len(cache) == 0


def test_of_what_cannot_be_cut_back_a_copy_is_made_at_a_checkpoint(layer):
    cache = PrefixCache(10, None)
    checkpoints = [Checkpoint(n, (Layer(1, trims=False),), 1) for n in (40, 200)]
    cache.store(ids(A * 10, B * 9), layer(trims=False), checkpoints=checkpoints)
    found, n, some = cache.fetch(ids(A * 10, C), "", "owner")
    assert (n, some, len(cache)) == (200, checkpoints, 1)
    assert found[0] is not checkpoints[1].layers[0]
    # A newer one takes its place only if it reaches as far.
    cache.store(ids(A * 10, B * 9, C * 4), layer(trims=False), checkpoints=checkpoints)
    assert len(cache) == 2
    cache.store(ids(A * 10, B * 9, D), layer(trims=False), checkpoints=[*checkpoints, Checkpoint(370, (), 1)])
    assert len(cache) == 2
    assert [covers(cache, ids(A * 10, B * 9, end, [9])) for end in (C * 4, D, [9])] == [460, 400, 370]


ANSWER = [*range(100, 140)]


@pytest.mark.parametrize(
    ("prompt", "answer", "later", "is_taken"),
    [
        (A * 20, ANSWER, [*A * 20, *ANSWER, 9], True),
        (A * 20, ANSWER, [*A * 20, 9], True),
        # Another question to the same text: what is behind the text would be lost.
        ([*A * 20, *B * 5], ANSWER, [*A * 20, 9, 9], False),
        ([*A * 20, *B * 4], ANSWER[:5], [*A * 20, *B * 3, 9], True),
        # The opening of the answer is another one.
        ([*A * 20, 258], [*C * 30, *ANSWER], [*A * 20, *ANSWER, 9], True),
        (A * 20, [*C * 30, *ANSWER], [*A * 20, *ANSWER[5:20], 9], False),
        (A * 20, [*C * 30, *ANSWER], [*A * 20, *ANSWER, 9, 9, 9], True),
        # Not the same answer.
        (A * 20, [*C * 30, *ANSWER], [*A * 20, *D * 5], False),
        (A * 20, [*C * 30, *ANSWER], [*A * 20, 9], False),
    ],
)
def test_of_an_earlier_turn_only_what_a_later_one_has_is_worth_memory(layer, prompt, answer, later, is_taken):
    def one():
        cache = PrefixCache(10, None)
        cache.store(ids(prompt, answer), layer(), n_prompt=len(prompt))
        return cache

    claiming, storing = one(), one()
    claiming.claim("owner", ids(later))
    assert claiming.n_bytes == (0 if is_taken else 10)
    n = common(ids(prompt, answer), ids(later))
    found, n_found, _ = claiming.fetch(ids(later), "", "owner")
    assert (n_found, found[0].n_trimmed) == (n, len(prompt) + len(answer) - n)
    assert len(claiming) == (not is_taken)
    storing.store(ids(later), layer())
    assert len(storing) == (1 if is_taken else 2)


def test_another_rank_evicts_the_same_by_number(layer):
    caches = [PrefixCache(10, None) for _ in range(2)]
    for cache in caches:
        for one in (A, B, C):
            cache.store(ids(one), layer())
    caches[0].pin("owner", ids(A, [9]))
    caches[1].evict(caches[0].shrink(15))
    assert [[covers(cache, ids(one, [9])) for one in (A, B, C)] for cache in caches] == [[20, 0, 0]] * 2
    caches[1].clear()
    assert (len(caches[1]), caches[1].n_bytes) == (0, 0)


class Disk:
    """A tier that notes what it is given."""

    def __init__(self):
        self.saved = []

    def save(self, tokens, scope, cache):
        self.saved.append(tokens.tolist())


def counted(tokens):
    """A cache of one layer that says of which tokens it is."""
    layer = KVCache()
    numbers = mx.array(tokens, dtype=mx.float32)[None, None, :, None]
    layer.update_and_fetch(numbers, numbers)
    return [layer]


def test_a_cache_that_is_not_as_long_as_its_tokens_is_not_kept(caplog):
    cache = PrefixCache(10, None, tier=Disk())
    cache.store(ids(A, B), counted([*A, *B[:-1]]))
    assert (len(cache), cache._tier.saved) == (0, [])
    cache.store(ids(A, B), counted([*A, *B]))
    assert (len(cache), cache._tier.saved) == (1, [[*A, *B]])
    assert "does not hold the 40 tokens" in caplog.text


def test_what_is_kept_of_a_batch_does_not_keep_the_batch_in_memory():
    n_rows = 64
    numbers = mx.random.uniform(shape=(n_rows, 4, 256, 16))
    mx.eval(numbers)
    batch_bytes = numbers.nbytes
    before = mx.get_active_memory()
    layer = KVCache()
    layer.keys = layer.values = mx.contiguous(numbers[1:2, :, :200])
    layer.offset = 200
    cache = PrefixCache(10, None)
    cache.store(as_ids(range(200)), [layer])
    del numbers
    assert len(cache) == 1
    # What was kept is a row, and the rest is given back.
    assert before - mx.get_active_memory() >= batch_bytes * (n_rows - 2) // n_rows


def test_a_cache_that_has_changed_its_length_is_not_lent():
    cache = PrefixCache(10, None)
    cache.store(ids(A), counted(A))
    cache.store(ids(A, B), counted([*A, *B]))
    cache.store(ids(C), counted(C))
    next(iter(cache._entries)).cache[0].offset -= 1
    assert cache.fetch(ids(A, B, [9])) == (None, 0, [])
    assert [n for _, n, _ in (cache.fetch(ids(A, B, [9])), cache.fetch(ids(C, [9])))] == [0, 20]


def test_of_a_running_sequence_whose_cache_is_not_as_it_should_be_nothing_is_shared(model):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16)))
    first, second = job([*SYSTEM, 1]), job([*SYSTEM, 2])
    seen.backend.insert(first)
    seen.step(StepPlan(80, decodes=False))
    seen.backend._prompts.waiting[0].n_done -= 3
    seen.backend.insert(second)
    while second not in seen.cached:
        seen.step(StepPlan(1, decodes=False))
    assert seen.cached[second] == 0


def test_the_size_of_a_kv_cache_is_what_mlx_lm_makes_of_it(model):
    for one in (model, tiny_gemma(), tiny_lfm2()):
        size = measure([one])
        cache = make_prompt_cache(one)
        one(mx.array(SYSTEM * 5)[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        real = sum(layer.nbytes for layer in cache)
        assert real <= size.bytes(len(SYSTEM) * 5) <= real * 1.5 + 100_000


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_kept_prompts_are_apart_for_each_scope(model, make):
    seen = Seen(make(model))
    seen.run(job(SYSTEM, scope="a"))
    other, nobody, own = job(SYSTEM, scope="b"), job(SYSTEM), job(SYSTEM, scope="a")
    want = fresh(make, model, SYSTEM)
    assert [seen.run(one) for one in (other, own, nobody)] == [[want]] * 3
    assert [seen.cached[one] for one in (other, nobody, own)] == [0, 0, len(SYSTEM) - 1]
    assert seen.backend.n_cached == 3


@pytest.mark.parametrize("n_done", [32, len(SYSTEM)])
def test_nothing_is_shared_with_a_running_prompt_of_another_scope(model, n_done):
    seen = Seen(batch_of(model, BatchOptions(prefill_step_size=16)))
    first = job(SYSTEM, 50, scope="a")
    seen.backend.insert(first)
    while (first not in seen.tokens) if n_done == len(SYSTEM) else seen.backend._prompts.waiting[0].n_done < n_done:
        seen.step(StepPlan(16, decodes=n_done == len(SYSTEM)))
    other, own = job([*SYSTEM, 9], scope="b"), job([*SYSTEM, 9], scope="a")
    assert seen.run(other, own) == [fresh(batch_of, model, [*SYSTEM, 9])] * 2
    assert seen.cached[other] == 0
    assert seen.cached[own] > 0


def test_a_cancelled_job_leaves_its_cache_to_its_own_scope(model):
    seen = Seen(batch_of(model))
    first = job(SYSTEM, 50, scope="a")
    seen.backend.insert(first)
    while first not in seen.tokens:
        seen.step()
    seen.backend.remove([first])
    other, own = job([*SYSTEM, 9], scope="b"), job([*SYSTEM, 9], scope="a")
    seen.run(other)
    seen.run(own)
    assert (seen.cached[other], seen.cached[own]) == (0, len(SYSTEM))


def scheduler_of(model, limit_tokens):
    """A scheduler with room for so many tokens in all, in steps of 256 as mlx-lm allocates them."""
    size = measure([model])
    backend = BatchBackend(replace(loaded(model, max_sequences=128), kv_size=size), BatchOptions())
    scheduler = Scheduler(FakeModels(lambda _: backend, kv_limit=size.bytes(256) * limit_tokens // 256), Limits())
    scheduler.load("m")
    return scheduler, backend


def turn(scheduler, prompt, max_tokens=8):
    """The answer, and how much of the prompt was cached."""
    one = job(prompt, max_tokens, ignore_eos=True)
    scheduler.submit([one])
    while scheduler.step():
        pass
    events = [one.events.get_nowait() for _ in range(one.events.qsize())]
    return [event.token for event in events[1:]], events[0].cached_tokens


def test_an_agent_s_turn_evicts_the_prefix_of_another_not_its_own(model):
    # Two kept conversations and one turn, less a hundred tokens.
    scheduler, _ = scheduler_of(model, 3 * 512 - 100)
    one, other = [*SYSTEM * 4], [*SYSTEM[::-1] * 4]
    answer, _ = turn(scheduler, one)
    turn(scheduler, other)
    assert turn(scheduler, [*one, *answer[:-1], 9, 9])[1] >= len(one)


def test_an_agent_alone_finds_its_conversation_though_memory_holds_it_only_once(model):
    # Room for one turn and a little more: 512 tokens and 256.
    scheduler, backend = scheduler_of(model, 768)
    prompt, cached = [*SYSTEM * 3], []
    for _ in range(4):
        answer, n_cached = turn(scheduler, prompt)
        cached.append(len(prompt) - n_cached)
        prompt = [*prompt, *answer[:-1], 11, 12, 13]
    assert cached[0] == 360
    assert cached[1:] == [3] * 3
    assert backend.n_evicted == 0


def test_thoughts_that_are_not_sent_back_leave_no_second_copy(model):
    scheduler, backend = scheduler_of(model, 10_000)
    prompt, n_kept = [*SYSTEM * 2], []
    for _ in range(4):
        answer, _ = turn(scheduler, prompt, 40)
        n_kept.append(backend.n_cached)
        prompt = [*prompt, *answer[30:-1], 11, 12, 13]
    assert n_kept == [1] * 4


@pytest.mark.parametrize("n_steps", [0, 1])
def test_the_prefix_that_an_admitted_job_continues_is_part_of_the_job(model, n_steps):
    seen = Seen(batch_of(model))
    (answer,) = seen.run(job(SYSTEM))
    first, second = job([*SYSTEM, *answer, 9]), job([*SYSTEM, 10])
    seen.backend.insert(first)
    seen.backend.insert(second)
    seen.backend.remove([second])
    for _ in range(n_steps):
        seen.step(StepPlan(1, decodes=False))
    seen.backend.shrink_cache(0)
    assert (seen.backend.n_cached, seen.backend.cache_bytes) == (0, 0)
    seen.backend.remove([first])
    assert seen.backend.n_cached == 1
    seen.run(second)
    assert seen.cached[second] == len(SYSTEM)


def test_where_another_scope_s_prompts_part_no_copy_is_kept():
    model = tiny_lfm2()
    seen = Seen(batch_of(model, trimmable=False))
    seen.run(job(SYSTEM, scope="a"))
    # Within one scope the second prompt would show where prompts begin alike.
    seen.run(job([*SYSTEM[:80], 1, 2, 3], scope="b"))
    last = job([*SYSTEM[:80], 4, 5, 6], scope="b")
    seen.run(last)
    assert seen.cached[last] == 0
    again = job([*SYSTEM[:80], 7, 8, 9], scope="b")
    seen.run(again)
    assert seen.cached[again] == 80


def test_where_a_waiting_prompt_of_another_scope_parts_no_copy_is_kept():
    seen = Seen(batch_of(tiny_lfm2(), trimmable=False))
    seen.run(*(job([*SYSTEM[:80], i, i + 1, i + 2], scope=scope) for i, scope in ((1, "b"), (4, "a"), (7, "a"))))
    other, own = job([*SYSTEM[:80], 11, 12], scope="b"), job([*SYSTEM[:80], 11, 12], scope="a")
    seen.run(other)
    seen.run(own)
    assert (seen.cached[other], seen.cached[own]) == (0, 80)


def test_a_sequence_makes_none_of_another_scope_superfluous(layer):
    cache = PrefixCache(10, None)
    cache.store(ids(A), layer(), "a")
    cache.store(ids(A, B), layer(), "b")
    assert [covers(cache, ids(A, B, C), scope) for scope in ("a", "b", "c", "")] == [20, 40, 0, 0]
    assert [cache.shared(ids(A, C), scope) for scope in ("a", "b", "c")] == [20, 20, 0]
    assert cache.fetch(ids(A, B, C), "c") == (None, 0, [])
    assert cache.fetch(ids(A, B, C), "b")[1] == 40
