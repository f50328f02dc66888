"""How many prompt tokens fit into a step."""

from mlx_serve.engine.prefill import PrefillBudget


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
    budget = PrefillBudget(2048)
    budget.note(1000, 1.0)
    for _ in range(40):
        budget.note(100, 1.0)
    assert budget.tokens(1.0) == 96
    budget.note(1, 0.001)  # too few to tell anything
    assert budget.tokens(1.0) == 96


def test_where_decoding_is_slow_a_prompt_gets_twice_its_time():
    budget = PrefillBudget(2048)
    budget.note(1000, 1.0)
    for _ in range(40):
        budget.note_decoding(0.5)
    assert budget.tokens(0.2) == 992
    assert budget.tokens(0.2, 1.6) == 784
    budget.note_decoding(0.0)
    assert budget.tokens(0.2) == 192
