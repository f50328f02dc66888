"""A predicted output: a text that much of an answer is expected to repeat, and how far the answer has come in it.

Knows no MLX, no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A place in the prediction is found by the longest of the output's last n-grams that stands there.
LONGEST = 3
# One token alone says little, so its place must be so near ahead.
_NEAR = 16


class Prediction:
    """The output is expected to begin as the prediction does, and is followed in it token by token.

    Where the output departs from it, the place is found again by the output's last tokens: the next such place, else
    the last one before. So text may be inserted, replaced, dropped and moved.

    ``n_accepted``, ``n_rejected``: the tokens drafted from here that were right, and those that were wrong.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._ids = np.array(self._tokens, np.int64)
        self._place = 0
        # How many of the output's last tokens stand before the place; 0: there is no place. The beginning is as sure as
        # a place can be.
        self._n_matched = LONGEST
        self._last: list[int] = []
        self.n_accepted = self.n_rejected = 0

    def add(self, token: int) -> None:
        """Follow the output by one token."""
        self._last = [*self._last, token][-LONGEST:]
        if self._n_matched and self._tokens[self._place : self._place + 1] == [token]:
            self._place += 1
            self._n_matched += 1
        else:
            self._find()

    def draft(self, n_tokens: int) -> tuple[int, list[int]]:
        """How many of the output's last tokens stand here, and at most ``n_tokens`` of what follows them."""
        if not self._n_matched:
            return 0, []
        return self._n_matched, self._tokens[self._place : self._place + n_tokens]

    def _find(self) -> None:
        """Find the place behind the output's last tokens.

        All of the prediction is compared, 0.1 ms for 100,000 tokens. An index would first have to be made, which takes
        a thousand times as long.
        """
        self._n_matched = 0
        behind = np.flatnonzero(self._ids == self._last[-1]) + 1
        places = behind
        for n, token in enumerate(reversed(self._last), start=1):
            behind = behind[behind >= n]
            behind = behind[self._ids[behind - n] == token]
            if not len(behind):
                break
            self._n_matched, places = n, behind
        ahead = places[places >= self._place]
        if self._n_matched == 1:
            ahead = ahead[ahead <= self._place + _NEAR]
            self._n_matched = min(1, len(ahead))
        if self._n_matched:
            self._place = int(ahead[0] if len(ahead) else places[-1])
