"""How long a model's outputs have been of late: what a job is charged beside its prompt. Only numbers."""

from __future__ import annotations

from collections import deque

# The length that is expected before a model has ended enough outputs.
FIRST_LENGTH = 1024
# The outputs that are remembered, and the fewest that say something.
_WINDOW = 64
_FEWEST = 8
# So large a part of the outputs of late was no longer than what is expected.
_QUANTILE = 0.9


class OutputLengths:
    """A running quantile of the lengths of ended outputs, in tokens."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_WINDOW)
        self.expected = FIRST_LENGTH

    def note(self, n_tokens: int) -> None:
        """Record an output that has ended. One without a token says nothing: its client left during the prompt."""
        if n_tokens:
            self._latest.append(n_tokens)
        if len(self._latest) >= _FEWEST:
            rising = sorted(self._latest)
            self.expected = rising[min(len(rising) - 1, int(_QUANTILE * len(rising)))]
