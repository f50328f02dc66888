"""Counters, histograms, and a request's way through them, on a clock that the test turns."""

import math
import threading

import pytest

from mlx_serve.metrics import MAX_SERIES, N_ERRORS, N_RECENT, Counter, ErrorEntry, Histogram, Metrics, Trace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def metrics(clock):
    return Metrics(clock)


def traced(metrics, n_sequences=1, received_at=None):
    trace = Trace(metrics, "m", "/chat/completions", "req_1", received_at, n_sequences)
    trace.queued()
    return trace


def only(family):
    """The one series of a family."""
    ((_, value),) = family.series().items()
    return value


def test_a_counter_adds_for_each_set_of_labels():
    counter = Counter("c", "help", ("a", "b"))
    counter.add(1, "x", "y")
    counter.add(2, "x", "y")
    counter.add(5, "x", "z")
    assert counter.series() == {("x", "y"): 3, ("x", "z"): 5}
    assert counter.total() == 8


def test_the_number_of_series_is_bounded():
    counter, histogram = Counter("c", "help", ("a",)), Histogram("h", "help", (1.0,), ("a",))
    for i in range(MAX_SERIES + 50):
        counter.add(1, str(i))
        histogram.observe(0.5, str(i))
    assert len(counter.series()) == len(histogram.series()) == MAX_SERIES + 1
    assert counter.series()[("other",)] == 50
    assert histogram.series()[("other",)].counts[-1] == 50
    counter.add(1, "0")
    assert counter.series()[("0",)] == 2


def test_nothing_is_lost_between_threads():
    counter, histogram = Counter("c", "help"), Histogram("h", "help", (1.0,), ())

    def work():
        for _ in range(5000):
            counter.add(1)
            histogram.observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.total() == only(histogram).counts[-1] == 20_000


@pytest.mark.parametrize(
    ("value", "counts"),
    [(0.0, (1, 1, 1)), (1.0, (1, 1, 1)), (1.5, (0, 1, 1)), (2.0, (0, 1, 1)), (2.1, (0, 0, 1)), (1e9, (0, 0, 1))],
)
def test_a_bucket_holds_its_own_bound(value, counts):
    histogram = Histogram("h", "help", (1.0, 2.0))
    histogram.observe(value, "m")
    assert only(histogram).counts == counts
    assert only(histogram).bounds == (1.0, 2.0, math.inf)
    assert only(histogram).sum == value


def test_only_the_latest_observations_are_kept():
    histogram = Histogram("h", "help", (1.0,))
    for i in range(N_RECENT + 3):
        histogram.observe(float(i), "m")
    assert histogram.recent() == [float(i) for i in range(3, N_RECENT + 3)]
    assert only(histogram).counts[-1] == N_RECENT + 3


def test_a_request_goes_through_its_phases(metrics, clock):
    trace = traced(metrics, received_at=99.0)
    assert (trace.phase, metrics.running()) == ("queued", [trace])
    clock.now = 102.0
    trace.admitted(10, 4)
    assert trace.phase == "prefill"
    clock.now = 105.0
    trace.token(0)
    assert trace.phase == "decoding"
    clock.now = 105.5
    trace.token(0)
    trace.ended("stop")
    trace.close()
    assert metrics.running() == []
    sums = {h.name: only(h).sum for h in metrics.histograms()}
    assert sums == {
        "request_queue_time_seconds": 2.0,
        "request_prefill_time_seconds": 3.0,
        "request_decode_time_seconds": 0.5,
        "time_to_first_token_seconds": 6.0,
        "inter_token_latency_seconds": 0.5,
        "e2e_request_latency_seconds": 6.5,
        "request_prompt_tokens": 10.0,
        "request_generation_tokens": 2.0,
    }
    assert metrics.finished.series() == {("m", "stop"): 1}
    counted = (metrics.prompt_tokens, metrics.cached_tokens, metrics.generation_tokens)
    assert [only(counter) for counter in counted] == [10, 4, 2]
    assert (only(metrics.prefix_queries), only(metrics.prefix_hits)) == (10, 4)


def test_samples_of_one_request_keep_their_own_intervals(metrics, clock):
    trace = traced(metrics, n_sequences=2)
    trace.admitted(3, 0)
    trace.admitted(3, 2)
    trace.token(0)
    clock.now += 1
    trace.token(1)
    assert metrics.inter_token.series() == {}
    clock.now += 1
    trace.token(0)
    trace.token(1)
    assert metrics.inter_token.recent() == [1.0, 2.0]
    assert only(metrics.first_token).counts[-1] == 1


def test_what_a_client_left_behind_is_aborted(metrics):
    trace = traced(metrics, n_sequences=3)
    trace.admitted(1, 0)
    trace.token(0)
    trace.ended("length")
    trace.close()
    trace.close(failed=True)
    assert metrics.finished.series() == {("m", "length"): 1, ("m", "abort"): 2}
    assert metrics.whole.series() == {}
    assert metrics.running() == []


def test_what_failed_is_an_error(metrics):
    trace = traced(metrics)
    trace.close(failed=True)
    trace.close()
    assert metrics.finished.series() == {("m", "error"): 1}


def test_a_request_that_was_never_taken_leaves_no_trace(metrics):
    trace = Trace(metrics, "m")
    trace.close(failed=True)
    assert metrics.finished.series() == {}


def test_the_latest_errors_are_kept(metrics):
    for i in range(N_ERRORS + 5):
        metrics.record_error(ErrorEntry(float(i), f"/{i}", 400, "bad", f"req_{i}"))
    errors = metrics.errors()
    assert len(errors) == N_ERRORS
    assert [errors[0].route, errors[-1].route] == [f"/{N_ERRORS + 4}", "/5"]
    assert only(metrics.refusals) == N_ERRORS + 5


def test_a_flood_of_one_error_drives_out_no_other(metrics):
    metrics.record_error(ErrorEntry(0.0, "/completions", 500, "server_error", "req_0"))
    for i in range(1000):
        metrics.record_error(ErrorEntry(float(i), "other", 401, "invalid_api_key", f"req_{i}"))
    latest, first = metrics.errors()
    assert (latest.count, latest.at, latest.request_id) == (1000, 999.0, "req_999")
    assert (first.status, first.count) == (500, 1)
