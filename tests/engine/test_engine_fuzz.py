"""Random jobs that share a backend, a few of each kind. ``python -m tests.engine.fuzz`` runs any number."""

from queue import SimpleQueue

import pytest

from mlx_serve.engine.generate.prompts import Prompts
from mlx_serve.values import Job, Prompt, Sampling
from tests.engine import fuzz

# The kinds whose caches can't drop tokens, so that nothing is drafted.
NEVER_CUT_BACK = {
    *("recurrent", "recurrent, mostly", "recurrent lists", "mixed", "window lists"),
    *("recurrent, one by one", "mixed, one by one", "windows, one by one"),
}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_what_runs_beside_a_job_changes_none_of_its_tokens(kind):
    outcome = fuzz.Outcome()
    drafts = kind not in NEVER_CUT_BACK
    for seed in range(1, 6):
        fuzz.run(kind, seed, outcome, n_requests=8)
        if outcome.n_drafted or not drafts:
            break
    assert not outcome.faults, "\n".join(outcome.faults)
    assert outcome.n_tokens > 10
    assert (outcome.n_drafted > 0) is drafts


@pytest.mark.parametrize("kind", ["plain", "windows", "recurrent lists", "mixed, one by one"])
def test_what_comes_from_disk_changes_no_token(kind):
    outcome = fuzz.Outcome()
    for seed in range(1, 6):
        fuzz.run(kind, seed, outcome, n_requests=8, with_disk=True)
        if outcome.n_loaded > 2:
            break
    assert not outcome.faults, "\n".join(outcome.faults)
    assert outcome.n_loaded


def test_prefixes_are_shared_and_jobs_cancelled():
    outcome = fuzz.Outcome()
    for kind in ("plain", "windows", "recurrent"):
        fuzz.run(kind, 2, outcome)
    assert outcome.n_cached > 60
    assert outcome.n_cancelled > 2


def test_a_wrong_token_is_found(monkeypatch):
    share = Prompts._share

    def share_another(self, prompt, donor):
        # As long as it should be, but of other tokens.
        cache = share(self, prompt, donor)
        cache[0].keys = cache[0].keys[..., ::-1, :]
        return cache

    monkeypatch.setattr(Prompts, "_share", share_another)
    outcome = fuzz.Outcome()
    for seed in range(3):
        fuzz.run("plain", seed, outcome)
    assert any("alone" in fault for fault in outcome.faults)


def test_only_what_rounding_can_change_is_a_tie(monkeypatch):
    job = Job("m", Prompt((1, 2, 3)), Sampling(4), 0, SimpleQueue())
    right = fuzz.alone(fuzz.KINDS["plain"], job).tokens
    wrong = fuzz.Result([right[0], (right[1] + 1) % fuzz.VOCAB_SIZE], is_cancelled=True)
    assert fuzz.difference(fuzz.KINDS["plain"], job, wrong).startswith("token 1 is ")
    monkeypatch.setattr(fuzz, "NOISE", 100.0)
    assert fuzz.difference(fuzz.KINDS["plain"], job, wrong) == ""
