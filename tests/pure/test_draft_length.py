"""How many tokens a step drafts, by what steps took and by what drafts saved each row."""

from dataclasses import dataclass

import pytest

from mlx_serve.engine.generate.draft_length import LENGTHS, DraftLength, Times


@dataclass
class Row:
    """Of whose drafted tokens each is right with the same chance."""

    chance: float
    credit: float = 0.0
    max_drafts: int = 15

    def expected(self, n_tokens):
        return sum(self.chance**n for n in range(1, n_tokens + 1))


class Clock:
    """Runs steps that take so many seconds each."""

    def __init__(self, length):
        self.length, self.now_s = length, 0.0

    def plain(self, rows, seconds=1.0, n=1, between_s=0.0, shape=None):
        for _ in range(n):
            started_s = self.now_s + between_s
            self.now_s = started_s + seconds - between_s
            self.length.ran_plain(shape or (len(rows),), rows, Times(started_s, started_s, self.now_s))

    def drafted(self, rows, n_drafted, seconds, n_right=None, waits_s=0.0, between_s=0.0, shape=None):
        started_s, ready_s = self.now_s + between_s, self.now_s + between_s + waits_s
        self.now_s = ready_s + seconds
        taken = [(row, 1 + (n_drafted if n_right is None else n_right)) for row in rows]
        self.length.ran(shape or (len(rows),), n_drafted, taken, Times(started_s, ready_s, self.now_s))


def measured(rows, seconds):
    """Once steps without drafts and those of each length were measured."""
    length = DraftLength()
    clock = Clock(length)
    clock.plain(rows, seconds[0], 4)
    for n, each in zip(LENGTHS, seconds[1:], strict=True):
        for _ in range(2):
            clock.drafted(rows, n, each)
    for row in rows:
        row.credit = 0.0
    return length


def chosen(chances, seconds):
    rows = [Row(chance) for chance in chances]
    return measured(rows, seconds).choose((len(rows),), rows)


@pytest.mark.parametrize(
    ("chances", "seconds", "n"),
    [
        ([0.99], (1, 1, 1, 1, 1), 15),
        ([0.95], (1, 1.1, 1.3, 8, 9), 3),
        ([0.5], (1, 1.1, 1.8, 3, 5), 1),
        ([0.0], (1, 1, 1, 1, 1), 0),
        ([0.9], (1, 2, 4, 8, 16), 0),
        ([0.95, 0.9, 0.8, 0.5], (1, 1.2, 1.4, 2.5, 5), 3),
        ([0.95, 0, 0, 0], (1, 1.6, 2.5, 4, 9), 0),
    ],
)
def test_the_length_with_the_most_tokens_a_second_is_chosen(chances, seconds, n):
    assert chosen(chances, seconds) == n


def test_before_steps_without_drafts_were_timed_nothing_is_drafted():
    length, rows = DraftLength(), [Row(0.99)]
    clock = Clock(length)
    assert length.choose((1,), rows) == 0
    # The first two are not timed: nothing ran before the one, and the other's pass.
    clock.plain(rows, n=2)
    assert length.choose((1,), rows) == 0
    clock.plain(rows, n=2)
    assert length.choose((1,), rows) == 1
    # Of another number of rows nothing is known.
    assert length.choose((2,), [Row(0.99), Row(0.99)]) == 0
    # Times of long ago are no longer true.
    for _ in range(100):
        clock.drafted(rows, 1, 1.0)
    assert length.choose((1,), rows) == 0
    clock.plain(rows, n=4)
    assert length.choose((1,), rows) > 0


def test_of_shapes_of_long_ago_nothing_is_kept():
    length = DraftLength()
    clock = Clock(length)
    for n in range(1, 300):
        clock.plain([Row(0.9)], n=2, shape=(n, 1))
    assert len(length._plain) < 100


def test_other_work_between_two_steps_is_not_their_time():
    length, rows = DraftLength(), [Row(0.9)]
    clock = Clock(length)
    for _ in range(10):
        length.interrupted()
        clock.plain(rows, 50.0)
    assert length.choose((1,), rows) == 0
    clock.plain(rows, 1.0, 3)
    clock.drafted(rows, 1, 1.2, waits_s=1.0)
    clock.drafted(rows, 1, 1.2)
    # 1.9 tokens in 1.2 steps pay; they would not in 2.2.
    assert length.choose((1,), rows) > 0


def test_python_s_work_counts_in_steps_with_drafts_because_nothing_runs_beside_it():
    rows = [Row(0.9)]
    for between_s, is_worth_it in ((0.0, True), (0.9, False)):
        length = DraftLength()
        clock = Clock(length)
        clock.plain(rows, 1.0, 8, between_s)
        for n in LENGTHS:
            for _ in range(3):
                clock.drafted(rows, n, 1.0 + 0.1 * n, between_s=between_s)
        assert bool(length.choose((1,), [Row(0.6)])) == is_worth_it


def test_lengths_are_tried_where_drafts_are_right_the_shortest_first():
    length, rows = DraftLength(), [Row(0.97)]
    clock = Clock(length)
    clock.plain(rows, n=4)
    assert length.choose((1,), [Row(0.1)]) == 0
    tried = []
    while (n := length.choose((1,), rows)) not in tried[:-1]:
        tried.append(n)
        clock.drafted(rows, n, 1.0 + 0.02 * n)
    assert list(dict.fromkeys(tried)) == list(LENGTHS)


def test_a_length_that_was_too_slow_is_tried_again_later():
    rows = [Row(0.97)]
    length = measured(rows, (1, 3, 5, 9, 20))
    clock = Clock(length)
    n_plain = 0
    while not length.choose((1,), rows):
        clock.plain(rows)
        n_plain += 1
    assert 300 < n_plain < 600


def test_one_slow_step_decides_nothing():
    rows = [Row(0.95)]
    length = measured(rows, (1, 1.1, 1.2, 1.3, 1.5))
    before = length.choose((1,), rows)
    clock = Clock(length)
    for n in LENGTHS:
        clock.drafted(rows, n, 1.0 + 0.05 * n)
        clock.drafted(rows, n, 1.0 + 0.05 * n)
    clock.drafted(rows, before, 50.0, n_right=0)
    # It is not taken for what drafts of this length can cost.
    assert rows[0].credit > -before - 2
    rows[0].credit = 0.0
    assert length.choose((1,), rows) == before


def test_a_row_that_gains_nothing_is_not_slowed_down_for_others():
    rows = [Row(0.99), Row(0.0)]
    length = measured(rows, (1, 1.1, 1.3, 1.6, 2.0))
    clock = Clock(length)
    clock.plain(rows, n=4)
    n_drafted, n_steps = 0, 2000
    for _ in range(n_steps):
        if n := length.choose((2,), rows):
            started_s = clock.now_s
            clock.now_s += {1: 1.1, 3: 1.3, 7: 1.6, 15: 2.0}[n]
            length.ran((2,), n, [(rows[0], 1 + n), (rows[1], 1)], Times(started_s, started_s, clock.now_s))
            n_drafted += 1
        else:
            clock.plain(rows)
    # Its tokens took no more than 3 % longer.
    assert n_drafted
    assert clock.now_s < 1.03 * n_steps


def test_what_a_row_has_saved_may_be_spent_for_others():
    rich = [Row(0.99), Row(0.0, credit=10.0)]
    length = measured([Row(0.99), Row(0.0)], (1, 1.1, 1.3, 1.6, 6.0))
    assert length.choose((2,), rich) == 7
    assert length.choose((2,), [Row(0.99), Row(0.0, credit=-5.0)]) == 0


def test_rows_that_come_are_timed_before_they_draft():
    """The ones before took longer: by their times, drafts would seem to cost nothing."""
    old, new = [Row(0.3)], [Row(0.3)]
    length = measured(old, (3, 5.4, 8, 12, 20))
    clock = Clock(length)
    clock.plain(old, 3.0, 8)
    length.changed()
    assert length.choose((1,), new) == 0
    began_s, n_tokens = clock.now_s, 0
    while n_tokens < 200:
        if n := length.choose((1,), new):
            # In the long run 0.3 tokens of a draft are right.
            n_right = 1 if n_tokens % 3 == 0 else 0
            clock.drafted(new, n, {1: 1.8, 3: 2.7, 7: 4.0, 15: 6.6}[n], n_right=n_right)
            n_tokens += 1 + n_right
        else:
            clock.plain(new)
            n_tokens += 1
    assert clock.now_s - began_s < 1.03 * n_tokens


def test_a_single_pause_after_rows_came_is_not_taken_for_their_time():
    rows = [Row(0.3)]
    length = measured(rows, (1, 1.8, 2.7, 4.0, 6.6))
    clock = Clock(length)
    length.changed()
    clock.plain(rows, n=2)
    clock.plain(rows, 50.0)
    assert length.choose((1,), rows) == 0


def test_beside_prompts_drafts_go_on_with_what_is_known():
    rows = [Row(0.95)]
    length = measured(rows, (1, 1.1, 1.3, 1.6, 2.0))
    clock = Clock(length)
    for _ in range(300):
        n = length.choose((1,), rows)
        assert n == 15
        length.interrupted()
        clock.now_s += 30.0
        clock.drafted(rows, n, 2.0)
    # Rows that come beside them draft too, if it pays by far: they may be more than those that were timed.
    length.changed()
    clock.plain(rows)
    assert length.choose((1,), [Row(0.5)]) == 0
    length.changed()
    clock.plain(rows)
    assert length.choose((1,), rows) == 15
    # What they cost is not tried out there, for it could not be measured.
    fresh = DraftLength()
    for _ in range(50):
        assert fresh.choose((1,), rows) == 0
        fresh.interrupted()
        Clock(fresh).plain(rows)


@pytest.mark.parametrize("most", [2, 4, 5])
def test_a_limit_between_the_lengths_is_measured_as_any(most):
    rows = [Row(0.5, max_drafts=most)]
    length = DraftLength()
    clock = Clock(length)
    clock.plain(rows, n=4)
    seen = []
    for _ in range(60):
        n = length.choose((1,), rows)
        seen.append(n)
        if n:
            clock.drafted(rows, n, 1.0 + 0.9 * n, n_right=0)
            rows[0].credit = 0.0
        else:
            clock.plain(rows)
    assert max(seen) <= most
    # Each length is tried twice at most: it costs more than it gives.
    assert all(seen.count(n) <= 4 for n in set(seen) - {0})


def test_times_of_steps_beside_other_work_are_dropped_once_drafts_show_it():
    rows = [Row(0.95)]
    length = measured(rows, (100, 105, 110, 115, 120))
    clock = Clock(length)
    n_drafted = 0
    while n := length.choose((1,), rows):
        clock.drafted(rows, n, 3.0 + n)
        n_drafted += 1
    assert n_drafted <= 5
