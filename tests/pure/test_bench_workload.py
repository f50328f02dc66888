"""Workloads: the same for the same seed, of the lengths that were asked for; arrivals."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mlx_serve.commands.bench.arrivals import arrival_times
from mlx_serve.commands.bench.workload import (
    GENERATORS,
    Sizes,
    WorkloadShape,
    lengths,
    multi_turn,
    n_requests,
    random_prompts,
    shared_prefix,
    take,
)

SHAPE = WorkloadShape(seed=0, n_requests=10, input_tokens=40, output_tokens=20, n_groups=3, prefix_tokens=30, n_turns=4)


def texts(conversations):
    return [turn.messages[0]["content"] for conversation in conversations for turn in conversation.turns]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_and_a_round_make_the_texts(name):
    generate = GENERATORS[name]
    found = generate(SHAPE, Sizes(), "clients 4")
    assert found == generate(SHAPE, Sizes(), "clients 4")
    assert n_requests(found) == 10
    assert len(set(texts(found))) == 10
    for other in (generate(SHAPE, Sizes(), "clients 8"), generate(replace(SHAPE, seed=1), Sizes(), "clients 4")):
        assert not set(texts(found)) & set(texts(other))


def test_rounds_have_the_same_lengths():
    shape = replace(SHAPE, range_ratio=0.5)
    counts = [[len(text.split()) for text in texts(random_prompts(shape, Sizes(), name))] for name in ("a", "b")]
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1


def test_lengths_stay_inside_the_ratio_and_fill_it():
    found = list(lengths(replace(SHAPE, n_requests=2000, range_ratio=0.25)))
    assert {n for n, _ in found} == set(range(30, 51))
    assert {n for _, n in found} == set(range(15, 26))


def test_no_length_is_zero():
    found = list(lengths(replace(SHAPE, n_requests=50, input_tokens=1, output_tokens=1, range_ratio=0.9)))
    assert {length for pair in found for length in pair} == {1, 2}


def test_words_make_up_the_tokens_that_the_template_leaves():
    assert Sizes().n_words(40) == 40
    assert Sizes(tokens_per_word=2.0, overhead_tokens=10).n_words(40) == 15
    assert Sizes(tokens_per_word=2.0, overhead_tokens=10).n_words(40, alone=False) == 20
    assert Sizes(overhead_tokens=10).n_words(5) == 1


def test_groups_share_their_prefix():
    found = texts(shared_prefix(SHAPE, Sizes(overhead_tokens=8), "r"))
    prefixes = [tuple(text.split()[:30]) for text in found]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 3, 4]
    assert {len(text.split()) for text in found} == {30 + 32}
    assert prefixes != sorted(prefixes, key=prefixes.index)  # mixed


def test_conversations_have_their_turns():
    found = multi_turn(SHAPE, Sizes(), "r")
    assert [len(conversation.turns) for conversation in found] == [4, 4, 2]
    assert all(turn.output_tokens == 20 for conversation in found for turn in conversation.turns)


def test_too_few_prompts_are_taken_again():
    few = random_prompts(replace(SHAPE, n_requests=2), Sizes(), "r")
    assert take(few, 5) == [few[0], few[1], few[0], few[1], few[0]]
    assert take(few, 1) == few[:1]


def test_arrivals_have_the_rate_and_no_pattern():
    times = arrival_times(1001, 4.0, "0 a")
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000 / 4.0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # Exponential: the standard deviation is the mean, and 1 - 1/e of the gaps are shorter than the mean.
    assert sum((gap - 0.25) ** 2 for gap in gaps) / 1000 == pytest.approx(0.25**2, rel=0.2)
    assert sum(gap < 0.25 for gap in gaps) / 1000 == pytest.approx(0.632, abs=0.05)


def test_arrivals_are_the_seeds():
    assert arrival_times(9, 2.0, "0 a") == arrival_times(9, 2.0, "0 a") != arrival_times(9, 2.0, "1 a")


@pytest.mark.parametrize(("n", "rate"), [(3, float("inf")), (1, 2.0)])
def test_all_at_once(n, rate):
    assert arrival_times(n, rate, "0") == [0.0] * n
