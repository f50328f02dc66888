"""The KV caches of sequences that the model runs together: a row for each of them in every layer (rows.py).

Joining writes one row and leaving moves the last row into the gap; the other rows are not copied. mlx-lm's batch caches
align all rows at the right edge, and copy every row of every layer at each join and leave. Worker thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_serve.engine.cache.kinds import leaves
from mlx_serve.engine.cache.rows import Positions, StateRows, leave_row, rows_like, single_of


class BatchCache:
    """The caches of all layers. ``layers`` is what the model gets. ``lengths``: the tokens in each row."""

    def __init__(self, like: Sequence[Any]) -> None:
        """No rows yet. ``like``: the cache of a sequence that will join."""
        self.layers: list[Any] = [rows_like(layer) for layer in like]
        self.lengths: list[int] = []

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, with the spare ones."""
        return sum(rows.nbytes for rows in leaves(self.layers))

    @property
    def row_bytes(self) -> int:
        """The bytes of each row."""
        return sum(rows.row_bytes for rows in leaves(self.layers))

    @property
    def spare_bytes(self) -> int:
        """The bytes of the rows without a sequence."""
        return sum(rows.row_bytes * rows.n_spare(len(self.lengths)) for rows in leaves(self.layers))

    @property
    def can_cut_back(self) -> bool:
        """Whether the last tokens of a pass can be dropped."""
        return not any(isinstance(rows, StateRows) for rows in leaves(self.layers))

    def join(self, cache: Sequence[Any], length: int, max_spare: float = math.inf) -> None:
        """Add a row with the ``length`` tokens of a sequence's ``cache``. Array by array, that cache is emptied.

        If no row is free, a quarter is added, so that most joins copy no other row; but at most ``max_spare`` bytes.
        """
        n_rows = len(self.lengths)
        n_spare = (n_rows + 1) // 4
        if n_spare:
            # The others grow to the length of a longer row.
            row_bytes = max(1, self.row_bytes, sum(single.nbytes for single in leaves(cache)))
            n_spare = int(min(n_spare, max(0, max_spare) // row_bytes))
        for rows, single in zip(leaves(self.layers), leaves(cache), strict=True):
            rows.join(single, n_rows, length, n_spare)
        self.lengths.append(length)

    def leave(self, row: int, max_spare: float = math.inf) -> list[Any]:
        """Remove a row, and return it as the cache of a single sequence. The last row takes its place.

        The row that becomes free stays for another sequence. If free rows would take more than ``max_spare`` bytes,
        they are given up instead, layer by layer, which copies the other rows.
        """
        last, length = len(self.lengths) - 1, self.lengths[row]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        trims = self.spare_bytes > max_spare
        return [leave_row(layer, row, length, self.lengths, trims=trims) for layer in self.layers]

    def leave_all(self) -> list[list[Any]]:
        """Remove all rows, and return them as the caches of single sequences. Layer by layer the batch is emptied."""
        caches: list[list[Any]] = [[] for _ in self.lengths]
        for layer in self.layers:
            for row, length in enumerate(self.lengths):
                caches[row].append(single_of(layer, row, length, length))
                mx.eval(caches[row][-1].state)
            for rows in leaves([layer]):
                rows.fit(0, 0)
        self.lengths = []
        return caches

    def give_up_spare(self) -> None:
        """Give up what no row needs. This copies all rows, an array at a time."""
        for rows in leaves(self.layers):
            rows.fit(len(self.lengths), max(self.lengths, default=0))

    def copy(self, row: int, n_tokens: int | None = None) -> list[Any]:
        """A row as the cache of a single sequence, which shares no memory with the batch.

        ``n_tokens``: only its first tokens. Raises ValueError if the rows can't be cut back.
        """
        length = self.lengths[row]
        cache = []
        for layer in self.layers:
            cache.append(single_of(layer, row, length, length if n_tokens is None else n_tokens))
            mx.eval(cache[-1].state)
        return cache

    def begin(self, n_tokens: int) -> None:
        """Prepare a pass that adds ``n_tokens`` to each row: with sliding windows at most ``MAX_PASS``."""
        positions = Positions(self.lengths, n_tokens)
        for rows in leaves(self.layers):
            rows.begin(positions)

    def advance(self, n_tokens: Sequence[int]) -> None:
        """Keep the first so many of the tokens that the pass added to each row."""
        self.lengths = [length + n for length, n in zip(self.lengths, n_tokens, strict=True)]

    def take_back(self, n_tokens: Sequence[int]) -> None:
        """Remove the last so many tokens of each row, at most ``MAX_PASS``, which must be possible."""
        self.lengths = [length - n for length, n in zip(self.lengths, n_tokens, strict=True)]
