"""How ``mlx-serve selftest`` shares its time out, and when an answer counts as mlx-lm's."""

import pytest

from mlx_serve.commands.bench.ceiling import Continuation
from mlx_serve.commands.selftest import sizes
from mlx_serve.commands.selftest.checks import Parting, parting
from mlx_serve.commands.selftest.sizes import Budget, Speed

N_PROMPTS, N_ALONE, TOGETHER = 12, 4, 8


def speed(factor=1.0):
    """A small model on two busy cores, times ``factor``."""
    return Speed(5.0, 100 * factor, 5 * factor, 30 * factor, TOGETHER)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("factor", [1, 2, 5, 100])
@pytest.mark.parametrize("seconds", [300, 1000])
def test_the_work_fits_into_the_time(factor, seconds):
    clock = Clock()
    machine, budget = speed(factor), Budget(seconds, clock)

    share_s = sizes.ANSWERS_SHARE * budget.left_s(3 * machine.load_s)
    part = budget.part(share_s, sizes.answers_s(machine, N_PROMPTS, N_ALONE, TOGETHER))
    clock.now += part * sizes.answers_s(machine, N_PROMPTS, N_ALONE, TOGETHER)
    limits = sizes.answer_tokens(N_PROMPTS, part)
    assert 4 <= min(limits) < max(limits) <= 96
    share_s = sizes.LONG_PROMPT_SHARE * budget.left_s(2 * machine.load_s)
    clock.now += 2 * sizes.long_tokens(machine, 8192, share_s, budget.pace) / machine.prompt_rate
    owed_s = 0.0
    for i, n in enumerate(sizes.LEVELS):
        full_s = [sizes.full_round_s(machine, level) for level in sizes.LEVELS[i:]]
        share_s = budget.left_s(2 * machine.load_s + owed_s) * full_s[0] / sum(full_s) / 2
        size = sizes.round_size(n, budget.part(share_s, full_s[0]), 8192)
        took_s = machine.round_s(size.n_requests, size.input_tokens, size.output_tokens, n)
        clock.now += took_s
        owed_s += took_s
        assert size.n_requests >= n
    assert budget.spent_s + owed_s + 2 * machine.load_s <= seconds


def test_a_fast_machine_does_all_the_work():
    machine, budget = speed(1000), Budget(300, Clock())
    full_s = sizes.answers_s(machine, N_PROMPTS, N_ALONE, TOGETHER)
    assert sizes.answer_tokens(3, budget.part(budget.left_s(), full_s)) == [32, 64, 96]
    assert sizes.long_tokens(machine, 131_072, 60, 1.0) == 16_000
    assert sizes.long_tokens(machine, 2048, 60, 1.0) == 1024
    assert sizes.round_size(16, 1.0, 8192) == sizes.RoundSize(32, 256, 64)


def test_a_slow_machine_does_the_least_of_each_check():
    machine, budget = speed(0.001), Budget(1, Clock())
    full_s = sizes.answers_s(machine, N_PROMPTS, N_ALONE, TOGETHER)
    # Of different lengths still, so that answers join and leave.
    assert sizes.answer_tokens(4, budget.part(0.0, full_s)) == [4, 5, 6, 4]
    assert sizes.long_tokens(machine, 8192, 0.0, budget.pace) == 128
    assert sizes.round_size(16, 0.0, 8192) == sizes.RoundSize(16, 16, 4)
    assert sizes.round_size(16, 1.0, 200) == sizes.RoundSize(32, 100, 50)


def test_work_that_took_longer_makes_what_follows_smaller():
    clock = Clock()
    budget = Budget(100, clock)
    clock.now += 30
    assert (budget.spent_s, budget.left_s(), budget.left_s(100)) == (30, 70, 0)
    assert budget.part(10, 20) == 0.5
    budget.note(10, 30)
    assert budget.pace == 2.0
    assert budget.part(10, 20) == 0.25
    budget.note(10, 1)
    assert budget.pace > 1
    budget.note(10, 1)
    assert budget.pace == 1.0  # a machine that is faster than measured once may be slower again


# " The", " cat", " sat", and the end.
WANTED = Continuation(" The cat sat", [0, 4, 8, 12], [2.0, 0.1, 3.0, 4.0])


@pytest.mark.parametrize(
    ("text", "margin"),
    [
        (" The cat sat", None),
        ("The cat sat\n", None),
        ("The cat s\ufffd", 0.1),  # within " sat": the token before may be the one that differs
        ("A cat sat", 2.0),
        ("The dog sat", 0.1),
        ("The cat", 0.1),
        ("The cat sat down", 3.0),
    ],
)
def test_an_answer_may_part_where_mlx_lm_hardly_preferred_its_token(text, margin):
    part = parting(text, WANTED)
    assert (part and part.margin) == margin


def test_an_answer_without_tokens_has_nothing_to_part_from():
    assert parting("", Continuation("", [], [])) is None
    assert parting("a", Continuation("", [0], [5.0])) == Parting(0.0, 5.0)
    assert parting("abx", Continuation("abcd", [0], [5.0])) == Parting(0.5, 5.0)
