"""Which processes of a machine may use its GPU: from the lines of ps."""

import os

import pytest

from mlx_serve import neighbours
from mlx_serve.neighbours import among


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/opt/py/bin/python /opt/py/bin/mlx-serve --model m --port 8080", "mlx-serve"),
        ("python3 -m mlx_serve serve m", "mlx-serve"),
        ("/opt/py/bin/mlx-serve", "mlx-serve"),
        ("python3 -m mlx_lm.server --port 1", "mlx_lm"),
        ("python3 -m mlx_lm server", "mlx_lm"),
        ("/opt/py/bin/mlx_lm.generate --prompt x", "mlx_lm"),
        ("/opt/homebrew/bin/ollama runner --model /x", "Ollama"),
        ("/opt/homebrew/bin/llama-server -m x.gguf", "llama.cpp"),
        ("/Applications/LM Studio.app/Contents/MacOS/LM Studio", "LM Studio"),
        ("python3 -m vllm_mlx serve x", "another MLX server"),
    ],
)
def test_a_program_is_known_by_its_command(command, name):
    assert [str(found) for found in among([f"  12     1 {command}"], {7})] == [f"{name} (process 12)"]


@pytest.mark.parametrize(
    "command",
    [
        "/opt/py/bin/mlx-serve doctor",
        "python3 -m mlx_serve chat hello",
        "vim mlx_serve/cli.py",
        "tail -f /Library/Logs/mlx-serve/mlx-serve.log",
        "/bin/zsh",
        "",
    ],
)
def test_what_does_not_compute_is_left_out(command):
    assert among([f"12 1 {command}", "what is no line of ps"], {7}) == []


def test_this_server_is_no_neighbour_of_its_own():
    lines = ["10 1 mlx-serve --supervise", "11 10 mlx-serve --supervise", "12 11 python -m mlx_serve --x"]
    assert among(lines, {10, 11}) == []


def test_a_program_is_named_once():
    lines = ["10 1 mlx-serve --supervise", "11 10 mlx-serve --supervise", "20 1 ollama serve", "21 20 ollama runner x"]
    assert [found.pid for found in among(lines, {7})] == [10, 20]


def test_where_ps_is_missing_nobody_is_found(monkeypatch):
    monkeypatch.setattr(neighbours, "_PS", ("/does/not/exist",))
    assert neighbours.running() == []
    monkeypatch.setattr(neighbours, "_PS", ("echo", f"1 0 ollama serve\n2 {os.getpid()} ollama serve"))
    assert [found.pid for found in neighbours.running()] == [1]
