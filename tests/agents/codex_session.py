"""Sessions of the real Codex CLI against the whole server, whose model follows a script. Run where nothing but loopback
can be reached (``unshare -rn``, ``ip link set lo up``), with the path of ``codex``.

The model lists the folder with a tool, is told what is there, and says so. As a model that Codex knows it also writes a
file, with the tool that takes a patch as free text.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.sockets.responsekit import Scripted, scripted  # noqa: E402 - a script, found from where it is

DEADLINE_S = 120
FILE, NEW_FILE = "notes-4711.txt", "new-4712.txt"
THOUGHT = "I should look first."
LAST = f"The folder has one file: {FILE}."
PATCH = f'*** Begin Patch\n*** Add File: {NEW_FILE}\n+a "new" file\n*** End Patch\n'
# Names that the model is served by: one that Codex does not know, and one that it does, with tools of its own.
UNKNOWN, KNOWN = "fake", "gpt-5.5"
CONFIG = """
model = "{model}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{base_url}"
wire_api = "responses"
env_key = "LOCAL_KEY"
"""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{name} {json.dumps(arguments)}</tool_call>"


ANSWERS = {
    UNKNOWN: [f"<think>{THOUGHT}</think>Let me see.{call('exec_command', cmd='ls')}", LAST],
    KNOWN: [
        f"<think>{THOUGHT}</think>Let me see.{call('exec_command', cmd='ls')}",
        f"<think>Now the file.</think>{call('apply_patch', input=PATCH)}",
        LAST,
    ],
}


def run(codex: str, model: str, script: Scripted, home: Path, folder: Path) -> list[dict]:
    """Codex's own events of one headless session."""
    (home / "config.toml").write_text(CONFIG.format(model=model, base_url=script.base_url))
    command = [codex, "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-C", str(folder)]
    done = subprocess.run(
        [*command, "What is in this folder?"],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "LOCAL_KEY": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(script: Scripted, answers: list[str], events: list[dict]) -> None:
    """What Codex showed, and what it sent back: each prompt is the one before, the answer, and the tool's output."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    said = [item["text"] for item in items if item["type"] == "agent_message"]
    assert said[-1] == LAST, items
    (ran,) = [item for item in items if item["type"] == "command_execution"]
    assert (ran["exit_code"], FILE in ran["aggregated_output"]) == (0, True), ran
    usage = next(event["usage"] for event in events if event["type"] == "turn.completed")
    assert usage["input_tokens"] == sum(map(len, script.prompts)), usage
    assert len(script.prompts) == len(answers)
    for before, answer, after in zip(script.prompts, answers, script.prompts[1:], strict=False):
        assert after[: len(before)] == before, "a prompt does not begin with the one before"
        new = script.tokenizer.decode(after[len(before) :])
        assert new.startswith(f"{answer}\n[tool]"), new
    assert FILE in script.asked(1)


def session(codex: str, model: str) -> None:
    """One session, in a folder of its own."""
    with (
        tempfile.TemporaryDirectory() as home,
        tempfile.TemporaryDirectory() as folder,
        scripted(context_tokens=1_000_000, names=(UNKNOWN, KNOWN)) as script,
    ):
        (Path(folder) / FILE).write_text("hello\n")
        script.answers += ANSWERS[model]
        events = run(codex, model, script, Path(home), Path(folder))
        check(script, ANSWERS[model], events)
        if model == KNOWN:
            assert (Path(folder) / NEW_FILE).read_text() == 'a "new" file\n'
        else:
            # Reasoning is shown to those who ask for a summary of it.
            thoughts = [event["item"].get("text") for event in events if "item" in event]
            assert THOUGHT in thoughts, events


def main(codex: str) -> None:
    for model in (UNKNOWN, KNOWN):
        session(codex, model)
        print(f"codex as {model}: ok")


if __name__ == "__main__":
    main(sys.argv[1])
