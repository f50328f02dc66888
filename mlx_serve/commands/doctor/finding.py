"""The doctor's findings: what was found, and what to do about it. Holds values and prints them; checks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "problem"]
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Finding:
    """``problem``: the server would not start or could not serve. ``advice``: what the user can do; "" if nothing."""

    level: Level
    topic: str
    text: str
    advice: str = ""


def as_text(findings: Sequence[Finding]) -> str:
    """One line for each finding, with its advice on the next line."""
    width = max((len(finding.topic) for finding in findings), default=0)
    return "\n".join(_lines(finding, width) for finding in findings)


def as_objects(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The findings as JSON objects."""
    return [asdict(finding) for finding in findings]


def _lines(finding: Finding, width: int) -> str:
    line = f"{_MARKS[finding.level]:7}  {finding.topic.ljust(width)}  {finding.text}"
    return f"{line}\n{' ' * (width + 11)}-> {finding.advice}" if finding.advice else line
