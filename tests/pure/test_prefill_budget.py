"""How many prompt tokens fit into a step, and which steps decode."""

import pytest

from mlx_serve.engine.backend import NO_GAP, StepPlan
from mlx_serve.engine.generate.pass_cost import PassCost
from mlx_serve.engine.generate.prefill_budget import PrefillBudget

# Tokens of a prompt, and those that take half a second.
LONG, N_HELD = 100_000, 500


def known(decode_s=0.0, overhead_s=0.0):
    """A budget that knows of 1,000 tokens a second beside the overhead of a pass, and what a step's decoding takes."""
    budget = PrefillBudget(2048)
    for n in (100, 1100):
        budget.note(n, overhead_s + n / 1000)
    budget.note_nobody()
    if decode_s:
        budget.note_decoding(decode_s)
    return budget


# The cost of a pass


@pytest.mark.parametrize(("overhead_s", "per_token_s"), [(0.0, 0.001), (0.1, 0.001), (0.19, 0.002)])
def test_the_line_is_found_from_passes_of_several_sizes(overhead_s, per_token_s):
    cost = PassCost()
    for n in (64, 2048, 300, 64, 100):
        cost.note(n, overhead_s + per_token_s * n)
    assert cost.overhead_s == pytest.approx(overhead_s, abs=1e-6)
    assert cost.per_token_s == pytest.approx(per_token_s)
    assert cost.seconds(500) == pytest.approx(overhead_s + 500 * per_token_s)
    assert cost.tokens(overhead_s + 500 * per_token_s) in (499, 500)


def test_one_size_says_nothing_of_the_overhead_and_keeps_what_others_said():
    cost = PassCost()
    cost.note(100, 0.3)
    assert (cost.overhead_s, cost.per_token_s) == (0.0, pytest.approx(0.003))
    cost.note(1000, 1.2)
    # A busy hour of equal passes does not make the line forget its other end.
    for _ in range(1000):
        cost.note(100, 0.3)
    assert cost.overhead_s == pytest.approx(0.2)


def test_a_line_that_falls_is_no_cost():
    cost = PassCost()
    cost.note(100, 1.0)
    cost.note(1000, 0.5)
    assert cost.per_token_s > 0
    assert cost.overhead_s >= 0
    assert cost.tokens(0.0) == 0


# Slices


def test_a_step_takes_what_fits_into_the_gap():
    budget = PrefillBudget(2048)
    assert budget.tokens(0.2) == 64  # before anything is known
    budget.note(100, 0.1)
    assert budget.tokens(0.2) == 208  # 1000 a second, in whole sixteens
    assert budget.tokens(0.001) == 16
    budget.note(1100, 1.1)
    assert budget.tokens(60.0) == 2048


def test_a_step_is_at_most_twice_as_long_as_what_was_measured():
    budget = PrefillBudget(2048)
    # A mixture of experts reads nearly all of its weights for 50 tokens as for 70.
    budget.note(50, 0.9)
    budget.note(70, 0.9001)
    lengths = []
    for _ in range(5):
        lengths.append(budget.tokens(0.2))
        budget.note(lengths[-1], 0.8 + lengths[-1] / 500)
    assert lengths == [144, 288, 576, 768, 784]


def test_a_pass_that_met_other_work_does_not_lengthen_slices():
    budget, disturbed = known(overhead_s=0.02), known(overhead_s=0.02)
    for n in (100, 1100):
        for one in (budget, disturbed):
            one.note(n, 0.02 + n / 1000)
    disturbed.note(100, 30.0)
    assert disturbed.tokens(0.2) == budget.tokens(0.2)


def test_the_step_size_bounds_it_from_the_start():
    assert PrefillBudget(8).tokens(10.0) == 8
    budget = PrefillBudget(24)
    budget.note(16, 0.001)
    assert budget.tokens(10.0) == 24


def test_the_speed_follows_what_is_measured():
    budget = PrefillBudget(2048)
    budget.note(100, 0.1)
    for _ in range(40):
        budget.note(100, 1.0)
    assert budget.tokens(1.0) == 112
    budget.note(1, 0.001)  # too few to tell anything
    assert budget.tokens(1.0) == 112


def test_a_slice_beside_streams_is_never_mostly_overhead():
    # 0.2 s would hold 10 tokens behind an overhead of 0.19 s: a third of the slice is overhead instead.
    budget = known(overhead_s=0.19)
    assert budget.plan(0.2, [LONG], n_decoding=8) == StepPlan(384, decodes=True, n_held=309, n_overhead=190)
    # What --max-itl-ms allows is more than that here.
    assert budget.plan(1.0, [LONG], n_decoding=8) == StepPlan(816, decodes=True, n_held=309, n_overhead=190)


def test_with_nobody_decoding_a_slice_is_a_second_or_ten_times_its_overhead():
    assert known().plan(NO_GAP, [LONG], n_decoding=0).n_tokens == 1008
    assert known(overhead_s=0.19).plan(NO_GAP, [LONG], n_decoding=0).n_tokens == 1712
    assert known(overhead_s=1.0).plan(NO_GAP, [LONG], n_decoding=0).n_tokens == 2048  # --prefill-step-size


def test_where_decoding_is_slow_a_prompt_gets_twice_its_time():
    assert known(decode_s=0.5).tokens(0.2) == 1008
    assert known(decode_s=0.01).tokens(0.2) == 208


def test_one_prompt_beside_streams_gets_the_gap_of_each_step_or_a_share_of_it():
    for decode_s in (0.0, 0.01, 0.1):
        assert known(decode_s).plan(0.2, [LONG], n_decoding=8) == StepPlan(208, decodes=True, n_held=N_HELD)
    assert known(decode_s=0.2).plan(0.2, [LONG], n_decoding=8) == StepPlan(400, decodes=True, n_held=N_HELD)
    assert known(decode_s=0.1).plan(0.2, [LONG], n_decoding=4) == StepPlan(400, decodes=True, n_held=N_HELD)


def test_without_prompts_every_step_decodes():
    assert known(decode_s=0.1).plan(0.2, [], n_decoding=4).decodes


def test_many_prompts_beside_few_streams_get_more_in_steps_no_longer_than_three_quarters_of_a_second():
    budget = known(decode_s=0.1)
    # 16 times as much as decoding takes: 1.6 s.
    for n_tokens, decodes in ((752, False), (752, False), (208, True)):
        assert budget.plan(0.2, [LONG] * 8, n_decoding=2) == StepPlan(n_tokens, decodes, N_HELD)
        budget.note(0, 0.75)
    budget.note_decoding(0.1)
    assert not budget.plan(0.2, [LONG] * 8, n_decoding=2).decodes


# Who is waited for


def test_a_prompt_that_is_done_waits_half_a_second_for_others():
    # With nobody decoding, and beside streams.
    assert known().plan(NO_GAP, [LONG] * 8, n_decoding=0).n_held == N_HELD
    assert known(decode_s=0.1).plan(0.2, [LONG] * 8, n_decoding=2).n_held == N_HELD
    # A pass that takes longer than that is not waited for.
    assert known(overhead_s=0.6).plan(NO_GAP, [LONG] * 8, n_decoding=0).n_held == 0


def test_a_step_decodes_when_a_prompt_will_be_done_in_it():
    budget = known(decode_s=0.1)
    assert not budget.plan(0.2, [LONG] * 8, n_decoding=2).decodes
    # It may have a quarter more tokens than a step.
    assert budget.plan(0.2, [LONG, 940], n_decoding=2) == StepPlan(752, decodes=True, n_held=N_HELD)
    assert not budget.plan(0.2, [LONG, 941], n_decoding=2).decodes


def test_prompts_that_come_from_disk_as_a_step_begins_hold_each_other_no_longer():
    assert known(decode_s=0.1).plan(0.2, [], n_decoding=2).n_held == N_HELD


def test_with_nobody_decoding_every_step_lets_those_begin_that_are_done():
    assert known(decode_s=0.1).plan(0.2, [LONG] * 8, n_decoding=0) == StepPlan(208, decodes=True, n_held=N_HELD)
