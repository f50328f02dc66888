"""The workflows of .github: what they run is pinned, and has the rights that it needs and no more."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

WORKFLOWS = sorted((Path(__file__).parents[2] / ".github/workflows").glob("*.yml"))


def steps(path):
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_hash(path):
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name) for name in used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_it_may_only_read_and_has_no_secret(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_shell_reads_every_step(path):
    for step in steps(path):
        if "run" in step:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)
