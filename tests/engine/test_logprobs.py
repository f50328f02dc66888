"""Log-probabilities of many rows at once: in float32, and read without an MLX operation."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_serve.engine.generate import logprobs as module
from mlx_serve.engine.generate.logprobs import Logprobs, OutputLogprobs, note_rows


def rows_of(dtype):
    return (mx.random.normal((3, 50), key=mx.random.key(7)) * 8).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_each_row_has_the_values_of_its_own_logits_in_float32(dtype):
    logits = rows_of(dtype)
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    scored = Logprobs(logits, 5)
    for i, token in enumerate([49, 0, 17]):
        own, likeliest = scored.row(i, token, 5)
        assert own == pytest.approx(exact[i, token], abs=1e-5)
        assert [value for _, value in likeliest] == pytest.approx(sorted(exact[i])[:-6:-1], abs=1e-5)
        assert [exact[i, other] for other, _ in likeliest] == pytest.approx([value for _, value in likeliest], abs=1e-5)


def test_a_row_may_ask_for_fewer_than_were_computed():
    scored = Logprobs(rows_of(mx.float32), 5)
    assert scored.row(1, 3, 2)[1] == scored.row(1, 3, 5)[1][:2]
    assert scored.row(1, 3, 0)[1] == ()
    assert Logprobs(rows_of(mx.float32), 0).row(1, 3, 0) == (scored.row(1, 3, 5)[0], ())


def test_more_than_the_vocabulary_is_all_of_it():
    assert sorted(token for token, _ in Logprobs(rows_of(mx.float32), 99).row(0, 1, 99)[1]) == list(range(50))


def test_reading_begins_no_computation(monkeypatch):
    scored = Logprobs(rows_of(mx.float32), 3)
    monkeypatch.setattr(module, "mx", None)
    assert len(scored.row(2, 4, 3)[1]) == 3


def test_all_rows_of_a_step_that_ask_are_computed_at_once(monkeypatch):
    made = []
    monkeypatch.setattr(module, "Logprobs", lambda *given: made.append(given) or Logprobs(*given))
    logits, outputs = rows_of(mx.bfloat16), [OutputLogprobs(0), None, OutputLogprobs(4)]
    for _ in range(2):
        note_rows(logits, outputs)
    note_rows(logits, [None] * 3)
    assert [(given[0].shape, given[1]) for given in made] == [((2, 50), 4)] * 2
    whole = Logprobs(logits, 4)
    # Each position is that behind the one before, and is read once.
    for position in range(2):
        assert outputs[0].take(position, 7) == whole.row(0, 7, 0)
        assert outputs[2].take(position, 9) == whole.row(2, 9, 4)
