"""Which prompts run in one pass: those whose padding costs less than the passes that are saved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.engine.generate.side_by_side import chosen


@pytest.mark.parametrize(
    ("lengths", "n_overhead", "n_tokens", "found"),
    [
        ([], 100, 1000, []),
        ([10], 100, 1000, []),
        ([10, 10], 0, 1000, []),
        ([10, 10], 1, 1000, [0, 1]),
        ([50, 10, 12], 10, 1000, [1, 2]),
        ([50, 10, 12], 100, 1000, [1, 2, 0]),
        ([50, 10, 12], 100, 100, [1, 2]),
        ([50, 60], 100, 100, []),
    ],
)
def test_what_is_chosen(lengths, n_overhead, n_tokens, found):
    assert chosen(lengths, n_overhead, n_tokens) == found


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(0, 400), st.integers(1, 3000))
def test_one_pass_is_never_slower_than_its_parts_and_never_too_long(lengths, n_overhead, n_tokens):
    found = chosen(lengths, n_overhead, n_tokens)
    if found:
        together = n_overhead + len(found) * max(lengths[i] for i in found)
        assert together < sum(n_overhead + lengths[i] for i in found)
        assert together - n_overhead <= n_tokens
