"""Formats numbers, tables and untrusted text for a terminal. Knows nothing of models or servers."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Text from others must not move the cursor, set the window title, or make the terminal send input.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """``text`` without control characters that a terminal acts on. Line ends and tabs stay."""
    return _CONTROL.sub("", text)


def bytes_text(n_bytes: int) -> str:
    """A size with at most three digits, in powers of ten like disks and mlx-lm: 540 MB, 63.4 GB."""
    amount, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    digits = 0 if unit == "B" or amount >= 99.95 else 1
    return f"{amount:.{digits}f} {unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """A table with two blanks between columns. Columns whose index is in ``right`` are right-aligned."""
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: frozenset[int]) -> str:
    padded = [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
