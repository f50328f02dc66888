"""Where in an output the reasoning has spent its budget, and which tokens then close it. Knows no MLX and no text.

    outside --opening--> inside --ending--> outside, for good unless it ``reopens``
                            |
                            +--budget spent--> the closing tokens, one by one --> outside, for good

What comes next depends on the output's tokens alone. So an output that is resumed, or whose drafts were rejected, goes
on as it would have gone on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_serve.values import Marker, ReasoningBudget

# Unless it reopens, reasoning begins within so many tokens of the output, or the answer has none.
_LEAD = 16


@dataclass(frozen=True, slots=True)
class NextToken:
    """It must be ``token``, or none of ``banned``. Neither: any token."""

    token: int | None = None
    banned: tuple[int, ...] = ()


_ANY = NextToken()


class ReasoningWatch:
    """Follows one output. It needs to see the tokens only when ``is_due``, which is rare.

    On the MLX thread, looking at the newest token waits for the step that makes it.
    """

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._opening = MarkerReader(budget.opening)
        self._ending = MarkerReader(budget.ending)
        # The output's length when it was last looked at, and the next one at which there may be something to say.
        self._n_seen = -1
        self._n_due: int | None = 0
        self._restart()

    def is_due(self, n_output: int) -> bool:
        """Whether ``next`` must be asked after so many tokens of output. Otherwise any token may follow."""
        return n_output <= self._n_seen or (self._n_due is not None and n_output >= self._n_due)

    def next(self, output: list[int]) -> NextToken:
        """What the token after ``output`` must be."""
        if output[: len(self._taken)] != self._taken:
            self._restart()
        for token in output[len(self._taken) :]:
            self._take(token)
        self._n_seen = len(output)
        self._n_due = self._due()
        if self._n_closing is None:
            return _ANY
        if self._n_closing < len(self._budget.closing):
            return NextToken(self._budget.closing[self._n_closing])
        return NextToken(banned=self._budget.not_next) if self._n_closing == len(self._budget.closing) else _ANY

    def _restart(self) -> None:
        self._taken: list[int] = []
        self._is_inside = self._budget.inside
        self._is_over = False
        self._n_left = self._budget.n_tokens
        self._reader = self._ending if self._is_inside else self._opening
        self._reader.state = 0
        # Once the budget is spent: the tokens that came since then.
        self._n_closing = 0 if self._is_inside and not self._n_left else None

    def _due(self) -> int | None:
        n = len(self._taken)
        if self._n_closing is not None:
            return n + 1 if self._n_closing <= len(self._budget.closing) else None
        # Outside, a token must open the reasoning first.
        return None if self._is_over else n + max(1, self._n_left + (not self._is_inside))

    def _take(self, token: int) -> None:
        self._taken.append(token)
        if self._n_closing is not None:
            self._n_closing += 1
            return
        if self._is_over:
            return
        self._n_left -= self._is_inside
        if self._reader.finds(token):
            self._is_inside = not self._is_inside
            self._reader = self._ending if self._is_inside else self._opening
            self._reader.state = 0
            self._is_over = not self._is_inside and not self._budget.reopens
        elif not self._is_inside and not self._budget.reopens:
            self._is_over = len(self._taken) >= _LEAD
        if self._is_inside and self._n_left <= 0:
            self._n_closing = 0


class MarkerReader:
    """Reads tokens one by one. ``state``: how much of the marker they have spelled so far."""

    def __init__(self, marker: Marker) -> None:
        self._end = marker.end
        self._moves = dict(marker.moves)
        self.state = 0

    def finds(self, token: int) -> bool:
        """Whether the marker is complete with this token."""
        row: Sequence[int] | None = self._moves.get(token)
        self.state = row[self.state] if row is not None else 0
        return self.state == self._end
