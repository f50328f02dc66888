"""The whole command when the MLX thread hangs or ends: clients are answered in time, and the exit status says it."""

import http.client
import json
import re
import subprocess
import sys
from contextlib import contextmanager

from tests.waiting import DEADLINE_S, until

# The server with the fake backend, whose step does what FAULT says; a step is overdue after a moment.
SERVER = """
import sys
import threading
from pathlib import Path

from mlx_serve import cli, serve
from mlx_serve.engine.schedule import scheduler
from mlx_serve.engine.catalog import Catalog, ModelEntry
from mlx_serve.testing import FakeBackend, FakeModels

class Panic(BaseException):
    pass

def fault(jobs):
    if any(job.sampling.max_tokens == 13 for job in jobs):
        {fault}

entry = ModelEntry("fake", Path("fake"), 0, context_tokens=4096, vocab_size=262)
models = FakeModels(lambda _: FakeBackend(capacity=2, on_step=fault))
serve.open_models = lambda settings, ranks: (Catalog(entry, ["fake"]), models)
cli.ranked.join = lambda: None
serve._WORKER_S = serve._LAST_WORDS_S = 0.5
scheduler._STEP_S = (0.2, 0.2)
sys.argv = ["mlx-serve", "--port", "0", {flags}]
cli.run()
"""
PANICS, HANGS = "raise Panic('index out of bounds')", "threading.Event().wait()"


@contextmanager
def command(fault, *flags):
    """The process, and its port."""
    code = SERVER.format(fault=fault, flags=", ".join(map(repr, flags)))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        ready = next(line for line in process.stderr if "ready:" in line)
        yield process, int(re.search(r":(\d+)/v1", ready)[1])
    finally:
        process.kill()
        process.communicate()


def ask(port, method, path, **body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, json.dumps(body) if body else None)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def complete(port, max_tokens):
    return ask(port, "POST", "/v1/completions", prompt="abc", max_tokens=max_tokens)


def test_a_panic_is_told_to_its_clients_and_ends_the_process_with_a_status():
    with command(PANICS, "--drain-timeout", "600") as (process, port):
        assert complete(port, 5)[0] == 200
        status, body = complete(port, 13)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert process.wait(DEADLINE_S) == 1
        assert "Panic('index out of bounds')" in process.stderr.read().splitlines()[-1]


def test_while_a_step_hangs_time_outs_and_health_are_answered():
    with command(HANGS, "--request-timeout", "0.3") as (_, port):
        assert ask(port, "GET", "/ready")[0] == 200
        status, body = complete(port, 13)
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        until(lambda: ask(port, "GET", "/health")[0] == 503, "a step that is overdue")
        _, health = ask(port, "GET", "/health")
        assert health["status"] == "stalled"
        assert re.search(r"a step of fake for \d+ s", health["reason"])
        assert ask(port, "GET", "/ready") == (503, {"status": "stalled"})


def test_a_step_that_hangs_does_not_keep_the_process_from_ending():
    with command(HANGS, "--drain-timeout", "0.1") as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "abc", "max_tokens": 13}))
        until(lambda: ask(port, "GET", "/health")[1]["running"] == 1, "a request that runs")
        process.terminate()
        assert connection.getresponse().status == 503
        assert process.wait(DEADLINE_S) == 1
        assert "did not end within" in process.stderr.read().splitlines()[-1]
