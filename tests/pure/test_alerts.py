"""The alert rules of examples/: their metrics exist, and promtool's unit tests pass where promtool is installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = ROOT / "examples/prometheus-alerts.yml"


def test_every_metric_of_a_rule_is_in_the_manual():
    manual = (ROOT / "docs/metrics.md").read_text()
    names = set(re.findall(r"mlx_serve:([a-z_]+?)(?:_bucket)?(?=[{ \[)])", RULES.read_text()))
    assert len(names) == 7
    assert all(f"`{name}`" in manual for name in names)


def test_promtool_accepts_the_rules_and_their_tests_pass():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool (Debian: prometheus) is not installed")
    subprocess.run([promtool, "check", "rules", RULES], check=True, capture_output=True)
    tests = Path(__file__).parent / "alerts/test.yml"
    done = subprocess.run([promtool, "test", "rules", tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
