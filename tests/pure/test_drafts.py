"""Drafts looked up in a text, and how many of them are expected to be right."""

import random

import pytest

from mlx_serve.engine.generate.drafts import Chances, Lookup
from mlx_serve.engine.generate.prediction import Prediction


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 9, 8, 1, 2, 3], [4, 9, 8, 1, 2]),
        # The longest n-gram counts, then its last occurrence.
        ([1, 2, 3, 9, 5, 3, 8, 1, 2, 3], [9, 5, 3, 8, 1]),
        ([7, 3, 4, 3, 5, 6, 3], [5, 6, 3, 5, 6]),
        # What repeats itself goes on to do so.
        ([1, 1, 1], [1, 1, 1, 1, 1]),
        ([9, 1, 2, 1, 2], [1, 2, 1, 2, 1]),
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


def test_a_place_is_followed_as_long_as_the_text_goes_on_as_there():
    text = Lookup([1, 2, 3, 4, 5, 6, 7, 3, 4, 9, 1])
    text.add(2, 3, 4)
    # Not behind the last occurrence of 3 and 4, where less is the same.
    assert text.draft(3) == [5, 6, 7]
    text.add(8, 3, 4)
    assert text.draft(2) == [8, 3]


def test_an_index_of_a_prompt_is_that_of_its_tokens_added_one_by_one():
    rng = random.Random(4)
    for n in range(30):
        text = [rng.randrange(6) for _ in range(n)]
        grown = Lookup(text[:1])
        grown.add(*text[1:])
        whole = Lookup(text)
        for token in (7, *text[-3:], 8, *text[:3], 1, 2, 3):
            for one in (grown, whole):
                one.add(token)
        # Their places may differ where they followed different ones; behind a new token there is none.
        for one in (grown, whole):
            one.add(99, 2)
        assert grown.draft(4) == whole.draft(4)


def test_of_a_long_prompt_the_end_is_indexed():
    text = [5, 6, 7, *range(100, 20_000), 5, 6]
    assert Lookup(text).draft(2) == []
    assert Lookup([*text, 7, 8, 5, 6]).draft(2) == [7, 8]


def test_what_is_expected_depends_on_how_much_came_as_guessed():
    rng, chances = random.Random(1), Chances()
    copied, wanders = Lookup(range(400), None, chances), Lookup([1, 2, 3, 4], None, chances)
    assert copied.expected(7) == 0
    copied.add(*range(400))
    wanders.add(*(rng.randrange(100) for _ in range(400)))
    assert copied.expected(7) > 6
    assert copied.expected(0) == 0
    assert 0 < copied.expected(15) - copied.expected(7) < 8
    assert wanders.expected(7) < 0.2
    # At the beginning of a copy it is not known yet that it is one.
    copied.add(-1, 100)
    assert copied.expected(7) < 4
    copied.add(*range(101, 120))
    assert copied.expected(7) > 6


def test_matches_that_always_end_soon_are_not_expected_to_go_on():
    text = Lookup(range(1000))
    rng = random.Random(2)
    for n in range(200):
        place = rng.randrange(900)
        text.add(place, place + 1, place + 2, 2000 + n)
    text.add(5)
    assert 1.5 < text.expected(15) < 3


def test_a_token_that_is_not_known_yet_may_end_the_match():
    text = Lookup(range(400))
    text.add(*range(200))
    known, ahead = text.expected(7), text.expected(7, ahead=1)
    assert known > ahead > 5
    assert Lookup([1, 2, 3]).expected(7, ahead=1) == 0


def test_what_was_learnt_long_ago_counts_less():
    text = Lookup([1, 2] * 50)
    text.add(*[1, 2] * 200)
    before = text.expected(3)
    for n in range(300):
        text.add(5000 + n, 1)
    assert before > 2.5
    assert text.expected(3) < 0.2


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


def test_of_a_draft_that_a_grammar_changes_the_predicted_tokens_are_counted():
    both = Lookup(None, prediction := Prediction([1, 2, 3, 4]))
    both.change([1, 2, 7, 8])
    both.note_checked(4, 3)
    assert (prediction.n_accepted, prediction.n_rejected) == (2, 0)
    both.add(1)
    both.change([2, 3, 4])
    both.note_checked(3, 1)
    assert (prediction.n_accepted, prediction.n_rejected) == (3, 2)


def test_forced_tokens_are_expected_as_far_as_forced_text_went_before():
    own = Lookup([])
    assert own.expected(3) == 0
    own.force([5])
    assert own.expected(3) > 1.5
    for n in range(200):
        # Each second token is forced.
        own.force([5] if n % 2 == 0 else [])
        own.add(5 if n % 2 == 0 else n + 100)
    own.force([5])
    assert 0.9 < own.expected(1) < own.expected(3) < 1.1
    # Where the running pass draws what is forced, nothing is expected behind it.
    assert own.expected(3, ahead=1) < 0.1
    for _ in range(100):
        own.force([7])
        own.add(8)
    own.force([7])
    assert own.expected(3) < 0.5


def test_a_prediction_is_tried_at_once_and_given_up_where_it_is_wrong():
    both = Lookup(None, Prediction(range(50)))
    assert both.expected(3) > 1
    both.add(*[99] * 30)
    assert both.expected(3) < 0.1


def test_a_long_text_is_indexed_a_part_at_a_time():
    text = [*range(1000, 9000)]
    lookup = Lookup([*text, 1005, 1006])
    # The part that has these is not indexed yet, and then it is.
    assert lookup.draft(2) == []
    for token in range(1007, 1015):
        lookup.add(token)
    assert lookup.draft(3) == [1015, 1016, 1017]
    # Of equal places the last counts, whenever it was indexed.
    lookup = Lookup([7, 8, 1, *text, 7, 8, 2, *text[:2000], 7])
    for token in (8, 3, 3, 7):
        lookup.add(token)
    assert lookup.draft(2) == [8, 3]
    lookup = Lookup([7, 8, 1, *text[:1500], 7, 8, 2, *text[3000:4500], 4])
    lookup.add(5)
    lookup.add(7)
    lookup.add(8)
    assert lookup.draft(1) == [2]
