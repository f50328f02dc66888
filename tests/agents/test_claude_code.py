"""Claude Code itself, from npm, in a network of its own that has no way out.

npm install --prefix SOMEWHERE @anthropic-ai/claude-code
CLAUDE=SOMEWHERE/node_modules/.bin/claude pytest tests/agents
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLAUDE = os.environ.get("CLAUDE") or shutil.which("claude")
SCRIPT = Path(__file__).with_name("claude_code.py")
ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
TIMEOUT_S = 180


def _can_be_alone() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(CLAUDE is None, reason="Claude Code is not installed: npm install @anthropic-ai/claude-code"),
    pytest.mark.skipif(not _can_be_alone(), reason="a network namespace of one's own is not allowed here"),
]


@pytest.fixture(scope="module")
def session():
    command = [*ALONE, sys.executable, str(SCRIPT), str(Path(CLAUDE).absolute())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_calls_its_tool_and_tells_what_came_of_it(session):
    assert session["status"] == 0, session
    result = json.loads(session["said"])
    assert (result["result"], result["is_error"]) == ("There are: letter.txt picture.png", False)
    assert result["usage"]["output_tokens"] > 0
    assert session["n_refused"] == 0
    assert "POST /v1/messages" in session["requests"]


def test_its_second_prompt_begins_with_its_first(session):
    first, second = session["prompts"]
    assert second.startswith(first)
    assert "x-anthropic-billing-header" not in first
    assert "letter.txt" in second.removeprefix(first)
