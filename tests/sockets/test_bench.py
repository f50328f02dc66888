"""The benchmark against real servers: this one with the fake backend, and some that fail."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlx_serve import cli
from mlx_serve.testing import EOS, FakeBackend
from tests.sockets.apikit import serving
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]


def cycling(job):
    """An answer that goes on, as with ignore_eos."""
    return itertools.cycle(b"abc ")


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command; gives its exit status, the JSON that it wrote, and what it printed."""

    def run(port, *args):
        path = tmp_path / "figures.json"
        status = cli.main(["bench", "--base-url", f"http://127.0.0.1:{port}", "--json", str(path), *map(str, args)])
        return status, json.loads(path.read_text()), capsys.readouterr()

    return run


@pytest.fixture
def server():
    with serving(lambda _: FakeBackend(answer=cycling)) as running:
        yield running


def test_a_closed_loop(bench, server):
    status, found, out = bench(server.port, "--concurrency", "1,3", "--num-prompts", 5, "--output-len", 9)
    assert status == 0
    assert found["model"] == "fake"
    assert [r["level"] for r in found["rounds"]] == [1, 3]
    for one in found["rounds"]:
        assert (one["n_ok"], one["n_failed"], one["n_short"], one["output_tokens"]) == (5, 0, 0, 45)
        assert [r["finish_reason"] for r in one["requests"]] == ["length"] * 5
        assert all(len(r["itl_ms"]) == 8 and 0 < r["ttft_ms"] <= r["e2e_ms"] for r in one["requests"])
        # Words are 4 to 9 tokens here, so lengths are met on average.
        assert one["prompt_tokens"] / 5 == pytest.approx(256, rel=0.15)
    assert "closed loop, 3 at a time: 5 of 5 requests" in out.out
    assert "1 at a time: 5 requests" in out.err


def test_what_the_server_drafts_is_told(bench, server):
    drafted = """{"prediction": {"type": "content", "content": "abc xyz"}}"""
    args = ["--concurrency", "1,2", "--num-prompts", 3, "--output-len", 9]
    status, found, out = bench(server.port, *args, "--extra-body", drafted)
    assert status == 0
    # Of the seven tokens of each prediction the first four come.
    assert [one["drafts"] for one in found["rounds"]] == [{"drafted_tokens": 21, "accepted_tokens": 12}] * 2
    assert out.out.count("drafts: 21 tokens, of which 12 were right, 44% of the output") == 2
    assert "drafts:" not in bench(server.port, *args)[2].out


def test_an_open_loop(bench, server):
    status, found, out = bench(
        server.port, "--request-rate", "200,inf", "--num-prompts", 12, "--output-len", 3, "--slo-e2e", 1e6
    )
    assert status == 0
    poisson, at_once = found["rounds"]
    assert (poisson["loop"], poisson["level"], at_once["level"]) == ("open", 200, "inf")
    # Eleven gaps of 5 ms on average; a request never goes out before its time.
    assert max(r["start_ms"] for r in poisson["requests"]) >= 55
    assert all(r["late_ms"] >= 0 for r in poisson["requests"])
    assert poisson["goodput_per_s"] == poisson["requests_per_s"]
    assert "open loop, inf requests/s: 12 of 12" in out.out


def test_an_open_loop_with_few_connections_tells_that_it_is_late(bench, server):
    found = bench(server.port, "--request-rate", "inf", "--max-connections", 1, "--num-prompts", 4, "--output-len", 50)[
        1
    ]
    requests = sorted(found["rounds"][0]["requests"], key=lambda r: r["start_ms"])
    assert [r["late_ms"] for r in requests] == [r["start_ms"] for r in requests]
    for earlier, later in itertools.pairwise(requests):
        assert later["start_ms"] >= earlier["start_ms"] + earlier["e2e_ms"] - 0.01


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_groups_share_a_prefix(bench, server, endpoint):
    args = ["--workload", "shared-prefix", "--concurrency", 2, "--num-prompts", 4, "--output-len", 2]
    status, found, _ = bench(server.port, *args, "--endpoint", endpoint, "--prefix-len", 400)
    assert status == 0
    assert found["rounds"][0]["prompt_tokens"] / 4 == pytest.approx(656, rel=0.15)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_answers_become_history(bench, endpoint):
    prompts = []

    def answer(job):
        prompts.append(bytes(token for token in job.prompt.tokens if token < EOS).decode())
        return itertools.cycle(b"abc ")

    with serving(lambda _: FakeBackend(answer=answer)) as server:
        args = ["--workload", "multi-turn", "--turns", 3, "--concurrency", 1, "--num-prompts", 5, "--warmup", 0]
        status, found, _ = bench(server.port, *args, "--output-len", 8, "--input-len", 60, "--endpoint", endpoint)
    assert status == 0
    assert found["rounds"][0]["n_ok"] == 5
    first, second, third, *_ = sent = prompts[2:]  # after the probe's
    for earlier, later in ((first, second), (second, third), (sent[3], sent[4])):
        assert later.startswith(earlier)
        assert "abc abc " in later[len(earlier) :]
    assert not sent[3].startswith(first)


def test_more_clients_than_conversations_is_told(bench, server):
    args = ["--workload", "multi-turn", "--turns", 2, "--num-prompts", 4, "--concurrency", "2,3", "--output-len", 2]
    status, found, out = bench(server.port, *args)
    assert (status, [one["n_ok"] for one in found["rounds"]]) == (0, [4, 4])
    assert "3 at a time: only 2 have something to ask" in out.err
    assert "2 at a time: only" not in out.err


def test_a_file(bench, server, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a", "output_tokens": 3}, {"messages": [{"role": "user", "content": "b"}]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, found, _ = bench(server.port, "--dataset", path, "--concurrency", 1, "--output-len", 4)
    assert (status, found["rounds"][0]["output_tokens"]) == (0, 8)
    status, found, out = bench(server.port, "--dataset", path, "--concurrency", 1, "--num-prompts", 3)
    assert [r["output_tokens"] for r in found["rounds"][0]["requests"]] == [3, 128, 3]
    assert "more than once" in out.err


def test_a_malformed_file_is_told_before_anything_is_sent(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{\n')
    assert cli.main(["bench", "--base-url", "http://127.0.0.1:9", "--dataset", str(path)]) == 1
    assert "prompts.jsonl:2: not JSON" in capsys.readouterr().err


def test_answers_that_end_early_are_counted(bench):
    def answer(job):
        return [*b"no", EOS]

    with serving(lambda _: FakeBackend(answer=answer)) as server:
        status, found, out = bench(server.port, "--concurrency", 2, "--num-prompts", 4, "--output-len", 9)
    assert (status, found["rounds"][0]["n_short"]) == (0, 4)
    assert "short: 4 answers" in out.out


def test_requests_that_fail_make_the_status_and_are_told_by_kind(bench):
    served = itertools.count()

    def answer(job):
        if next(served) >= 5:  # two of the probe, one of the warm-up, two of the round
            raise RuntimeError("broken")
        return itertools.cycle(b"abc ")

    with serving(lambda _: FakeBackend(answer=answer)) as server:
        status, found, out = bench(server.port, "--concurrency", 1, "--num-prompts", 4, "--warmup", 1)
    one = found["rounds"][0]
    assert (status, one["n_ok"], one["n_failed"]) == (1, 2, 2)
    assert sum(one["errors"].values()) == 2
    assert "failed: " in out.out


def test_nobody_there(bench):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    status, found, out = bench(port)
    assert (status, found["rounds"]) == (1, [])
    assert "/v1: Connection refused. Is the server running?" in out.err


def test_a_template_longer_than_the_prompt(server, capsys):
    assert cli.main(["bench", "--base-url", f"http://127.0.0.1:{server.port}", "--input-len", "3"]) == 1
    assert "--input-len 3: the chat template alone has" in capsys.readouterr().err


USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


def sse(*chunks, done=True):
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*events, "data: [DONE]\n\n" if done else ""]).encode()


def piece(text, finish=None):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def good_stream(n_words):
    usage = USAGE | {"prompt_tokens": 3 + n_words}
    return sse(piece("a"), piece("b", "length"), {"choices": [], "usage": usage})


@contextmanager
def strange_server(reply):
    """``reply(body, number)`` gives status, content type, bytes, and the Content-Length that is declared."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(*reply(body, next(numbers)))

        def do_GET(self):
            self.send(200, "application/json", b'{"data": [{"id": "strange"}]}')

        def send(self, status, kind, raw, declared=None):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw) if declared is None else declared))
            self.end_headers()
            self.wfile.write(raw)
            self.close_connection = declared is not None

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE_S)


def n_words(body):
    return len(body["messages"][0]["content"].split())


def fine(body):
    return 200, "text/event-stream", good_stream(n_words(body))


CUT = sse(piece("a"), done=False)
FAULTS = {
    "HTTP 429": (429, "application/json", b'{"error": {"message": "the queue is full"}}'),
    "HTTP 502": (502, "text/html", b"<html>bad gateway</html>"),
    "not a stream": (200, "application/json", b"{}"),
    "cut off": (200, "text/event-stream", sse(piece("a", "stop"), done=False)),
    "malformed stream": (200, "text/event-stream", b"data: {no json}\n\n"),
    "error in the stream": (200, "text/event-stream", sse(piece("a"), {"error": {"message": "out of memory"}})),
    "no usage": (200, "text/event-stream", sse(piece("a", "stop"))),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_of_failure(bench, kind):
    def reply(body, number):
        return FAULTS[kind] if number >= 4 and number % 2 else fine(body)

    with strange_server(reply) as port:
        status, found, out = bench(port, "--concurrency", 1, "--num-prompts", 4)
    one = found["rounds"][0]
    assert (status, one["n_ok"], one["errors"]) == (1, 2, {kind: 2})
    assert f"failed: 2 x {kind}" in out.out


def test_a_stream_that_is_cut_in_the_middle(bench):
    def reply(body, number):
        return (200, "text/event-stream", CUT, len(CUT) + 100) if number == 5 else fine(body)

    with strange_server(reply) as port:
        status, found, _ = bench(port, "--concurrency", 1, "--num-prompts", 3)
    assert (status, found["rounds"][0]["errors"], found["rounds"][0]["n_ok"]) == (1, {"cut off": 1}, 2)


def test_a_server_that_says_nothing(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        args = ["--base-url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--model", "m", "--timeout", "0.05"]
        assert cli.main(["bench", *args]) == 1
    assert "sent nothing for 0.05 s" in capsys.readouterr().err


def test_a_warm_up_that_fails_ends_it(bench):
    with strange_server(lambda body, number: fine(body) if number < 2 else FAULTS["HTTP 502"]) as port:
        status, found, out = bench(port)
    assert (status, found["rounds"]) == (1, [])
    assert "answered 502: <html>bad gateway</html>" in out.err


def test_a_server_that_refuses_ignore_eos_is_asked_without(bench):
    def reply(body, number):
        if "ignore_eos" in body:
            return 400, "application/json", b'{"error": {"message": "Unrecognized request argument: ignore_eos"}}'
        return fine(body)

    with strange_server(reply) as port:
        status, found, out = bench(port, "--concurrency", 1, "--num-prompts", 2)
        assert (status, found["server"]["ignore_eos"]) == (0, False)
        assert "does not take ignore_eos" in out.err
        status, found, out = bench(port, "--concurrency", 1, "--ignore-eos")
        assert (status, found["rounds"]) == (1, [])
        assert "Unrecognized request argument" in out.err


def test_what_is_sent(bench):
    bodies = []

    def reply(body, number):
        bodies.append(body)
        return fine(body)

    extra = '{"top_k": 5, "max_tokens": null, "max_completion_tokens": 11}'
    with strange_server(reply) as port:
        args = ["--model", "m", "--extra-body", extra, "--no-ignore-eos", "--input-len", 20]
        assert bench(port, *args, "--concurrency", 1, "--num-prompts", 1)[0] == 0
    body = bodies[-1]
    assert len(body.pop("messages")[0]["content"].split()) == 17  # the server counts three more than there are words
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_k": 5,
        "max_completion_tokens": 11,
    }


def test_a_conversation_ends_with_its_first_failure(bench):
    with strange_server(lambda body, number: fine(body) if number < 4 else FAULTS["HTTP 429"]) as port:
        args = ["--workload", "multi-turn", "--turns", 4, "--num-prompts", 4, "--concurrency", 1]
        status, found, out = bench(port, *args)
    assert (status, found["rounds"][0]["n_failed"]) == (1, 1)
    assert "not sent: 3" in out.out


def test_a_key_goes_out_and_is_not_written_down(bench, tmp_path):
    keys = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            keys.append(self.headers["Authorization"])
            self.send_error(500)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        _, found, out = bench(server.server_address[1], "--api-key", "secret-key")
        server.shutdown()
        thread.join(DEADLINE_S)
    assert keys == ["Bearer secret-key"]
    assert "secret-key" not in json.dumps(found) + out.out + out.err


def test_ctrl_c_tells_what_was_measured(tmp_path):
    stuck, release = threading.Event(), threading.Event()
    n_jobs = itertools.count()

    def answer(job):
        n = next(n_jobs)
        return stalling() if n == 5 else itertools.cycle(b"abc ")  # two of the probe, one of the warm-up, two answered

    def stalling():
        yield from b"ab"
        stuck.set()
        assert release.wait(3 * DEADLINE_S)
        yield from itertools.cycle(b"abc ")

    figures = tmp_path / "figures.json"
    with serving(lambda _: FakeBackend(answer=answer)) as server:
        url = f"http://127.0.0.1:{server.port}"
        args = ["--base-url", url, "--concurrency", "1", "--num-prompts", "4", "--output-len", "8", "--warmup", "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_serve", "bench", *args, "--json", str(figures)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert stuck.wait(3 * DEADLINE_S)  # a process has to start
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=2 * DEADLINE_S)
        finally:
            process.kill()
            process.wait()
            release.set()
    assert process.returncode == 130, err
    assert "2 of 4 requests" in out
    assert "failed" not in out
    found = json.loads(figures.read_text())
    assert (found["interrupted"], found["rounds"][0]["n_ok"]) == (True, 2)


def test_a_picture(bench, server, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rounds.png"
    env = os.environ | {"MPLCONFIGDIR": str(tmp_path)}
    command = [sys.executable, "-m", "mlx_serve", "bench", "--base-url", f"http://127.0.0.1:{server.port}"]
    command += ["--concurrency", "1,2", "--num-prompts", "2", "--output-len", "3", "--plot", str(picture)]
    subprocess.run(command, check=True, cwd=ROOT, env=env, capture_output=True)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
