"""The page's modules in node, each with the tests of its own; those that are all document are tested in a browser."""

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S

HERE = Path(__file__).parent
TESTS = sorted(path.name for path in HERE.glob("*.test.mjs"))
MODULES = {path.name.removesuffix(".js") for path in (files("mlx_serve") / "ui").iterdir() if path.name.endswith(".js")}
# What they do is seen in a browser alone: tests/real/test_page.py.
IN_A_BROWSER = {
    "api",
    "chat",
    "composer",
    "conversation_list",
    "dom",
    "figures",
    "key",
    "page",
    "panels",
    "poll",
    "settings",
    "storage",
    "turns",
}
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("name", TESTS)
def test_module(name):
    ended = subprocess.run(
        [NODE, HERE / name],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=3 * DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # A file without tests would pass.
    assert "# pass 0" not in ended.stdout


def test_every_module_has_tests():
    tested = {name.removesuffix(".test.mjs") for name in TESTS}
    assert tested | IN_A_BROWSER == MODULES
    assert not tested & IN_A_BROWSER
