"""Samplers by themselves, on rows whose right draws are known."""

import math

import mlx.core as mx
import pytest

from mlx_serve.engine.generate.sampling import Seeded, make_sampler
from mlx_serve.values import Sampling

N_TOKENS = 1000
# All tokens are alike.
FLAT = mx.full((1, N_TOKENS), -math.log(N_TOKENS))


def draws(sampler, logprobs, n):
    """Draws for ``n`` positions of an output, one after another."""
    found = []
    for position in range(n):
        if isinstance(sampler, Seeded):
            sampler.follow(mx.zeros((3 + position,), mx.int32), logprobs)
        found.append(sampler(logprobs).tolist())
    return found


def test_a_seed_s_draws_are_independent():
    def make(seed):
        return make_sampler(Sampling(1, temperature=1.0, seed=seed), vocab_size=N_TOKENS, kept_by_xtc=())

    first = [token for (token,) in draws(make(5), FLAT, 50)]
    # Of 50 draws from 1000 tokens one or two meet by chance.
    assert len(set(first)) > 40
    assert [token for (token,) in draws(make(5), FLAT, 50)] == first
    other = [token for (token,) in draws(make(6), FLAT, 50)]
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_a_seeded_draw_depends_on_the_position_and_not_on_the_draws_before():
    sampling = Sampling(1, temperature=1.0, seed=5)
    sampler = make_sampler(sampling, vocab_size=N_TOKENS, kept_by_xtc=())
    first = draws(sampler, FLAT, 10)
    sampler.follow(mx.zeros((3 + 4,), mx.int32), FLAT)
    assert sampler(FLAT).tolist() == sampler(FLAT).tolist() == first[4]


def test_a_seeded_draw_has_the_row_s_distribution():
    probs = mx.array([[0.5, 0.3, 0.15, 0.05]])
    sampler = make_sampler(Sampling(1, temperature=1.0, seed=9), vocab_size=4, kept_by_xtc=())
    found = [token for (token,) in draws(sampler, mx.log(probs), 2000)]
    shares = [found.count(token) / len(found) for token in range(4)]
    assert shares == pytest.approx(probs[0].tolist(), abs=0.04)


def test_a_temperature_sharpens_and_flattens():
    probs = [0.8, 0.2]

    def share(temperature):
        sampler = make_sampler(Sampling(1, temperature=temperature, seed=3), vocab_size=2, kept_by_xtc=())
        return sum(token for (token,) in draws(sampler, mx.log(mx.array([probs])), 2000)) / 2000

    for temperature in (0.5, 1.0, 2.0):
        weights = [p ** (1 / temperature) for p in probs]
        assert share(temperature) == pytest.approx(weights[1] / sum(weights), abs=0.04)


def test_rows_that_share_a_sampler_draw_apart():
    sampler = make_sampler(Sampling(1, temperature=1.0), vocab_size=N_TOKENS, kept_by_xtc=())
    mx.random.seed(1)
    assert len(set(sampler(mx.repeat(FLAT, 50, axis=0)).tolist())) > 40


def test_xtc_tosses_a_coin_for_each_row():
    often = Sampling(1, temperature=1.0, xtc_probability=0.5, xtc_threshold=0.1)
    sampler = make_sampler(often, vocab_size=3, kept_by_xtc=())
    # The first token is nearly certain, but where the coin drops it.
    rows = mx.repeat(mx.log(mx.array([[0.85, 0.149, 0.001]])), 200, axis=0)
    mx.random.seed(1)
    dropped = sum(token != 0 for token in sampler(rows).tolist())
    # Half of the rows lose it; of the others 15 % draw another one.
    assert 90 < dropped < 140


def test_a_seed_s_coin_and_its_draw_are_independent():
    often = Sampling(1, temperature=1.0, xtc_probability=0.5, xtc_threshold=0.3, seed=4)
    sampler = make_sampler(often, vocab_size=3, kept_by_xtc=())
    found = [token for (token,) in draws(sampler, mx.log(mx.array([[0.4, 0.35, 0.25]])), 3000)]
    # Where the coin falls, the first is dropped and the others share its part.
    want = [0.5 * 0.4, 0.5 * 0.35 + 0.5 * 0.35 / 0.6, 0.5 * 0.25 + 0.5 * 0.25 / 0.6]
    assert [found.count(token) / 3000 for token in range(3)] == pytest.approx(want, abs=0.035)


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.35}, {0}),
        ({"min_p": 0.7}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),
        ({"min_p": 0.5, "top_k": 3}, {0, 1, 2}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.25}, {1, 2, 3}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.5}, {0, 1, 2, 3}),
    ],
)
@pytest.mark.parametrize("seed", [None, 2])
def test_filters_leave_what_they_should(sampling, possible, seed):
    probs = mx.array([[0.4, 0.3, 0.2, 0.1]])
    sampler = make_sampler(Sampling(1, temperature=1.0, seed=seed, **sampling), vocab_size=4, kept_by_xtc=())
    mx.random.seed(1)
    assert {token for (token,) in draws(sampler, mx.log(probs), 300)} == possible
