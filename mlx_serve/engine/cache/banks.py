"""Banks: rows of similar lengths share arrays, so that a long row does not make short ones as large. Only numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from mlx_serve.engine.cache.rows import MAX_PASS

# The most tokens of the rows in the first bank. Each further bank has rows up to four times as long: a bank takes the
# memory of its longest row for each row, and the time of a pass for itself.
_FIRST_BANK = 2048
_TIMES_LONGER = 4


def bank_of(length: int) -> int:
    """The bank for a row of ``length`` tokens and those of its next pass."""
    bank, most = 0, _FIRST_BANK
    while length + MAX_PASS > most:
        bank, most = bank + 1, most * _TIMES_LONGER
    return bank


def rows_bytes(size: Callable[[int], int], spans: Sequence[tuple[int, int]]) -> int:
    """The most bytes that rows take while each grows from one length to another. ``size``: the bytes for a length.

    A row costs what the longest row of its bank does, with the tokens of a pass: wrong drafts take memory, too. A
    growing row passes through all banks on its way. What it costs there is never more than in the last one, so each row
    counts once.
    """
    n_rows: dict[int, int] = defaultdict(int)
    longest: dict[int, int] = defaultdict(int)
    for first, last in spans:
        n_rows[bank_of(last)] += 1
        for bank in range(bank_of(first), bank_of(last) + 1):
            longest[bank] = max(longest[bank], min(last + MAX_PASS, _FIRST_BANK * _TIMES_LONGER**bank))
    return sum(n * size(longest[bank]) for bank, n in n_rows.items())
