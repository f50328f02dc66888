"""docs/commands.md is what the parsers say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    page = runpy.run_path(str(ROOT / ".ci/commands_page.py"))["page"]
    assert (ROOT / "docs/commands.md").read_text() == page(), "run `make docs`"
