"""How many prompt tokens fit into a step, and which steps decode."""

from mlx_serve.engine.backend import StepPlan
from mlx_serve.engine.generate.prefill_budget import PrefillBudget


def known(decode_s=0.0):
    """A budget that knows of 1,000 tokens a second, and what a step's decoding takes."""
    budget = PrefillBudget(2048)
    budget.note(1000, 1.0)
    if decode_s:
        budget.note_decoding(decode_s)
    return budget


def test_a_step_takes_what_fits_into_the_gap():
    budget = PrefillBudget(2048)
    assert budget.tokens(0.2) == 64  # before anything is known
    budget.note(100, 0.1)
    assert budget.tokens(0.2) == 192  # 1000 a second, in whole sixteens
    assert budget.tokens(0.001) == 16
    assert budget.tokens(60.0) == 2048


def test_the_step_size_bounds_it_from_the_start():
    assert PrefillBudget(8).tokens(10.0) == 8


def test_the_speed_follows_what_is_measured():
    budget = known()
    for _ in range(40):
        budget.note(100, 1.0)
    assert budget.tokens(1.0) == 96
    budget.note(1, 0.001)  # too few to tell anything
    assert budget.tokens(1.0) == 96


def test_where_decoding_is_slow_a_prompt_gets_twice_its_time():
    assert known(decode_s=0.5).tokens(0.2) == 992
    assert known(decode_s=0.01).tokens(0.2) == 192


def test_one_prompt_beside_streams_gets_the_gap_of_each_step_or_a_share_of_it():
    for decode_s in (0.0, 0.01, 0.1):
        assert known(decode_s).plan(0.2, n_waiting=1, n_decoding=8) == StepPlan(192, decodes=True)
    assert known(decode_s=0.2).plan(0.2, n_waiting=1, n_decoding=8) == StepPlan(400, decodes=True)
    assert known(decode_s=0.1).plan(0.2, n_waiting=1, n_decoding=4) == StepPlan(400, decodes=True)


def test_without_prompts_every_step_decodes():
    assert known(decode_s=0.1).plan(0.2, n_waiting=0, n_decoding=4).decodes


def test_many_prompts_beside_few_streams_get_more_in_steps_no_longer_than_half_a_second():
    budget = known(decode_s=0.1)
    # 16 times as much as decoding takes: 1.6 s.
    for decodes in (False, False, False, True):
        plan = budget.plan(0.2, n_waiting=8, n_decoding=2)
        assert plan == StepPlan(496 if not decodes else 192, decodes)
        budget.note(1000, 1.0)
        budget.note(0, -0.5)
    budget.note_decoding(0.1)
    assert not budget.plan(0.2, n_waiting=8, n_decoding=2).decodes


def test_prompts_that_came_together_begin_to_decode_together():
    budget = known(decode_s=0.1)
    held_s = 0.0
    while not budget.plan(0.5, n_waiting=8, n_decoding=0).decodes:
        budget.note(500, 0.5)
        held_s += 0.5
    # Within 64 steps.
    assert 5.9 <= held_s <= 6.4


def test_what_was_prefilled_while_nobody_waited_is_not_held_against_those_who_come_together():
    budget = known(decode_s=0.1)
    budget.note(1000, 60.0)
    assert budget.plan(0.5, n_waiting=8, n_decoding=0).decodes
    budget.note_nobody()
    assert not budget.plan(0.5, n_waiting=8, n_decoding=0).decodes


def test_a_model_that_decodes_nothing_holds_up_another_one_s_streams_no_longer_than_they_may_be():
    assert known(decode_s=0.1).plan(0.2, n_waiting=8, n_decoding=0) == StepPlan(192, decodes=False)


def test_before_it_is_known_what_decoding_takes_nobody_is_held_up():
    assert known().plan(0.5, n_waiting=8, n_decoding=0).decodes
