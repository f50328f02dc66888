"""The code blocks of the project's pages, each with its language, and with the reason when it can't be run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md"))

_FENCE = re.compile(r"(`{3,})(\w*)\s*")
_MARKER = re.compile(r"<!-- not run: (.+) -->")
_LIST_ITEM = re.compile(r"([-*]|\d+\.) ")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is its fence's; ``not_run`` the marker's reason, or None."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}:{self.language or 'no language'}"


class BadPageError(Exception):
    """A page whose blocks can't be told apart; says where."""


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page. Raises BadPageError for a fence that does not end, a block that is only indented, and a
    marker with no block below it.
    """
    found: list[Block] = []
    lines = text.splitlines()
    i, marker = 0, None
    while i < len(lines):
        line = lines[i]
        if fence := _FENCE.fullmatch(line):
            end = _end(page, lines, i, fence[1])
            found.append(Block(page, i + 1, fence[2], "\n".join(lines[i + 1 : end]) + "\n", marker))
            i, marker = end + 1, None
            continue
        if marker is not None and line.strip():
            raise BadPageError(f"{page}:{i + 1}: below a marker stands no block")
        if match := _MARKER.fullmatch(line.strip()):
            marker = match[1]
        elif _is_indented_block(lines, i):
            raise BadPageError(
                f"{page}:{i + 1}: a block that is only indented: put it between fences, with its language"
            )
        i += 1
    if marker is not None:
        raise BadPageError(f"{page}: the page ends with a marker")
    return found


def _end(page: str, lines: Sequence[str], start: int, fence: str) -> int:
    for i in range(start + 1, len(lines)):
        if lines[i].strip() == fence:
            return i
    raise BadPageError(f"{page}:{start + 1}: a fence that does not end")


def _is_indented_block(lines: Sequence[str], i: int) -> bool:
    """Four blanks after an empty line, but not as the next paragraph of a list's item."""
    if not lines[i].startswith("    ") or not lines[i].strip() or (i > 0 and lines[i - 1].strip()):
        return False
    above = next((line for line in reversed(lines[:i]) if line.strip() and not line.startswith(" ")), "")
    return not _LIST_ITEM.match(above)


def blocks() -> Iterator[Block]:
    """All of them."""
    for path in PAGES:
        yield from blocks_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def commands_of(script: str) -> list[str]:
    """The commands of a shell block: lines joined where they go on, without remarks and empty ones."""
    joined = re.sub(r"\s*\\\n\s*", " ", script)
    lines = (line.strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
