"""The doctor's findings about this machine and about model directories, as the command gives them."""

import json
import os
import socket
import subprocess
import sys

import pytest

from mlx_serve.commands.doctor import checks
from mlx_serve.commands.doctor import command as doctor
from mlx_serve.commands.doctor.checks import Probe
from mlx_serve.neighbours import Neighbour
from mlx_serve.probe import _architecture_fault
from mlx_serve.supervise import report
from tests.engine.tinymodel import GEMMA, LATENT, LFM2, tiny, tiny_gemma, tiny_lfm2, write_model

DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(capsys, monkeypatch):
    # The deaths of this machine's servers are not these tests'.
    monkeypatch.setattr(report, "folders", lambda *_: [])

    def command(*argv):
        status = doctor.main(["--json", *map(str, argv)])
        return status, json.loads(capsys.readouterr().out)

    return command


@pytest.fixture
def no_probe(monkeypatch):
    """For what has nothing to do with MLX, whose process takes seconds."""
    monkeypatch.setattr(checks, "probe", lambda *_, **__: Probe({"device": "cpu"}))


def problems(findings):
    return [finding["text"] for finding in findings if finding["level"] == "problem"]


def texts(findings, topic):
    return [finding["text"] for finding in findings if finding["topic"] == topic]


def test_nothing_stops_a_whole_model(run, model):
    status, findings = run("--model", model, "--port", 0)
    assert (status, problems(findings)) == (0, [])
    assert any(text.startswith("mlx-lm 0.") for text in texts(findings, "versions"))
    assert any("MLX computes on the " in text for text in texts(findings, "device"))
    assert any("llama, F32" in text and "context 512" in text for text in texts(findings, "model"))
    assert all(finding["advice"] for finding in findings if finding["level"] != "ok")


def test_it_is_a_command(model):
    line = [sys.executable, "-m", "mlx_serve", "doctor", "--model", model, "--port", "0"]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={**os.environ, "MLX_MODEL_PATH": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("No problem would stop the server.\n")


def test_a_model_type_that_mlx_lm_does_not_have(run, tmp_path):
    for kind in ("from_the_future", "../x"):
        path = write_model(tmp_path / f"model{len(kind)}", model_type=kind)
        status, findings = run("--model", path, "--port", 0)
        assert status == 1
        assert problems(findings) == [f"this mlx-lm has no model type '{kind}'"]


def test_a_model_type_that_leads_to_another_module_of_mlx_lm():
    assert _architecture_fault({"model_type": "cache"}) == "the code for model type 'cache' cannot be imported"


def test_flags_that_the_model_s_caches_do_not_allow(run, model, tmp_path):
    windowed = write_model(tmp_path / "windowed", make=lambda *_, **__: tiny_gemma(), **GEMMA)
    wanted = ("--kv-bits", 8, "--kv-group-size", 32)
    status, findings = run("--model", windowed, "--port", 0, *wanted)
    assert status == 1
    assert [text for text in problems(findings) if "--kv-bits does not work" in text and "RotatingKVCache" in text]
    recurrent = write_model(tmp_path / "recurrent", make=lambda *_, **__: tiny_lfm2(), **LFM2)
    status, findings = run("--model", recurrent, "--port", 0, "--draft-model", model)
    assert status == 1
    assert [text for text in problems(findings) if "--draft-model does not work" in text]
    latent = write_model(tmp_path / "latent", make=lambda *_, **__: tiny(LATENT), **LATENT)
    status, findings = run("--model", latent, "--port", 0, "--draft-model", model)
    assert [text for text in problems(findings) if "expands the whole cache" in text]
    status, findings = run("--model", windowed, "--port", 0, "--prompt-cache-bits", 8)
    assert [text for text in problems(findings) if "--prompt-cache-bits does not work" in text and "[8]" in text]
    wide = write_model(tmp_path / "wide", head_dim=32)
    status, findings = run("--model", wide, "--port", 0, "--draft-model", model, *wanted)
    assert [text for text in problems(findings) if "the draft model cannot be quantized" in text]
    status, findings = run("--model", wide, "--port", 0, "--draft-model", wide, *wanted)
    assert (status, problems(findings)) == (0, [])


def test_a_tokenizer_that_does_not_load(run, tmp_path):
    path = write_model(tmp_path / "model")
    (path / "tokenizer.json").write_text('{"model": 5}')
    status, findings = run("--model", path, "--port", 0)
    assert status == 1
    assert any("its tokenizer does not load" in text for text in problems(findings))


def test_a_damaged_model_does_not_hide_the_machine(run, tmp_path):
    path = write_model(tmp_path / "model")
    (path / "config.json").write_text("{")
    status, findings = run("--model", path, "--port", 0)
    assert status == 1
    assert any("MLX computes on the " in text for text in texts(findings, "device"))
    assert any("cannot be read" in text for text in problems(findings))


def test_a_port_that_is_taken(run, no_probe):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, findings = run("--port", port)
    assert status == 1
    assert any(f"port {port}" in text for text in problems(findings))


def test_files_of_the_flags(run, no_probe, tmp_path):
    for flags in (["--tls-cert", tmp_path / "none"], ["--api-key-file", tmp_path / "none"]):
        status, findings = run("--demo", "--port", 0, *flags)
        assert (status, len(problems(findings))) == (1, 1)


@pytest.mark.parametrize(("mode", "says"), [(0o600, []), (0o640, ["read"]), (0o604, ["read"]), (0o622, ["write"])])
def test_a_file_of_keys_is_for_the_server_alone(run, no_probe, tmp_path, mode, says):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(mode)
    status, findings = run("--demo", "--port", 0, "--api-key-file", keys)
    assert (status, texts(findings, "keys")) == (0, [f"other users may {what} {keys}" for what in says])


def test_a_model_with_something_to_wait_at_is_not_waited_for(run, tmp_path):
    path = write_model(tmp_path / "model")
    os.mkfifo(path / "merges.txt")
    status, findings = run("--model", path, "--port", 0)
    assert (status, problems(findings)) == (1, [f"{path / 'merges.txt'}: it is not a regular file"])


def test_a_socket_that_is_there_is_left_alone(run, no_probe, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        status, findings = run("--demo", "--uds", path)
        assert (status, texts(findings, "address")) == (0, [f"{path} exists"])
        assert path.exists()


def test_models_that_are_not_there(run, no_probe, tmp_path, monkeypatch):
    assert problems(run("--port", 0, "--model", tmp_path / "none")[1]) == [f"there is no directory '{tmp_path}/none'"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, findings = run("--port", 0, "--model", "owner/none")
    assert (status, problems(findings)) == (1, ["owner/none is not in the hub cache, and HF_HUB_OFFLINE is set"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(doctor.HfApi, "model_info", lambda *_, **__: None)
    assert run("--port", 0, "--model", "owner/none")[0] == 0
    status, findings = run("--port", 0, "--model-dir", tmp_path / "none")
    assert (status, problems(findings)) == (1, [f"model directory not found: {tmp_path}/none"])


def test_what_lies_in_the_model_directories(run, no_probe, tmp_path):
    write_model(tmp_path / "whole")
    (write_model(tmp_path / "part") / "model.safetensors").write_bytes(b"\0")
    status, findings = run("--port", 0, "--model-dir", tmp_path)
    assert status == 0
    told = texts(findings, "models")
    assert any("part cannot be served: model.safetensors is cut short" in text for text in told)
    assert any(text.startswith("servable models: 1,") for text in told)


def test_an_mlx_that_does_not_start(run, monkeypatch):
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    status, findings = run("--demo", "--port", 0)
    assert status == 1
    assert problems(findings) == ["MLX does not work: exit status 1"]


GB = 10**9


@pytest.mark.parametrize(
    ("weights", "limit", "level"),
    [(50 * GB, 100 * GB, "ok"), (95 * GB, 100 * GB, "note"), (101 * GB, 100 * GB, "problem")],
)
def test_whether_the_weights_fit(weights, limit, level):
    probe = Probe({"device_info": {"max_recommended_working_set_size": limit}})
    (finding,) = doctor.fit(weights, probe)
    assert finding.level == level


def test_what_metal_says():
    info = {
        "memory_size": 192 * 2**30,
        "max_recommended_working_set_size": 154 * 10**9,
        "device_name": "Apple M2 Ultra",
    }
    findings = list(checks.device(Probe({"device": "gpu", "device_info": info})))
    assert findings[0].text == "MLX computes on the gpu: Apple M2 Ultra"
    assert "154 GB" in findings[1].text
    # 5 % of 192 GiB stay with the system.
    assert "iogpu.wired_limit_mb=186777" in findings[1].advice


def test_memory_that_was_chosen_is_what_counts():
    probe = Probe({"device_info": {"max_recommended_working_set_size": 100 * GB}})
    (finding,) = doctor.fit(50 * GB, probe, 40 * GB)
    assert finding.level == "problem"


def test_names_that_do_not_fit_together(run, no_probe, model, tmp_path):
    status, findings = run("--port", 0, "--model", f"a={model}", "--alias", "x=none")
    assert (status, len(problems(findings))) == (1, 1)
    assert "no model is called 'none'" in problems(findings)[0]
    status, findings = run("--port", 0, "--model", model, "--adapter", f"a={tmp_path}")
    assert "adapters not found" in problems(findings)[0]


def test_a_configuration_file_is_read(run, no_probe, model, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(f'port = 0\n[[models]]\nname = "small"\npath = "{model}"\n')
    status, findings = run("--config", file)
    assert (status, problems(findings)) == (0, [])
    assert any(str(model) in text for text in texts(findings, "model"))
    file.write_text("prot = 0\n")
    status, findings = run("--config", file)
    assert (status, [finding["topic"] for finding in findings]) == (1, ["flags"])


def test_a_cache_directory_that_cannot_be_made(run, no_probe, tmp_path):
    (tmp_path / "file").touch()
    status, findings = run("--demo", "--port", 0, "--prompt-cache-dir", tmp_path / "file" / "cache")
    assert (status, len(problems(findings))) == (1, 1)
    assert run("--demo", "--port", 0, "--prompt-cache-dir", tmp_path / "new")[0] == 0
    assert not (tmp_path / "new").exists()


def test_beside_a_server_mlx_is_not_started(run, monkeypatch):
    others = [Neighbour(12, "mlx-serve"), Neighbour(13, "Ollama")]
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    monkeypatch.setattr(doctor.neighbours, "running", lambda: others)
    monkeypatch.setattr(checks, "probe", lambda *_, **__: pytest.fail("MLX was started"))
    _, findings = run("--demo", "--port", 0)
    assert texts(findings, "device") == [
        "MLX was not asked: mlx-serve (process 12) is running",
        "mlx-serve (process 12) may use the GPU too",
        "Ollama (process 13) may use the GPU too",
    ]


def test_without_a_model_there_is_nothing_to_serve(run, no_probe, tmp_path):
    status, findings = run("--model-dir", tmp_path, "--port", 0)
    assert status == 1
    assert any("there is no model to serve" in text for text in problems(findings))


def test_more_memory_than_the_machine_has(run, no_probe, model):
    _, findings = run("--model", model, "--port", 0, "--memory-bytes", "900TB")
    assert any("--memory-bytes 900 TB is more than the machine's" in text for text in problems(findings))


def test_a_repository_that_is_not_here_and_cannot_be_had(run, no_probe, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(doctor.HfApi, "model_info", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    _, findings = run("--model", "nobody/nothing", "--port", 0)
    assert any("the hub cannot be reached: no network" in text for text in problems(findings))
