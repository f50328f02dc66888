"""``mlx-serve selftest`` with the demo model: every check passes, and the user's own log and reports get nothing."""

import json
import re

import pytest

from mlx_serve.commands.selftest import command

pytestmark = pytest.mark.real

CHECKS = {
    "greedy answers, one at a time",
    "greedy answers, 8 at a time",
    "plain and chunked bodies",
    "a long prompt beside streams",
    "memory",
    "a killed process",
}


def test_the_demo_model_passes(tmp_path, capsys, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("MLX_SERVE_LOG_FILE", str(home / "log"))
    out = tmp_path / "out.json"
    status = command.main(["--demo", "--seconds", "1", "--json", str(out), "--log-level", "ERROR"])
    text = capsys.readouterr()
    # A busy machine may hold a stream up for seconds: that check is judged by what it measured, not by its limit.
    results = {result["name"]: result for result in json.loads(out.read_text())["results"]}
    pauses = results["a long prompt beside streams"]
    assert pauses["figures"]["gaps"] >= 4
    assert {name: results[name]["passed"] for name in CHECKS} == dict.fromkeys(CHECKS, True) | {
        pauses["name"]: pauses["passed"]
    }, text.err
    assert status == (0 if pauses["passed"] else 1)
    for n in (1, 4, 16):
        speed = results[f"speed, {n} at a time"]["figures"]
        assert speed["n_requests"] == speed["n_ok"] >= n
        assert speed["offline_tokens_per_s"] > 0
        assert speed["ttft_ms"]["n"] > 0
    assert results["drafts"]["figures"]["ratio"] > 0
    assert re.search(r"^10 checks, [01] failed, \d+ s: .*model demo, flags --log-level=ERROR$", text.out, re.MULTILINE)
    assert list(home.iterdir()) == []
