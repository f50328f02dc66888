"""One server on two ranks, as mlx.launch starts them: two processes of the command, joined by MLX's ring on loopback.

What they answer is compared with what one process answers; then one of them is told to end, or dies.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from tests.engine.tinymodel import tiny_qwen2, write_model

pytestmark = pytest.mark.slow

DEADLINE_S = 300
LONG = "The same long beginning of two prompts, of which the second is to find the first one's cache. "


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for i, name in enumerate(("first", "second")):
        write_model(root / name, i, make=tiny_qwen2, model_type="qwen2")
    return root


class Rank:
    """A process of the command; its log is read all the time, and kept."""

    def __init__(self, args, environ):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_serve", *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environ},
        )
        self.lines = []
        self.ready = Event()
        self._reader = Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if "ready:" in line:
                self.ready.set()
        # It has ended.
        self.ready.set()

    def ended(self):
        """The exit status and the whole log, once it has ended."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status, "".join(self.lines)

    def close(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self.process.stderr.close()


def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def ranks(tmp_path, *args, n=2, own=lambda rank: ((), {})):
    """The ranks and the port of HTTP; ``own`` gives a rank arguments and an environment of its own."""
    port, *ring = free_ports(1 + n)
    hosts = tmp_path / f"hosts{port}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{each}"] for each in ring]))
    started = []
    try:
        for rank in range(n):
            more, environ = own(rank)
            joined = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} if n > 1 else {}
            started.append(Rank([*args, *more, "--port", port], joined | environ))
        yield started, port
    finally:
        for each in started:
            each.close()


def wait_until_ready(started):
    assert started[0].ready.wait(DEADLINE_S)
    assert started[0].process.poll() is None, started[0].ended()[1]


def ask(port, body, path="/v1/completions"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def tokens(port, prompt, max_tokens=24, **fields):
    """The tokens of each choice."""
    status, answer = ask(port, {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 0, **fields})
    assert status == 200, answer
    return [choice["logprobs"]["tokens"] for choice in answer["choices"]]


def batch(port):
    """Requests of different lengths at once: they join and leave each other's batch."""
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(tokens, port, chr(65 + i) * (1 + 7 * i), 4 + 6 * i) for i in range(6)]
        return [each.result(DEADLINE_S) for each in asked]


def answers(port):
    """What must not depend on the number of ranks."""
    return {
        "greedy": tokens(port, "abc"),
        "seeds": tokens(port, "abc", n=3, temperature=0.9, seed=7),
        "batch": batch(port),
        "penalties": tokens(port, "abc", frequency_penalty=1.0, logit_bias={"65": 3}),
        "regex": tokens(port, "abc", guided_regex="(yes|no|perhaps){3,8}"),
        # Drafts are right: the answer repeats one token.
        "drafts": tokens(port, "abc", 200, logit_bias={"65": 100}),
        "echo": tokens(port, "some prompt to score", 4, echo=True),
        "chat": ask(port, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}, "/v1/chat/completions")[
            1
        ]["choices"],
    }


def vectors(port):
    """Of a short input, and of one that is longer than a step takes."""
    status, answer = ask(port, {"input": ["abc", LONG * 4]}, "/v1/embeddings")
    assert status == 200, answer
    return [item["embedding"] for item in answer["data"]]


def hang_up(port):
    """Ask for a long stream, and go when it has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    body = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data:")
    response.close()
    connection.close()
    while ask(port, None, "/health")[1]["running"]:
        pass


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """The answers of one process, and its vectors, which several round otherwise."""
    with ranks(tmp_path_factory.mktemp("alone"), "--model", models / "first", n=1) as (started, port):
        wait_until_ready(started)
        return answers(port) | {"vectors": [pytest.approx(vector, abs=1e-4) for vector in vectors(port)]}


@pytest.mark.parametrize(("split", "told"), [((), 0), (("--pipeline",), 1)], ids=["tensors", "pipeline"])
def test_two_ranks_answer_as_one_and_end_together(split, told, models, alone, tmp_path):
    # Kept prefixes are given up by rank 0's count of bytes, whatever the other holds.
    flags = [*split, "--prompt-cache-bytes", 40_000, "--draft-ngram"]
    with ranks(tmp_path, "--model", models / "first", *flags) as (started, port):
        wait_until_ready(started)
        assert answers(port) | {"vectors": vectors(port)} == alone
        # Without a seed the ranks draw as one, or they would not end as one either.
        drawn = tokens(port, "abc", 40, n=4, temperature=1.5)
        assert len({tuple(each) for each in drawn}) == 4
        # Sooner or later drafts are tried, whatever a step takes here.
        while not ask(port, None, "/stats")[1]["drafts"]["accepted_tokens"]:
            tokens(port, "abc", 200, logit_bias={"65": 100})
        hang_up(port)
        status, refused = ask(port, {"prompt": "abc", "logit_bias": {"100000": 1}})
        assert (status, refused["error"]["param"]) == (400, "logit_bias")
        tokens(port, LONG + "One.")
        _, again = ask(port, {"prompt": LONG + "Two.", "max_tokens": 4})
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(LONG)
        assert tokens(port, "abc") == alone["greedy"]
        started[told].process.send_signal(signal.SIGTERM)
        for each in started:
            status, log = each.ended()
            assert status == 0, log
            assert "Traceback" not in log


def test_models_come_and_go_on_all_ranks_and_one_that_a_rank_lacks_fails_alone(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for name, thetas in {"first": (1, 1), "second": (2, 2), "different": (3, 4), "missing": (5,)}.items():
        for root, theta in zip((here, there), thetas, strict=False):
            write_model(root / name, make=tiny_qwen2, model_type="qwen2", rope_theta=10.0**theta)

    def own(rank):
        return (), {"MLX_MODEL_PATH": str((here, there)[rank])}

    with ranks(tmp_path, "--max-loaded-models", 1, own=own) as (started, port):
        wait_until_ready(started)
        first = tokens(port, "abc", model="first")
        second = tokens(port, "abc", model="second")
        assert first != second
        for name in ("missing", "different"):
            status, answer = ask(port, {"model": name, "prompt": "abc"})
            assert (status, answer["error"]["param"]) == (500, "model")
        assert ask(port, {"model": "nowhere", "prompt": "abc"})[0] == 404
        assert tokens(port, "abc", model="first") == first
        assert tokens(port, "abc", model="second") == second


# A model that raises while a step is described, on all ranks alike, once it has been tried and has served for a while.
TIRED = """
from mlx_lm.models import qwen2
from mlx_lm.models.qwen2 import ModelArgs


class Model(qwen2.Model):
    n_passes = 0

    def __call__(self, inputs, **kwargs):
        Model.n_passes += inputs.shape[1] == 1
        if Model.n_passes > 60:
            raise ValueError("this model is tired")
        return super().__call__(inputs, **kwargs)
"""


def test_a_step_that_fails_alike_on_all_ranks_fails_its_request_alone(tmp_path):
    model = write_model(tmp_path / "tired", make=tiny_qwen2, model_type="qwen2", model_file="tired.py")
    (model / "tired.py").write_text(TIRED)
    with ranks(tmp_path, "--model", model, "--trust-remote-code") as (started, port):
        wait_until_ready(started)
        for _ in range(2):
            status, answer = ask(port, {"prompt": "some prompt", "max_tokens": 100, "ignore_eos": True})
            assert (status, answer["error"]["type"]) == (500, "server_error")
        assert ask(port, None, "/health")[0] == 200
        started[0].process.send_signal(signal.SIGTERM)
        assert [each.ended()[0] for each in started] == [0, 0]
        assert "this model is tired" in started[0].ended()[1]


def test_a_quantized_cache_that_the_model_cannot_have_is_refused_on_all_ranks(models, tmp_path):
    # This tiny model's heads are smaller than any group that MLX quantizes.
    with ranks(tmp_path, "--model", models / "first", "--kv-bits", 8) as (started, _):
        status, log = started[0].ended()
        assert status == 1
        assert "--kv-bits does not work" in log
        assert "lost the other ranks" not in log


def test_rank_0_ends_when_another_rank_dies(models, tmp_path):
    with ranks(tmp_path, "--model", models / "first") as (started, _):
        wait_until_ready(started)
        started[1].process.kill()
        status, log = started[0].ended()
        assert status == 1
        assert "mlx-serve: can't go on: lost the other ranks" in log


def test_the_others_end_when_rank_0_dies(models, tmp_path):
    with ranks(tmp_path, "--model", models / "first") as (started, _):
        wait_until_ready(started)
        started[0].process.kill()
        status, log = started[1].ended()
        assert status == 1
        assert "mlx-serve: rank 1 ends: lost the other ranks" in log


def test_a_rank_that_hangs_is_noticed(models, tmp_path):
    with ranks(tmp_path, "--model", models / "first", "--rank-timeout", 30) as (started, _):
        wait_until_ready(started)
        started[1].process.send_signal(signal.SIGSTOP)
        status, log = started[0].ended()
        assert status == 1
        assert "the ranks have not met for 30 s" in log


def test_ranks_with_different_settings_do_not_start(models, tmp_path):
    def own(rank):
        return ("--decode-concurrency", 4 + rank), {}

    with ranks(tmp_path, "--model", models / "first", own=own) as (started, _):
        logs = [each.ended() for each in started]
        assert [status for status, _ in logs] == [1, 1]
        assert "rank 1 is not like rank 0: its log says how" in logs[0][1]
        assert "rank 1 is not like rank 0: decode_concurrency 5 (rank 0: 4)" in logs[1][1]


def test_what_several_ranks_cannot_do_is_said_at_the_start(models, tmp_path):
    with ranks(tmp_path, "--model", models / "first", "--draft-model", models / "first") as (started, _):
        for each in started:
            status, log = each.ended()
            assert status == 1
            assert re.search("^mlx-serve: --draft-model does not work with several ranks$", log, re.M)


def test_a_model_that_cannot_be_split_says_so_at_the_start(tmp_path):
    path = write_model(tmp_path / "llama")
    with ranks(tmp_path, "--model", path, "--pipeline") as (started, _):
        status, log = started[0].ended()
        assert status == 1
        assert "can't split models of the type 'llama' as a pipeline; start without --pipeline" in log
        # Rank 0 told the other one to end.
        assert started[1].ended()[0] == 0
