"""What is called overdue: a piece of work that takes far longer than the last ones of its kind."""

import pytest

from mlx_serve.engine.schedule.heartbeat import Costs, Heartbeat


def limit_after(*seconds):
    costs = Costs(least_s=10, first_s=100)
    for one in seconds:
        costs.note(one)
    return costs.limit_s()


@pytest.mark.parametrize(
    ("seconds", "limit_s"),
    [
        ((), 100),
        ((0.02,), 10),
        ((2.0,), 40),
        ((2.0, 3.0), 40),
        ((2.0, 3.0, 60.0), 60),
        ((60.0, 60.0), 1200),
        ((60.0, 60.0, *[0.5] * 32), 10),
    ],
)
def test_a_limit_is_far_more_than_the_last_pieces_took_and_one_that_hung_does_not_count(seconds, limit_s):
    assert limit_after(*seconds) == limit_s


def test_each_kind_of_work_is_judged_by_its_own_pieces():
    now = [0.0]
    heart = Heartbeat(lambda: now[0])
    steps, loads = Costs(10, 100), Costs(50, 50)
    assert heart.is_resting
    for _ in range(3):
        heart.turn_to("a step", steps)
        now[0] += 1
    heart.turn_to("a load", loads)
    now[0] += 49
    assert heart.overdue() is None
    now[0] += 2
    assert str(heart.overdue()) == "the MLX thread has been busy with a load for 51 s; more than 50 s is unusual"
    heart.turn_to("a step", steps)
    now[0] += 20
    assert heart.overdue() is None
    now[0] += 1
    assert heart.overdue().limit_s == 20
    heart.rest()
    assert (heart.overdue(), heart.is_resting) == (None, True)
