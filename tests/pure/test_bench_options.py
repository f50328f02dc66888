"""The flags of the benchmark."""

import math

import pytest

from mlx_serve.client.place import place
from mlx_serve.commands.bench import options
from mlx_serve.commands.bench.options import from_args
from mlx_serve.commands.bench.stats import Slo


def test_defaults():
    found = from_args([])
    assert str(found.server) == "http://127.0.0.1:8080/v1"
    assert (found.concurrency, found.request_rates) == ((1, 4, 16), ())
    assert (found.workload, found.chat, found.ignore_eos) == ("random", True, None)
    assert found.fields == {"temperature": 0.0}
    assert not found.slo.any()


def test_loads():
    found = from_args(["--request-rate", "0.5, 2,inf"])
    assert (found.concurrency, found.request_rates) == ((), (0.5, 2.0, math.inf))
    assert from_args(["--concurrency", "2", "--request-rate", "1"]).concurrency == (2,)


def test_a_file_is_its_own_workload(tmp_path):
    assert from_args(["--dataset", str(tmp_path / "p.jsonl")]).workload == "file"


def test_goals_are_in_milliseconds():
    found = from_args(["--slo-ttft", "500", "--slo-itl", "50", "--slo-tpot", "40", "--slo-e2e", "9000"])
    assert found.slo == Slo(ttft_s=0.5, itl_s=0.05, tpot_s=0.04, e2e_s=9.0)


def test_extra_fields_win():
    found = from_args(["--temperature", "0.5", "--extra-body", '{"temperature": null, "top_p": 0.9}'])
    assert found.fields == {"temperature": None, "top_p": 0.9}


def test_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert from_args([]).server.headers()["Authorization"] == "Bearer from-environment"
    assert from_args(["--api-key", "k"]).server.headers()["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "args",
    [
        ["--concurrency", "0"],
        ["--concurrency", "1,x"],
        ["--concurrency", ""],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--num-prompts", "0"],
        ["--warmup", "-1"],
        ["--range-ratio", "1"],
        ["--input-len", "1.5"],
        ["--extra-body", "[]"],
        ["--extra-body", "{"],
        ["--base-url", "ftp://host"],
        ["--base-url", "http://host/v1?x=1"],
        ["--base-url", "http://host:port"],
        ["--workload", "file"],
        ["--json", "/no/such/directory/x.json"],
        ["--offline", "/no/such/model"],
        ["--timeout", "0"],
    ],
)
def test_a_bad_flag_is_named(args, capsys):
    with pytest.raises(SystemExit) as caught:
        from_args(args)
    assert caught.value.code == 2
    assert args[0] in capsys.readouterr().err


def test_a_file_and_another_workload_exclude_each_other(tmp_path):
    with pytest.raises(SystemExit):
        from_args(["--workload", "random", "--dataset", str(tmp_path)])


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        from_args(["--plot", "p.png"])
    assert "matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:1", "http://host:1/v1"),
        ("localhost:8080", "http://localhost:8080/v1"),
        ("http://host:1/", "http://host:1/v1"),
        ("https://host/openai/v1/", "https://host/openai/v1"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
    ],
)
def test_a_base_url(url, expected):
    assert str(place(url, None, 1.0)) == expected
