"""Figures against values computed by hand."""

import pytest

from mlx_serve.client.answer import Answer
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench.stats import Record, Slo, Spread, percentile, spread, summarize, tpot_s


def answer(ttft=1.0, e2e=3.0, gaps=(1.0, 1.0), prompt=10, cached=0, output=3):
    return Answer(ttft, e2e, gaps, prompt, cached, output, "length", "text")


def record(answer=None, failure=None, asked=3, late=0.0):
    return Record(0.0, asked, "prompt", answer, failure, late)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 25, 1.75),
        ([0.0, 10.0], 90, 9.0),
        ([float(i) for i in range(101)], 99, 99.0),
        ([1.0, 2.0], 0, 1.0),
        ([1.0, 2.0], 100, 2.0),
    ],
)
def test_a_percentile_is_linear_between_neighbours(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_a_spread_is_in_milliseconds_and_needs_no_order():
    values = [0.4, 0.1, 0.3, 0.2, 0.5]
    expected = Spread(n=5, mean=300, p50=300, p90=460, p95=480, p99=496, max=500)
    found = spread(values)
    for name in ("n", "mean", "p50", "p90", "p95", "p99", "max"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))


def test_there_is_no_spread_of_nothing():
    assert spread([]) is None


def test_the_time_of_a_token_leaves_the_first_out():
    assert tpot_s(answer(ttft=1.0, e2e=3.0, output=5)) == 0.5
    assert tpot_s(answer(output=1)) is None
    assert tpot_s(answer(ttft=None)) is None


def test_a_round():
    records = [
        record(answer(ttft=1.0, e2e=3.0, gaps=(1.0, 1.0), prompt=10, cached=4, output=3)),
        record(answer(ttft=2.0, e2e=6.0, gaps=(4.0,), prompt=20, cached=0, output=2)),
        record(failure=Failure("HTTP 429", "full", 429)),
        record(failure=Failure("cut off", "cut")),
        record(failure=Failure("HTTP 429", "full", 429)),
    ]
    s = summarize(records, 10.0, Slo())
    assert (s.n_ok, s.n_failed, s.n_short, s.n_silent) == (2, 3, 1, 0)
    assert (s.prompt_tokens, s.cached_tokens, s.output_tokens) == (30, 4, 5)
    assert (s.requests_per_s, s.output_tokens_per_s, s.total_tokens_per_s) == (0.2, 0.5, 3.5)
    assert s.errors == {"HTTP 429": 2, "cut off": 1}
    assert s.ttft_ms.mean == 1500
    assert (s.itl_ms.n, s.itl_ms.mean) == (3, 2000)
    assert s.tpot_ms.mean == 2500  # 1000 and 4000
    assert s.e2e_ms.max == 6000
    assert (s.goodput_per_s, s.late_ms) == (None, None)


def test_lateness_is_of_an_open_loop():
    s = summarize([record(answer(), late=0.25), record(answer(), late=0.75)], 1.0, Slo(), open_loop=True)
    assert (s.late_ms.mean, s.late_ms.max) == (500, 750)


def test_a_share_that_only_some_answers_tell_is_not_told():
    assert summarize([record(answer(cached=2)), record(answer(cached=None))], 1.0, Slo()).cached_tokens is None


def test_a_round_without_answers_has_no_times():
    s = summarize([record(failure=Failure("connection", "refused"))], 0.0, Slo(ttft_s=1))
    assert (s.n_ok, s.requests_per_s, s.goodput_per_s) == (0, 0, 0)
    assert s.ttft_ms is s.itl_ms is s.tpot_ms is s.e2e_ms is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft_s=1.0), True),
        (Slo(ttft_s=0.9), False),
        (Slo(itl_s=1.5), True),
        (Slo(itl_s=1.4), False),
        (Slo(tpot_s=1.0), True),
        (Slo(tpot_s=0.9), False),
        (Slo(e2e_s=3.0), True),
        (Slo(e2e_s=2.9), False),
        (Slo(ttft_s=1.0, itl_s=1.5, tpot_s=1.0, e2e_s=3.0), True),
        (Slo(ttft_s=1.0, e2e_s=2.9), False),
    ],
)
def test_a_request_is_good_when_it_keeps_every_limit(slo, met):
    one = answer(ttft=1.0, e2e=3.0, gaps=(0.5, 1.5), output=3)
    assert slo.met(one) is met
    assert summarize([record(one)], 2.0, slo).goodput_per_s == (0.5 if met else 0)


def test_an_answer_without_text_keeps_no_limit_on_the_first():
    assert not Slo(ttft_s=100).met(answer(ttft=None))
    assert Slo(e2e_s=100).met(answer(ttft=None))
