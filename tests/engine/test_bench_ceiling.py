"""The benchmark's child: what mlx-lm generates without a server, beside this server with the same tiny model."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from mlx_serve.commands.bench.ceiling import CeilingError, ceiling
from tests.engine.tinymodel import write_model

# A busy machine is no fault of the code: three programs that import MLX.
DEADLINE_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def serving(model):
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_serve", "--model", str(model), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"ready: (http://\S+)/v1", line):
                yield found[1]
                return
        raise AssertionError(f"it ended before it was ready: {''.join(lines)}")
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_every_prompt_gets_its_own_number_of_tokens(model):
    message = {"role": "user", "content": "abc"}  # the template makes "user: abc" and a line end of it
    with ceiling(str(model)) as offline:
        found = offline.run(["abcd", [message], "xyz"], 2, [5, 1, 9], ignore_eos=True)
        assert (found.prompt_tokens, found.output_tokens, found.n_short) == (4 + 10 + 3, 15, 0)
        assert found.rate == pytest.approx(15 / found.seconds)
        again = offline.run(["abcd"], 1, 4, ignore_eos=True, warm_up=False)
        assert (again.prompt_tokens, again.output_tokens) == (4, 4)


def test_an_end_token_ends_an_answer_unless_it_is_ignored(tmp_path):
    # Every token of this model ends its answer.
    model = write_model(tmp_path / "terse", eos_token_id=list(range(260)))
    with ceiling(str(model)) as offline:
        found = offline.run(["abc", "def"], 2, 5)
        assert (found.output_tokens, found.n_short) == (0, 2)
        assert offline.run(["abc", "def"], 2, 5, ignore_eos=True).output_tokens == 10


def test_a_child_that_fails_is_told(tmp_path, capfd):
    (tmp_path / "config.json").write_text("{}")
    with ceiling(str(tmp_path)) as offline, pytest.raises(CeilingError, match="its error message is above"):
        offline.run(["abc"], 1, 4)
    assert "Error" in capfd.readouterr().err


def test_served_and_offline_do_the_same_work(model, tmp_path):
    figures = tmp_path / "figures.json"
    with serving(model) as url:
        args = ["--base-url", url, "--concurrency", "2", "--request-rate", "inf", "--offline", str(model)]
        args += ["--num-prompts", "3", "--input-len", "100", "--output-len", "6", "--range-ratio", "0.5"]
        done = subprocess.run(
            [sys.executable, "-m", "mlx_serve", "bench", *args, "--json", str(figures)],
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 0, done.stderr
    assert "served / offline" in done.stdout
    assert "different prompts" not in done.stdout
    for one in json.loads(figures.read_text())["rounds"]:
        assert one["offline"]["prompt_tokens"] == one["prompt_tokens"]
        assert one["offline"]["output_tokens"] == one["output_tokens"]
        assert one["served_over_offline"] == pytest.approx(one["output_tokens_per_s"] / one["offline"]["rate"])
