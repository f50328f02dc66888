"""How much of an earlier prompt is reused on models whose caches can't be cut back, exactly."""

from dataclasses import replace
from itertools import chain

import pytest

from mlx_serve.engine.backend import StepPlan
from mlx_serve.engine.cache.size import measure
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from tests.engine.test_prefixes import Seen, job
from tests.engine.tinymodel import GPT_OSS, QWEN3_NEXT, loaded, one_by_one, tiny, tiny_gemma, tiny_lfm2, tiny_llama

MODELS = {
    "gpt-oss": lambda: tiny(GPT_OSS),
    "gemma": tiny_gemma,
    "qwen3-next": lambda: tiny(QWEN3_NEXT),
    "lfm2": tiny_lfm2,
}
BEGIN, END = 251, 252


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def whole(model, **kwargs):
    return replace(loaded(model, **kwargs), trimmable=False, control_ids=frozenset([BEGIN, END]))


def batch(model, step_size=2048, **kwargs):
    return Seen(BatchBackend(whole(model, **kwargs), BatchOptions(prefill_step_size=step_size)))


def single(model, step_size=2048, **kwargs):
    return Seen(one_by_one(whole(model, **kwargs), BatchOptions(prefill_step_size=step_size)))


def text(n, seed=0):
    return [(seed * 31 + 7 * i + i // 5) % 250 for i in range(n)]


def turn(n, seed=0):
    return [BEGIN, *text(n, seed), END]


# The answer that comes next.
OPENING = [BEGIN, 1, 2]
SYSTEM = turn(120)


def check(seen, make, model, prompt, n_cached, **kwargs):
    """Run a prompt: this much of it is reused, and the answer is that of a backend that has seen nothing."""
    one = job(prompt)
    got = seen.run(one)
    assert seen.cached[one] == n_cached
    assert got == make(model, **kwargs).run(job(prompt))
    return got[0]


@pytest.mark.parametrize("make", [batch, single])
def test_conversations_share_a_system_prompt(model, make):
    seen = make(model)
    check(seen, make, model, [*SYSTEM, *turn(60, 1), *OPENING], 0)
    for seed in (2, 3):
        check(seen, make, model, [*SYSTEM, *turn(60, seed), *OPENING], len(SYSTEM) - 1)


@pytest.mark.parametrize("make", [batch, single])
def test_a_conversation_is_edited_in_the_middle(model, make):
    turns = [turn(50, seed) for seed in range(5)]
    seen = make(model)
    check(seen, make, model, [*chain(*turns), *OPENING], 0)
    for at in (4, 2, 3, 1):
        edited = [*chain(*turns[:at]), *turn(40, 9), *OPENING]
        check(seen, make, model, edited, 52 * at - 1)


@pytest.mark.parametrize("make", [batch, single])
def test_the_thoughts_of_an_answer_are_not_sent_back(model, make):
    seen = make(model)
    first = [*SYSTEM, *turn(60, 1), *OPENING]
    check(seen, make, model, first, 0)
    check(seen, make, model, [*SYSTEM, *turn(60, 1), *turn(10, 5), *turn(40, 6), *OPENING], len(SYSTEM) + 61)


@pytest.mark.parametrize("make", [batch, single])
def test_the_next_turn_goes_on_where_the_answer_ended(model, make):
    seen = make(model)
    first = [*SYSTEM, *turn(60, 1), *OPENING]
    answer = check(seen, make, model, first, 0)
    second = [*first, *answer, *turn(60, 2), *OPENING]
    check(seen, make, model, second, len(first) + len(answer))
    # One copy serves for both, and for the first prompt again.
    assert seen.backend.n_cached == 1
    check(seen, make, model, first, len(SYSTEM) + 61)


@pytest.mark.parametrize("make", [batch, single])
def test_of_a_long_text_all_but_the_last_stretch_is_reused(model, make):
    seen = make(model, 300)
    plan = StepPlan(300)

    def cached(prompt):
        one = job(prompt, 2)
        seen.run(one, plan=plan)
        return seen.cached[one]

    assert cached(text(1500)) == 0
    # Slices end every 300 tokens.
    assert cached([*text(1000), 9, 9, 9]) == 900
    # Where the second prompt parted from the first one a state was kept too.
    assert cached([*text(1000), 8, 8, 8]) == 1000
    assert cached(text(1500)) == 1499 // 300 * 300 + 299


def test_a_prompt_takes_from_one_that_is_decoding(model):
    seen = batch(model)
    first = job([*SYSTEM, *turn(60, 1), *OPENING], 60)
    seen.backend.insert(first)
    while first not in seen.tokens:
        seen.step()
    check(seen, batch, model, [*SYSTEM, *turn(60, 2), *OPENING], len(SYSTEM) - 1)
    assert len(seen.tokens[first]) < 60


def test_a_prompt_that_comes_late_waits_for_what_it_shares_with_one_that_has_begun(model):
    seen = batch(model, max_sequences=0)
    first, second = job([*text(200), *text(80, 1)]), job([*text(200), *text(80, 2)])
    seen.backend.insert(first)
    seen.step(StepPlan(64, decodes=False))
    seen.backend.insert(second)
    seen.run(plan=StepPlan(64))
    while second not in seen.tokens:
        seen.step(StepPlan(64))
    assert (seen.cached[first], seen.cached[second]) == (0, 200)
    while len(seen.tokens[second]) < 6:
        seen.step(StepPlan(64))
    assert [seen.tokens[first], seen.tokens[second]] == [
        batch(model).run(job(one.prompt.tokens))[0] for one in (first, second)
    ]


def test_what_a_cancelled_prompt_computed_is_kept(model):
    seen = batch(model)
    first = job([*text(200), *text(80, 1)])
    seen.backend.insert(first)
    for _ in range(2):
        seen.step(StepPlan(64, decodes=False))
    seen.backend.remove([first])
    check(seen, batch, model, [*text(200), *text(80, 1)], 128)


def test_the_bytes_of_checkpoints_count(model):
    seen = batch(model)
    check(seen, batch, model, [*SYSTEM, *turn(60, 1), *OPENING], 0)
    (entry,) = seen.backend._loaded.prefix_cache._entries
    n_bytes = sum(one.n_bytes for one in entry.checkpoints)
    assert n_bytes > 0
    assert seen.backend.cache_bytes == sum(layer.nbytes for layer in entry.cache) + n_bytes


def test_the_bytes_of_a_job_include_its_checkpoints(model):
    seen = batch(model)
    seen.run(job([*chain(*(turn(40, seed) for seed in range(9))), *OPENING]))
    size = measure([model])
    (entry,) = seen.backend._loaded.prefix_cache._entries
    assert len(entry.checkpoints) > 2
    assert entry.n_bytes <= size.bytes(len(entry.ids)) <= 2 * entry.n_bytes + 100_000
    assert measure([tiny_llama()]).bytes(512) == 512 * measure([tiny_llama()]).layers[0][0] * 2
