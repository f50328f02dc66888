"""What the benchmarks print: medians with their range, and ratios beside what is wanted of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio in every round, and what it should not pass."""

    name: str
    values: list[float]
    wanted: float


def ratio_table(ratios: Iterable[Ratio]) -> str:
    """Markdown."""
    rows = [
        [r.name, spread(r.values), f"{r.wanted:g}", "yes" if median(r.values) <= r.wanted else "NO"] for r in ratios
    ]
    return markdown(["ratio", "median (range)", "wanted at most", "met"], rows)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [heads, ["---", *("--:" for _ in heads[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the least and the greatest where there are several."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
