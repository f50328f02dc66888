"""/stats, /metrics and /ready over real sockets, on the fake backend."""

import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import mlx_serve
from mlx_serve.api.status.stats import REASONS
from mlx_serve.engine.catalog import Catalog
from mlx_serve.metrics import FINISH_REASONS, Metrics
from mlx_serve.testing import ENTRY, FakeBackend
from mlx_serve.values import ApiError, EngineStats, ModelStats
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.framing import FramingLimits
from tests.sockets.apikit import events, serving
from tests.waiting import until

CHAT = "/v1/chat/completions"
N_PROMPT = len("user: hi\n")
STATS = EngineStats(
    waiting=3,
    running=5,
    paused=2,
    models=(
        ModelStats("big", waiting=1, running=4, paused=2, weights_bytes=10, capacity=32),
        ModelStats("small", running=1, capacity=1, alone="--kv-bits", undrafted="a window"),
    ),
    kv_bytes=11,
    prefix_cache_bytes=12,
    prefix_cache_entries=13,
    preemptions=19,
    evictions=14,
    drafted=19,
    accepted=9,
    weights_bytes=15,
    active_bytes=16,
    peak_bytes=17,
    cache_bytes=18,
    wired_limit_bytes=19,
    footprint_bytes=20,
    soft_mark_bytes=21,
    hard_mark_bytes=22,
    pressure="soft",
)


def stats(server):
    status, _, body = server.request("GET", "/stats")
    assert status == 200
    return body


def samples(server) -> dict[str, float]:
    """The lines of /metrics without the remarks, by name and labels."""
    pytest.importorskip("prometheus_client")
    status, headers, text = server.request("GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@contextmanager
def held(**kwargs):
    """A server whose model makes no step before the gate is opened."""
    gate = threading.Event()
    with serving(lambda _: FakeBackend(on_step=lambda _: gate.wait(20)), **kwargs) as server:
        try:
            yield server, gate
        finally:
            gate.set()


@contextmanager
def streaming(server, **fields):
    """A chat request whose reply has begun."""
    connection = server.connection()
    try:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        connection.request("POST", CHAT, json.dumps(body), {"x-request-id": "mine"})
        yield connection
    finally:
        connection.close()


def test_an_answer_is_counted():
    with serving() as server:
        server.chat()
        until(lambda: stats(server)["n_requests"] == 0, "the end of the request")
        body = stats(server)
        totals = body["totals"]
        assert (totals["prompt_tokens"], totals["output_tokens"]) == (N_PROMPT, N_PROMPT + 1)
        assert (totals["cancelled"], totals["refused"], totals["cached_tokens"]) == (0, 0, 0)
        assert body["prefix_cache"]["queried_tokens"] == N_PROMPT
        assert body["latency"]["first_token_s"]["n"] == body["latency"]["request_s"]["n"] == 1
        assert body["latency"]["inter_token_s"]["n"] == N_PROMPT
        assert (body["status"], body["errors"], body["requests"]) == ("ok", [], [])
        assert [model["name"] for model in body["models"]] == ["fake"]


class Steps:
    """A model's steps in the test's hands: each waits until it is let."""

    def __init__(self):
        self.allowed = threading.Semaphore(0)
        self.is_open = False

    def backend(self, **kwargs):
        return FakeBackend(on_step=self._wait, **kwargs)

    def open(self):
        self.is_open = True
        self.allowed.release()

    def _wait(self, _jobs):
        assert self.is_open or self.allowed.acquire(timeout=20)


def phases(server):
    return [request["phase"] for request in stats(server)["requests"]]


def test_a_running_request_is_shown_and_its_text_is_not():
    steps = Steps()
    with serving(lambda _: steps.backend()) as server:
        try:
            with streaming(server):
                until(lambda: phases(server) == ["queued"], "the request")
                (request,) = stats(server)["requests"]
                assert (request["id"], request["model"], request["route"]) == ("mine", "fake", "/chat/completions")
                assert (request["output_tokens"], request["tokens_per_s"]) == (0, None)
                assert request["first_token_s"] is None
                assert request["age_s"] >= 0
                steps.allowed.release(3)
                until(lambda: stats(server)["requests"][0]["output_tokens"] == 3, "three tokens")
                (request,) = stats(server)["requests"]
                assert (request["phase"], request["prompt_tokens"]) == ("decoding", N_PROMPT)
                assert request["tokens_per_s"] > 0
                assert request["first_token_s"] > 0
                assert "user" not in json.dumps(stats(server))
                steps.open()
                until(lambda: stats(server)["requests"] == [], "the end of the request")
        finally:
            steps.open()


def test_the_progress_of_a_prefill_is_shown():
    steps = Steps()
    with serving(lambda _: steps.backend(prefill_step=4)) as server:
        try:
            with streaming(server):
                until(lambda: phases(server) == ["queued"], "the request")
                assert stats(server)["requests"][0]["prefilled_tokens"] == 0
                steps.allowed.release(2)
                until(lambda: stats(server)["requests"][0]["prefilled_tokens"] == 8, "two slices of the prompt")
                until(lambda: phases(server) == ["prefill"], "its first event")
                (request,) = stats(server)["requests"]
                assert request["prompt_tokens"] == N_PROMPT
                assert request["output_tokens"] == 0
                steps.allowed.release(2)
                until(lambda: phases(server) == ["decoding"], "the first token")
                assert stats(server)["requests"][0]["prefilled_tokens"] == N_PROMPT
        finally:
            steps.open()


def test_the_log_tells_what_was_made_for_a_client_that_left(caplog):
    caplog.set_level("INFO", "mlx_serve.access")
    steps = Steps()
    with serving(lambda _: steps.backend()) as server:
        try:
            with streaming(server):
                until(lambda: phases(server) == ["queued"], "the request")
                steps.allowed.release(3)
                until(lambda: stats(server)["requests"][0]["output_tokens"] == 3, "three tokens")
            until(lambda: "status=499" in caplog.text, "the end of the request")
        finally:
            steps.open()
    (line,) = [line for line in caplog.text.splitlines() if "status=499" in line]
    assert f"prompt_tokens={N_PROMPT} cached_tokens=0 output_tokens=3 finish_reason=none" in line
    assert int(re.search(r"bytes_out=(\d+)", line)[1]) > 500


def test_the_log_tells_which_model_a_client_that_left_had_waited_for(caplog):
    caplog.set_level("INFO", "mlx_serve.access")
    steps = Steps()
    with serving(lambda _: steps.backend()) as server:
        try:
            with streaming(server):
                until(lambda: phases(server) == ["queued"], "the request")
            until(lambda: "status=499" in caplog.text, "the end of the request")
        finally:
            steps.open()
    assert re.search(r"status=499 .* model=fake .* output_tokens=0", caplog.text)


def test_a_request_that_waits_is_queued():
    steps = Steps()
    with serving(lambda _: steps.backend(capacity=1)) as server:
        try:
            with streaming(server), streaming(server):
                steps.allowed.release(1)
                until(lambda: phases(server) == ["decoding", "queued"], "one runs, one waits")
                assert (stats(server)["running"], stats(server)["waiting"]) == (1, 1)
                (model,) = stats(server)["models"]
                assert (model["running"], model["waiting"]) == (1, 1)
        finally:
            steps.open()


def test_an_early_leaver_is_a_cancellation():
    with held() as (server, gate):
        with streaming(server):
            until(lambda: stats(server)["n_requests"] == 1, "the request")
        until(lambda: stats(server)["totals"]["cancelled"] == 1, "the cancellation")
        gate.set()
        assert stats(server)["errors"] == []
        lines = samples(server)
        assert lines['mlx_serve:request_success_total{finished_reason="abort",model_name="fake"}'] == 1
        assert lines['mlx_serve:request_cancellations_total{route="/chat/completions"}'] == 1


def failing(_jobs):
    raise RuntimeError("boom")


def test_a_failure_is_told_with_its_request():
    with serving(lambda _: FakeBackend(on_step=failing)) as server:
        assert server.chat()[0] == 500
        until(lambda: stats(server)["errors"] != [], "the error")
        (error,) = stats(server)["errors"]
        assert (error["status"], error["reason"], error["route"]) == (500, "server_error", "/chat/completions")
        assert error["request_id"].startswith("req_")
        assert samples(server)['mlx_serve:request_success_total{finished_reason="error",model_name="fake"}'] == 1


def test_a_stream_that_fails_after_its_200_is_an_error_too():
    steps = iter(range(3))

    def fail_at_last(_jobs):
        if next(steps) == 2:
            raise ApiError(500, "worn out", type="server_error")

    with serving(lambda _: FakeBackend(on_step=fail_at_last)) as server:
        status, _, text = server.chat(stream=True)
        assert (status, "error" in events(text + "data: [DONE]\n\n")[-1]) == (200, True)
        until(lambda: stats(server)["errors"] != [], "the error")
        assert stats(server)["errors"][0]["status"] == 200
        assert samples(server)['mlx_serve:request_success_total{finished_reason="error",model_name="fake"}'] == 1


@pytest.mark.parametrize(("method", "path", "body", "status", "reason", "route"), [
    ("POST", CHAT, "{", 400, "invalid_request_error", "/chat/completions"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "none"}, 404, "model_not_found",
     "/chat/completions"),
    ("GET", "/no/such/route", None, 404, "invalid_request_error", "other"),
    ("GET", "/v1/models/a/b/c/d", None, 404, "model_not_found", "/models/"),
    ("DELETE", "/v1/models", None, 405, "method_not_supported", "/models"),
    ("BREW", "/v1/models", None, 501, "method_not_supported", "/models"),
    ("POST", CHAT, "x" * 2000, 413, "request_too_large", "/chat/completions"),
])  # fmt: skip
def test_a_refusal_is_counted_by_reason_and_route(method, path, body, status, reason, route):
    with serving(limits=FramingLimits(max_body_bytes=1000)) as server:
        assert server.request(method, path, body)[0] == status
        until(lambda: stats(server)["errors"] != [], "the refusal")
        (error,) = stats(server)["errors"]
        assert (error["status"], error["reason"], error["route"]) == (status, reason, route)
        lines = samples(server)
        assert lines[f'mlx_serve:request_refusals_total{{reason="{reason}"}}'] == 1
        shown = "other" if method == "BREW" else method
        assert lines[f'mlx_serve:http_requests_total{{method="{shown}",route="{route}",status="{status}"}}'] == 1


def test_what_a_client_sends_makes_no_series():
    with serving() as server:
        for i in range(5):
            server.request("GET", f"/nowhere/{i}")
        until(lambda: stats(server)["totals"]["refused"] == 5, "the refusals")
        assert not [name for name in samples(server) if "nowhere" in name]


def test_bytes_that_are_no_request_are_counted():
    with serving() as server:
        connection = server.connection()
        connection.connect()
        connection.sock.sendall(b"\x16\x03\x01 what\r\n\r\n")
        assert connection.sock.recv(12).endswith(b"400")
        connection.close()
        until(lambda: [e["reason"] for e in stats(server)["errors"]] == ["malformed_request"], "the refusal")


# What the engine alone knows


def test_the_engine_s_figures_are_passed_on():
    with serving(version="1.2.3") as server:
        server.scheduler.stats = lambda: STATS
        body = stats(server)
        assert (body["waiting"], body["running"], body["version"]) == (3, 5, "1.2.3")
        assert body["memory"] == {
            "weights_bytes": 15,
            "kv_bytes": 11,
            "prefix_cache_bytes": 12,
            "active_bytes": 16,
            "peak_bytes": 17,
            "cache_bytes": 18,
            "wired_limit_bytes": 19,
            "footprint_bytes": 20,
            "soft_mark_bytes": 21,
            "hard_mark_bytes": 22,
            "pressure": "soft",
        }
        assert (body["prefix_cache"]["entries"], body["prefix_cache"]["evictions"]) == (13, 14)
        assert body["drafts"] == {"drafted_tokens": 19, "accepted_tokens": 9}
        big = {"name": "big", "waiting": 1, "running": 4, "paused": 2, "weights_bytes": 10, "kv_bytes": 0}
        assert body["models"][0] == {**big, "capacity": 32, "alone": "", "undrafted": "", "idle_s": 0.0}
        small = body["models"][1]
        assert (small["capacity"], small["alone"], small["undrafted"]) == (1, "--kv-bits", "a window")
        assert (body["paused"], body["preemptions"]) == (2, 19)
        lines = samples(server)
        assert lines['mlx_serve:num_requests_paused{model_name="big"}'] == 2
        assert lines["mlx_serve:num_preemptions_total"] == 19
        assert lines['mlx_serve:num_requests_running{model_name="big"}'] == 4
        assert lines['mlx_serve:num_requests_running{model_name="small"}'] == 1
        # Two wait for a model that is not loaded.
        assert lines['mlx_serve:num_requests_waiting{model_name=""}'] == 2
        assert lines["mlx_serve:kv_cache_bytes"] == 11
        assert lines["mlx_serve:prefix_cache_evictions_total"] == 14
        assert lines["mlx_serve:draft_tokens_total"] == 19
        assert lines["mlx_serve:draft_tokens_accepted_total"] == 9
        assert lines["mlx_serve:memory_peak_bytes"] == 17
        memory = [lines[f"mlx_serve:memory_{name}_bytes"] for name in ("footprint", "soft_mark", "hard_mark")]
        assert memory == [20, 21, 22]
        assert (lines["mlx_serve:engine_up"], lines["mlx_serve:engine_stalled"]) == (1, 0)


def test_a_stopped_engine_is_told():
    with serving() as server:
        server.scheduler.stop()
        assert samples(server)["mlx_serve:engine_up"] == 0
        assert stats(server)["status"] == "stopped"


# The text format


def test_histograms_are_cumulative_and_end_in_infinity():
    with serving() as server:
        server.chat()
        until(lambda: stats(server)["n_requests"] == 0, "the end of the request")
        name = "mlx_serve:inter_token_latency_seconds"
        buckets = {n: value for n, value in samples(server).items() if n.startswith(name + "_bucket")}
        counts = list(buckets.values())
        assert counts == sorted(counts)
        assert counts[-1] == N_PROMPT == samples(server)[name + '_count{model_name="fake"}']
        assert list(buckets)[-1] == name + '_bucket{le="+Inf",model_name="fake"}'


def test_prometheus_own_parser_reads_it():
    parser = pytest.importorskip("prometheus_client.parser")
    with serving() as server:
        server.chat(n=2)
        families = {f.name: f for f in parser.text_string_to_metric_families(server.request("GET", "/metrics")[2])}
    assert families["mlx_serve:prompt_tokens"].type == "counter"
    assert families["mlx_serve:time_to_first_token_seconds"].type == "histogram"
    assert families["mlx_serve:num_requests_running"].type == "gauge"
    assert all(family.documentation for family in families.values())


def test_every_metric_is_in_the_manual():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    with serving() as server:
        server.chat()
        names = {name.partition("{")[0] for name in samples(server)}
    families = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in names}
    families |= {counter.name for counter in Metrics().counters()}
    for name in families:
        assert f"`{name.removeprefix('mlx_serve:').removesuffix('_total')}" in text, name


def test_without_prometheus_client_it_says_what_to_install():
    code = "import sys; sys.modules['prometheus_client'] = None\n"
    code += "from mlx_serve.api.status.prometheus import respond\n"
    code += "from mlx_serve.values import ApiError, EngineStats\n"
    code += "from mlx_serve.metrics import Metrics\n"
    code += "try:\n    respond(Metrics(), EngineStats(), 'ok', '1')\n"
    code += "except ApiError as error:\n    print(error.status, error.code, error.message)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("501 metrics_not_installed")
    assert "mlx-serve-http[metrics]" in done.stdout


# Who may ask


def test_stats_and_metrics_need_the_key_and_ready_does_not():
    policy = AccessPolicy(api_keys=("k",))
    with serving(access=policy, catalog=Catalog(None)) as server:
        for path in ("/stats", "/metrics"):
            assert server.request("GET", path)[0] == 401
            assert server.request("GET", path, headers={"Authorization": "Bearer k"})[0] in (200, 501)
            assert server.request("GET", path, headers={"Authorization": "Bearer no"})[0] == 401
        assert server.request("GET", "/ready")[0] == 200


# Readiness


def test_it_is_not_ready_before_the_default_model_is_loaded():
    loaded = threading.Event()
    with serving(started=loaded.is_set) as server:
        assert server.request("GET", "/v1/ready")[::2] == (503, {"status": "loading"})
        loaded.set()
        assert server.request("GET", "/ready")[::2] == (200, {"status": "ready"})


def test_it_is_ready_without_a_model_in_memory():
    # None is the default, or its time to live has passed: a balancer that waited for one would wait for ever.
    for catalog in (Catalog(None), Catalog(ENTRY, ["fake"])):
        with serving(catalog=catalog) as server:
            assert server.scheduler.health().models == ()
            assert server.request("GET", "/ready")[::2] == (200, {"status": "ready"})


def test_it_is_not_ready_while_it_drains_or_after_it_stopped():
    with serving(catalog=Catalog(None), draining=lambda: True) as server:
        assert server.request("GET", "/ready")[::2] == (503, {"status": "draining"})
    with serving() as server:
        server.scheduler.stop()
        assert server.request("GET", "/ready")[::2] == (503, {"status": "stopped"})


def test_it_is_not_ready_while_the_queue_is_full():
    gate = threading.Event()
    backend = FakeBackend(capacity=1, on_step=lambda _: gate.wait(20))
    with serving(lambda _: backend, max_queue=1) as server:
        try:
            with streaming(server):
                until(lambda: server.scheduler.health().running == 1, "a running request")
                assert server.request("GET", "/ready")[0] == 200
                with streaming(server):
                    until(lambda: server.request("GET", "/ready")[::2] == (503, {"status": "queue_full"}), "full")
        finally:
            gate.set()


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = (Path(__file__).parents[2] / "examples" / "grafana" / "mlx-serve.json").read_text()
    panels = json.loads(dashboard)["panels"]
    asked = set(re.findall(r"mlx_serve:\w+", dashboard))
    with serving() as server:
        server.chat()
        until(lambda: stats(server)["n_requests"] == 0, "the end of the request")
        given = {line.split()[2] for line in server.request("GET", "/metrics")[2].splitlines() if "# TYPE" in line}
    families = {name.removesuffix("_bucket") for name in asked}
    assert len(panels) > 10
    assert families <= given


def test_every_reason_and_finish_is_shown_from_the_start():
    with serving() as server:
        before = samples(server)
        assert before['mlx_serve:request_refusals_total{reason="rate_limit_exceeded"}'] == 0
        refusals = [name for name in before if name.startswith("mlx_serve:request_refusals_total")]
        assert len(refusals) == len(set(REASONS))
        server.request("POST", CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        finished = {name: n for name, n in samples(server).items() if name.startswith("mlx_serve:request_success")}
        assert (len(finished), sum(finished.values())) == (len(FINISH_REASONS), 1)


def test_every_code_of_an_error_is_among_the_reasons():
    sources = [path.read_text() for path in Path(mlx_serve.__file__).parent.rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r'\bcode="([a-z_]+)"', source)}
    assert codes <= set(REASONS)


def test_how_the_server_is_is_no_failure(caplog):
    caplog.set_level("INFO", "mlx_serve.access")
    with serving() as server:
        server.scheduler.stop()
        assert [server.request("GET", path)[0] for path in ("/health", "/ready")] == [503, 503]
        found = stats(server)
        assert (found["totals"]["refused"], found["errors"]) == (0, [])
    assert "path=/health" not in caplog.text
    assert "path=/ready" not in caplog.text


def test_metrics_tell_of_the_process_and_its_versions():
    with serving() as server:
        found = samples(server)
    for name in ("process_cpu_seconds_total", "process_start_time_seconds", "process_open_fds", "process_max_fds"):
        assert found[name] > 0
    (build,) = [name for name in found if name.startswith("mlx_serve:build_info")]
    assert 'version="' in build
    assert found[build] == 1
