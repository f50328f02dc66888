"""The real Codex CLI, where it is installed and a network of nothing but loopback can be made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).with_name("codex_session.py")
CODEX = os.environ.get("CODEX") or shutil.which("codex")
ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def can_be_alone() -> bool:
    return all(map(shutil.which, ("unshare", "ip"))) and subprocess.run([*ALONE, "true"], check=False).returncode == 0


@pytest.mark.skipif(CODEX is None, reason="codex is not installed: npm install --global @openai/codex, or set CODEX")
def test_codex_lists_a_folder_and_writes_a_file():
    if not can_be_alone():
        pytest.skip("a network namespace cannot be made here")
    done = subprocess.run([*ALONE, sys.executable, SCRIPT, CODEX], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
