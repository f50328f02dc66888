"""Numbers, tables and others' text as people read them on a terminal. Knows nothing of models or servers."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What others wrote must not move the cursor, set the title or answer for the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Without the control characters that a terminal obeys; line ends and tabs stay."""
    return _CONTROL.sub("", text)


def bytes_text(n_bytes: int) -> str:
    """Three digits and a unit of powers of ten, as disks and mlx-lm count: 540 MB, 63.4 GB."""
    amount, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    digits = 0 if unit == "B" or amount >= 99.95 else 1
    return f"{amount:.{digits}f} {unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Columns two blanks apart; those whose index is in ``right`` end in line."""
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: frozenset[int]) -> str:
    padded = [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
