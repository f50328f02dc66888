"""The command as a user runs it: start-up errors, the ready line, signals."""

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import contextmanager

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.engine.tinymodel import tiny_llama, write_model

DEADLINE_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def command(*args, **environ):
    """The running command; it is ended when the block is left."""
    import os

    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_serve", *map(str, args)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environ},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stderr.close()


def ready(process):
    """The ready line, and the port in it."""
    for line in process.stderr:
        if "ready:" in line:
            return line, int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)[1])
    raise AssertionError("it ended before it was ready")


def ask(port, path="/v1/completions", **fields):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("POST", path, json.dumps({"prompt": "abc", "max_tokens": 3, **fields}))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_it_serves_and_says_what_and_where_and_ends_cleanly(model):
    with command("--model", model, "--port", 0, "--max-queue", 7) as process:
        line, port = ready(process)
        assert "tiny" in line
        assert "context 512" in line
        assert "queue 7" in line
        status, body = ask(port)
        assert (status, body["model"], body["usage"]["completion_tokens"]) == (200, "tiny", 3)
        assert ask(port, model=str(model))[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert "Traceback" not in process.stderr.read()


def test_it_stays_ready_when_its_model_was_unloaded(model):
    with command("--model", model, "--port", 0, "--model-ttl", 0.1) as process:
        _, port = ready(process)
        while get(port, "/health")["models"]:
            pass
        assert get(port, "/ready") == {"status": "ready"}


def test_ctrl_c_ends_it_cleanly(model):
    with command("--model", model, "--port", 0) as process:
        ready(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_model_directory_serves_what_a_request_names(model):
    with command("--port", 0, MLX_MODEL_PATH=str(model.parent)) as process:
        _, port = ready(process)
        assert ask(port, model="tiny")[0] == 200
        assert ask(port, model="../tiny")[1]["error"]["code"] == "model_not_found"
        assert ask(port)[1]["error"]["code"] == "model_not_found"


def test_a_server_without_any_model_says_what_to_do(model, tmp_path):
    with command("--port", 0, MLX_MODEL_PATH=str(tmp_path)) as process:
        line, _ = ready(process)
        assert "none yet" in line
        assert "name one with --model, or try --demo" in process.stderr.readline()
    # Behind the ready line comes nothing of the kind when there are models: the next line is the end's.
    with command("--port", 0, MLX_MODEL_PATH=str(model.parent)) as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        assert "no model" not in process.stderr.read()


def test_a_grammar_that_does_not_fit_the_model_is_refused_by_its_field(model):
    pytest.importorskip("llguidance")
    with command("--model", model, "--port", 0) as process:
        _, port = ready(process)
        status, body = ask(port, stream=True, guided_grammar="start: <|no_such_token|>")
        assert (status, body["error"]["param"]) == (400, "guided_grammar")


def test_served_names_take_the_place_of_the_directory_s(model):
    with command("--model", model, "--port", 0, "--served-model-name", "a", "b") as process:
        _, port = ready(process)
        assert ask(port, model="a")[1]["model"] == "a"
        assert ask(port, model="b")[1]["model"] == "a"
        assert ask(port, model="tiny")[0] == 404


def write_adapter(path):
    """LoRA weights for the tiny model that change what it says, as mlx_lm.lora writes them."""
    model = tiny_llama()
    settings = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, settings)
    weights = {name: mx.random.normal(w.shape) for name, w in tree_flatten(model.parameters()) if "lora_" in name}
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_several_models_and_adapters(model, tmp_path):
    second = write_model(tmp_path / "second", seed=2)
    adapter = write_adapter(tmp_path / "lora")
    argv = ["--model", model, "--model", f"two={second}", "--adapter", f"sql={adapter}", "--alias", "gpt-*=two"]
    with command(*argv, "--port", 0) as process:
        line, port = ready(process)
        assert "model: tiny and 2 more" in line
        assert [m["id"] for m in get(port, "/v1/models")["data"] if m["loaded"]] == ["tiny"]
        texts = {}
        for name in ("tiny", "two", "sql"):
            status, body = ask(port, model=name, max_tokens=12)
            assert (status, body["model"]) == (200, name)
            texts[name] = body["choices"][0]["text"]
        assert len(set(texts.values())) == 3
        assert ask(port, model="gpt-4o", max_tokens=12)[1]["choices"][0]["text"] == texts["two"]
        assert ask(port, max_tokens=12)[1]["choices"][0]["text"] == texts["tiny"]
        assert [(m["id"], m["root"]) for m in get(port, "/v1/models")["data"]] == [
            *(("tiny", "tiny"), ("two", "two"), ("sql", "tiny"))
        ]


def test_a_file_says_it_all(model, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        f"""
        port = 0
        max_queue = 9
        [[models]]
        name = "main"
        path = "{model}"
        aliases = ["other"]
        max_model_len = 99
        [models.defaults]
        max_tokens = 2
        """
    )
    with command("--config", file, "--max-queue", 7) as process:
        line, port = ready(process)
        assert "model: main |" in line
        assert "context 99" in line
        assert "queue 7" in line
        body = {"model": "other", "messages": [{"role": "user", "content": "hi"}], "prompt": None, "max_tokens": None}
        status, answer = ask(port, "/v1/chat/completions", **body)
        assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, "main", 2)


def refused(*args):
    with command(*args) as process:
        _, text = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        lines = [line for line in text.splitlines() if line.startswith("mlx-serve: ")]
        assert len(lines) == 1
        assert "Traceback" not in text
        return lines[0]


def test_start_up_errors_are_one_line(model, tmp_path):
    assert "model not found" in refused("--model", tmp_path / "missing")
    assert "not a model directory" in refused("--model", tmp_path)
    assert "adapters not found" in refused("--model", model, "--adapter-path", tmp_path)
    assert "model directory not found" in refused("--model-dir", tmp_path / "missing")
    assert "exclude" in refused("--demo", "--model", model)
    assert "need --model" in refused("--served-model-name", "x")
    assert "no model is called 'b'" in refused("--model", model, "--alias", "a=b")
    assert "model not found" in refused("--model", model, "--model", tmp_path / "missing")
    file = tmp_path / "serve.toml"
    assert f"cannot read {file}" in refused("--config", file)
    file.write_text("max_tokns = 5")
    assert "did you mean max_tokens?" in refused("--config", file)


def test_unreadable_weights_are_one_line(tmp_path):
    path = write_model(tmp_path / "damaged")
    (path / "model.safetensors").write_bytes(b"no weights")
    assert "cannot load" in refused("--model", path, "--port", 0)


def test_a_port_that_is_taken_is_one_line(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refused("--model", model, "--port", port)


def test_what_runs_when_a_signal_comes_may_end(model):
    with command("--model", model, "--port", 0, "--max-tokens", 400) as process:
        _, port = ready(process)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "abc", "max_tokens": 400, "stream": True}))
        response = connection.getresponse()
        response.readline()
        process.send_signal(signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert process.wait(DEADLINE_S) == 0


def test_a_stream_that_does_not_end_in_time_is_told(model):
    with command("--model", model, "--port", 0, "--drain-timeout", 0) as process:
        _, port = ready(process)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        body = {"prompt": "abc", "max_tokens": 500, "stream": True, "logit_bias": {"257": -100}}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.readline()
        process.send_signal(signal.SIGTERM)
        last = response.read().decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        connection.close()
        assert process.wait(DEADLINE_S) == 0


def test_a_second_signal_ends_it_at_once(model):
    with command("--model", model, "--port", 0) as process:
        _, port = ready(process)
        # A request that is still being sent keeps the server from ending by itself.
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            process.send_signal(signal.SIGTERM)
            for line in process.stderr:
                if "ending" in line:
                    break
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def self_signed(folder):
    """A certificate and its key, of the kind a user makes."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command_line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command_line += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(command_line, check=True, capture_output=True)
    return cert, key


def test_tls_and_keys(model, tmp_path):
    cert, key = self_signed(tmp_path)
    with command("--model", model, "--port", 0, "--tls-cert", cert, "--tls-key", key, "--api-key", "k1") as process:
        line = next(line for line in process.stderr if "ready:" in line)
        port = int(re.search(r"https://127\.0\.0\.1:(\d+)/v1", line)[1])
        context = ssl.create_default_context(cafile=cert)
        for headers, status in (({}, 401), ({"Authorization": "Bearer k1"}, 200), ({"x-api-key": "k1"}, 200)):
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=DEADLINE_S, context=context)
            connection.request("GET", "/v1/models", headers=headers)
            assert connection.getresponse().status == status
            connection.close()


def test_a_unix_socket_is_made_for_its_owner_alone_and_goes(model, tmp_path):
    path = tmp_path / "s"
    with command("--model", model, "--uds", path) as process:
        assert any(f"ready: unix:{path}" in line for line in process.stderr)
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert sock.makefile("rb").readline().startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert not path.exists()


def test_a_bind_beyond_loopback_without_a_key_warns(model):
    with command("--model", model, "--port", 0, "--host", "0.0.0.0") as process:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "ready:" in line:
                break
        assert any("WARNING" in line and "--api-key-file" in line for line in seen)


def test_bodies_are_logged_at_debug_and_keys_never(model):
    with command("--model", model, "--port", 0, "--log-level", "DEBUG", "--api-key", "topsecret") as process:
        port = int(re.search(r":(\d+)/v1", next(line for line in process.stderr if "ready:" in line))[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        headers = {"Authorization": "Bearer topsecret"}
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "seen\n", "max_tokens": 1}), headers)
        assert connection.getresponse().read()
        connection.close()
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
        assert "seen" in log
        assert "topsecret" not in log


def test_json_logs_are_json(model):
    with command("--model", model, "--port", 0, "--log-format", "json") as process:
        lines = []
        for line in process.stderr:
            lines.append(json.loads(line))
            if "ready:" in lines[-1]["message"]:
                break
        ask(int(re.search(r":(\d+)/v1", lines[-1]["message"])[1]))
        entry = json.loads(process.stderr.readline())
        wanted = {"method": "POST", "path": "/v1/completions", "status": 200, "model": "tiny", "prompt_tokens": 3}
        wanted |= {"cached_tokens": 0, "output_tokens": 3, "finish_reason": "length"}
        assert wanted.items() <= entry.items()
