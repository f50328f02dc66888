"""A finding of the doctor's: what is so, and what to do. Values and how they print, no checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "problem"]
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Finding:
    """``problem``: the server would not start, or could not serve. ``advice``: what to do; "" when nothing."""

    level: Level
    topic: str
    text: str
    advice: str = ""


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each, its advice below it."""
    width = max((len(finding.topic) for finding in findings), default=0)
    return "\n".join(_lines(finding, width) for finding in findings)


def as_objects(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(finding) for finding in findings]


def _lines(finding: Finding, width: int) -> str:
    line = f"{_MARKS[finding.level]:7}  {finding.topic.ljust(width)}  {finding.text}"
    return f"{line}\n{' ' * (width + 11)}-> {finding.advice}" if finding.advice else line
