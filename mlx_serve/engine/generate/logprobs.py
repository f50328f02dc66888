"""Log-probabilities, in float32 whatever the model computes in, for many rows of logits at once. Worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np

# A token's log-probability, and the likeliest tokens in its place with theirs, in falling order.
Scored: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]


class Logprobs:
    """The log-probabilities of rows of logits, and the ``k`` likeliest tokens of each row.

    ``logits`` has shape (rows, vocab) and any number type. With 16 bits, neighbouring log-probabilities near -9 would
    be 0.06 apart. The computation begins here, and ``row`` waits for it alone. So a step that is begun later is not
    waited for, and streams without log-probabilities keep their pace.
    """

    def __init__(self, logits: mx.array, k: int) -> None:
        logits = logits.astype(mx.float32)
        k = min(k, logits.shape[-1])
        self._logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._ids = self._values = mx.zeros((logits.shape[0], 0))
        self._likeliest: list[tuple[tuple[int, float], ...]] | None = None
        if k:
            ids = mx.argpartition(-self._logprobs, kth=k - 1, axis=-1)[:, :k]
            values = mx.take_along_axis(self._logprobs, ids, axis=-1)
            order = mx.argsort(-values, axis=-1)
            self._ids, self._values = (mx.take_along_axis(found, order, axis=-1) for found in (ids, values))
        mx.async_eval(self._logprobs, self._ids, self._values)  # type: ignore[no-untyped-call]

    def row(self, i: int, token: int, k: int) -> Scored:
        """The log-probability of ``token`` in row ``i``, with the ``k`` likeliest tokens: at most those computed."""
        # The array's memory is read in place, because an MLX operation would wait for all work that was begun before.
        own = float(np.asarray(self._logprobs)[i, token])
        return own, self._top()[i][:k] if k else ()

    def _top(self) -> list[tuple[tuple[int, float], ...]]:
        if self._likeliest is None:
            ids, values = np.asarray(self._ids).tolist(), np.asarray(self._values).tolist()
            self._likeliest = [tuple(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
        return self._likeliest


class OutputLogprobs:
    """The log-probabilities of an output's tokens, for a job that reports them: noted before each token is known.

    ``k``: the likeliest tokens of each position.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        # By position of the output.
        self._noted: dict[int, tuple[Logprobs, int]] = {}
        self._n_noted = 0

    def note(self, logprobs: Logprobs, row: int) -> None:
        """Row ``row`` is that of the position behind the one noted last."""
        self._noted[self._n_noted] = (logprobs, row)
        self._n_noted += 1

    def take_back(self, n_positions: int) -> None:
        """Forget the positions noted last, behind a draft that was wrong."""
        for position in range(self._n_noted - n_positions, self._n_noted):
            del self._noted[position]
        self._n_noted -= n_positions

    def take(self, position: int, token: int) -> Scored:
        """What ``token`` scored at a position of the output."""
        logprobs, row = self._noted.pop(position)
        return logprobs.row(row, token, self.k)


def note_rows(logits: mx.array, outputs: Sequence[OutputLogprobs | None]) -> None:
    """Note the next token's log-probabilities of all outputs that want them, in one computation.

    ``logits`` has the model's own values, shape (rows, vocab), with a row for each of ``outputs``.
    """
    asking = [(i, output) for i, output in enumerate(outputs) if output is not None]
    if not asking:
        return
    rows = logits if len(asking) == len(outputs) else logits[mx.array([i for i, _ in asking])]
    logprobs = Logprobs(rows, max(output.k for _, output in asking))
    for row, (_, output) in enumerate(asking):
        output.note(logprobs, row)
