"""A session of Claude Code against the whole server: it lists a folder by a tool call, and tells what it found.

    python tests/agents/claude_code.py path/to/claude

The model is scripted. Prints one line of JSON: what Claude Code printed, the prompts that the model was given, and the
requests. Run it where there is no network but the loopback, as ``test_claude_code.py`` does.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.clients.clientserver import served  # noqa: E402

TIMEOUT_S = 120
QUESTION = "Which files are in this folder?"
FILES = ("letter.txt", "picture.png")
CALL = '<tool_call>Bash {"command": "ls", "description": "List the files"}</tool_call>'
# It asks for nothing else then: no updates, no telemetry, no titles.
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}


class Model:
    """Calls the tool; once its result is there, repeats it."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        _, asked, result = prompt.rpartition("\ntool: ")
        if not asked:
            return f"<think>I have to look.</think>I look.{CALL}"
        return "There are: " + " ".join(name for name in FILES if name in result)


def run(claude: str) -> dict:
    model = Model()
    with served(model, context_tokens=None) as server, tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        for name in FILES:
            (work / name).touch()
        told = {"ANTHROPIC_BASE_URL": server.root_url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "fake"}
        told |= {"ANTHROPIC_SMALL_FAST_MODEL": "fake", "HOME": str(home), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [claude, "-p", QUESTION, "--output-format", "json", "--allowedTools", "Bash(ls:*)"],
            cwd=work,
            env=told | QUIET,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        requests = [f"{request.method} {request.path}" for request in server.requests]
    return {
        "status": done.returncode,
        "said": done.stdout,
        "errors": done.stderr,
        "prompts": model.prompts,
        "requests": requests,
        "n_refused": server.n_refused,
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
