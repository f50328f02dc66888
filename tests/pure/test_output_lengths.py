"""What outputs of late came to, and what jobs are charged by it."""

from queue import SimpleQueue

import pytest

from mlx_serve.engine.schedule.charges import tokens_expected, tokens_now, tokens_to_return
from mlx_serve.engine.schedule.output_lengths import FIRST_LENGTH, OutputLengths
from mlx_serve.values import Job, Prompt, Sampling


def test_a_few_outputs_say_nothing_and_then_the_longer_ones_count():
    lengths = OutputLengths()
    for _ in range(7):
        lengths.note(100)
    assert lengths.expected == FIRST_LENGTH == 1024
    lengths.note(100)
    assert lengths.expected == 100
    # One in ten may be longer than what is expected.
    for _ in range(7):
        lengths.note(5000)
    assert lengths.expected == 5000


def test_a_rare_long_output_changes_nothing_and_old_ones_are_forgotten():
    lengths = OutputLengths()
    for _ in range(30):
        lengths.note(200)
    lengths.note(32_000)
    assert lengths.expected == 200
    for _ in range(70):
        lengths.note(3000)
    assert lengths.expected == 3000


def test_a_job_that_gave_nothing_is_not_counted():
    lengths = OutputLengths()
    for _ in range(100):
        lengths.note(0)
    assert lengths.expected == FIRST_LENGTH


@pytest.mark.parametrize(
    ("n_output", "max_tokens", "now", "expected", "to_return"),
    [
        # Nothing yet: what is usual.
        (0, 32_000, 256, 1000, 1000),
        (100, 32_000, 356, 1000, 1100),
        # Longer than usual: a step's growth, and as much again for one that comes back.
        (5000, 32_000, 5256, 5256, 6000),
        # Never more than its limit.
        (0, 50, 50, 50, 50),
        (900, 1100, 1100, 1100, 1100),
    ],
)
def test_a_job_is_charged_by_use(n_output, max_tokens, now, expected, to_return):
    job = Job("m", Prompt((1, 2, 3)), Sampling(max_tokens), 0, SimpleQueue(), n_output=n_output)
    assert tokens_now(job) == 3 + now
    assert tokens_expected(job, 1000) == 3 + expected
    assert tokens_to_return(job, 1000) == 3 + to_return
