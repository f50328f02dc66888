"""Drafts looked up in a text, and how many tokens are worth drafting."""

import random

import pytest

from mlx_serve.engine.generate.drafts import LENGTHS, DraftLength, Lookup
from mlx_serve.engine.generate.prediction import Prediction


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3]),
        # The longest n-gram counts, then its last occurrence.
        ([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], [9, 5, 3, 8, 1]),
        ([7, 3, 4, 3, 5, 6, 3], [5, 6, 3]),
        ([1, 1, 1], [1]),
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_followed_the_end_of_the_text_before_is_drafted(text, draft):
    assert Lookup(text).draft(5) == draft
    grown = Lookup(text[:1])
    for token in text[1:]:
        grown.add(token)
    assert grown.draft(5) == draft
    assert grown.draft(0) == []
    assert grown.draft(1) == draft[:1]


def test_of_a_long_prompt_the_end_is_indexed():
    text = [5, 6, 7, *range(100, 20_000), 5, 6]
    assert Lookup(text).draft(2) == []
    assert Lookup([*text, 7, 8, 5, 6]).draft(2) == [7, 8]


def test_the_chance_is_that_of_the_first_drafted_token():
    repeats, wanders = Lookup([1, 2, 3, 4]), Lookup([1, 2, 3, 4])
    rng = random.Random(1)
    for n in range(60):
        repeats.add(1 + n % 4)
        wanders.add(rng.randrange(1000))
    assert repeats.chance > 0.9
    assert wanders.chance < 0.1
    assert repeats.expected(7) > 4
    assert repeats.expected(0) == 0


FILE = [*range(100, 120), 7, 8, *range(120, 140), 7, 9, *range(140, 160), 7, 9]


@pytest.mark.parametrize(
    ("output", "draft"),
    [
        ([], FILE[:4]),
        (FILE[:10], FILE[10:14]),
        # A token is replaced, two are inserted, two are left out.
        ([*FILE[:10], 5, FILE[11]], FILE[12:16]),
        ([*FILE[:10], 5, 6, FILE[10]], FILE[11:15]),
        ([*FILE[:10], FILE[12]], FILE[13:17]),
        # The next place, though the tokens also stand further on.
        ([*FILE[:30], 5, 7, 9], [140, 141, 142, 143]),
        # One token is not looked for so far ahead, and two are.
        ([*FILE[:10], 150], []),
        ([*FILE[:10], 150, 151], [152, 153, 154, 155]),
        # Behind the last place, the last of the earlier ones.
        ([150, 151, 105, 106], [107, 108, 109, 110]),
        ([150, 151, *FILE[-5:], 7, 8], [120, 121, 122, 123]),
        ([*FILE, 7, 9], []),
        ([5], []),
        (FILE, []),
    ],
)
def test_a_prediction_is_followed_through_edits(output, draft):
    prediction = Prediction(FILE)
    for token in output:
        prediction.add(token)
    assert prediction.draft(4)[1] == draft
    assert Lookup(None, prediction).draft(4) == draft


def test_the_longer_match_is_drafted_and_of_equal_ones_the_prediction_s():
    both = Lookup([1, 2, 3, 50, 1, 2, 3], Prediction([80, 81]))
    assert both.draft(2) == [80, 81]
    both = Lookup([1, 2, 3, 50, 51, 2, 3, 60, 3, 70], Prediction([80, 81, 3, 90]))
    # The output departs from the prediction, where one token is found again.
    both.add(1, 2, 3)
    assert both.draft(2) == [50, 51]
    both = Lookup([70, 5], Prediction([5, 6, 7]))
    both.add(5)
    assert both.draft(2) == [6, 7]


def test_what_was_drafted_from_the_prediction_is_counted():
    prediction = Prediction([1, 2, 3, 4])
    both = Lookup([7, 8, 9], prediction)
    draft = both.draft(3)
    both.note_checked(len(draft), 2)
    both.add(*draft[:2], 7)
    assert (prediction.n_accepted, prediction.n_rejected) == (2, 1)
    assert both.draft(2) == [8, 9]
    both.note_checked(2, 1)
    assert (prediction.n_accepted, prediction.n_rejected) == (2, 1)


def test_a_prediction_is_tried_at_once_and_given_up_where_it_is_wrong():
    both = Lookup(None, Prediction(range(50)))
    assert both.expected(3) > 1
    both.add(*[99] * 30)
    assert both.expected(3) < 0.1


def lookup(chance):
    one = Lookup([1])
    one.chance = chance
    return one


def chosen(chances, seconds, n_rows=None):
    """What is chosen once passes without drafts and those of each length were measured."""
    length = DraftLength()
    n_rows = n_rows or len(chances)
    for n, each in zip((0, *LENGTHS), seconds, strict=True):
        length.note(n_rows, n, each)
    return length.choose(n_rows, [lookup(chance) for chance in chances])


@pytest.mark.parametrize(
    ("chances", "seconds", "n"),
    [
        ([0.95], (1, 1, 1, 1), 7),
        ([0.95], (1, 1.1, 1.3, 8), 3),
        ([0.5], (1, 1.1, 1.8, 3), 1),
        ([0.0], (1, 1, 1, 1), 0),
        ([0.9], (1, 2, 4, 8), 0),
        # The others of the batch wait for one row's drafts.
        ([0.95, 0, 0, 0], (1, 1.2, 1.4, 2.5), 3),
        ([0.95, 0, 0, 0], (1, 1.6, 2.5, 4), 0),
    ],
)
def test_the_length_with_the_most_tokens_a_second_is_chosen(chances, seconds, n):
    assert chosen(chances, seconds) == n


def test_rows_without_a_lookup_count():
    assert chosen([0.9], (1, 1.5, 2, 3), n_rows=1) == 7
    assert chosen([0.9], (1, 1.5, 2, 3), n_rows=8) == 0


def test_lengths_are_measured_where_drafts_are_right_and_again_later():
    length, good, bad = DraftLength(), [lookup(0.9)], [lookup(0.2)]
    assert length.choose(1, good) == 0
    length.note(1, 0, 1.0)
    assert length.choose(1, bad) == 0
    tried = []
    while n := length.choose(1, good):
        tried.append(n)
        length.note(1, n, 10.0)
    assert sorted(tried) == list(LENGTHS)
    n_plain = 0
    while not length.choose(1, good):
        length.note(1, 0, 1.0)
        n_plain += 1
    # Passes that were ten times too slow, once in hundreds.
    assert n_plain > 300


def test_one_slow_pass_decides_nothing():
    length, good = DraftLength(), [lookup(0.9)]
    for seconds in (1.0, 1.0, 9.0, 1.0, 1.0):
        for n in (0, *LENGTHS):
            length.note(1, n, seconds if n == 7 else 1.0)
    assert length.choose(1, good) == 7
