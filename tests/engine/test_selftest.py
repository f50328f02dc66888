"""``mlx-serve selftest`` with a tiny model: its checks pass on a good server, and fail on a bad one."""

import json

import pytest

from mlx_serve.client.place import place
from mlx_serve.commands.bench.load import LoadTarget
from mlx_serve.commands.selftest import checks, command
from mlx_serve.commands.selftest.checks import AskedText
from mlx_serve.testing import ENTRY, serving
from tests.engine.tinymodel import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_good_server_passes(model, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert command.main(["--model", str(model), "--scale", "0.1", "--json", str(out)]) == 0
    results = {result["name"]: result for result in json.loads(out.read_text())["results"]}
    assert results["greedy answers, one at a time"]["figures"] == {"equal": 6, "of": 6}
    assert results["speed, 16 at a time"]["figures"]["ratio"] > 0
    text = capsys.readouterr().out
    assert "FAIL" not in text
    assert f"{len(results)} checks, 0 failed" in text


def test_a_server_that_does_not_start_is_the_result(capsys, model):
    assert command.main(["--model", str(model), "--max-queue", "0"]) == 1
    assert "--max-queue" in capsys.readouterr().err


def test_other_texts_than_the_model_s_own_fail():
    with serving() as server:
        target = LoadTarget(place(server.url), ENTRY.name, chat=False)
        asked = [AskedText("hello", 4, "something else")] * 2
        assert checks.alone(target, asked).passed is False
        assert checks.together(target, asked).passed is False


def test_what_cannot_be_checked_is_neither_good_nor_bad():
    with serving() as server:
        target = LoadTarget(place(server.url), ENTRY.name, chat=False)
        assert checks.after_a_crash(target, AskedText("a", 1, "b"), None).passed is None
