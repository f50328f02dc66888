"""What a pass through the model costs: ``a + b n`` seconds for n tokens, fitted to the passes that were measured.

``a`` is what each pass pays however few its tokens are: of a mixture-of-experts model even a short pass reads nearly
all weights. The newest passes are kept by size, some for each power of two: the passes of a busy hour are all alike,
and a line cannot be fitted to one size. Of those of a size the median counts: a pass that met other work tells nothing.
Knows no clock.
"""

from __future__ import annotations

from collections import deque

# How many passes of each size are kept.
_KEPT = 5


class PassCost:
    """Seconds as a line over tokens. Before anything is measured both parts are 0."""

    def __init__(self) -> None:
        # By the size's power of two: tokens and seconds of the newest passes.
        self._sizes: dict[int, deque[tuple[int, float]]] = {}
        # The tokens of the longest pass that was measured.
        self.longest = 0
        self.overhead_s = 0.0
        self.per_token_s = 0.0

    def note(self, n_tokens: int, seconds: float) -> None:
        """A pass over ``n_tokens`` took so long."""
        self._sizes.setdefault(n_tokens.bit_length(), deque(maxlen=_KEPT)).append((n_tokens, seconds))
        self.longest = max(self.longest, n_tokens)
        self._fit()

    def seconds(self, n_tokens: int) -> float:
        """What a pass over so many tokens takes."""
        return self.overhead_s + self.per_token_s * n_tokens

    def tokens(self, seconds: float) -> int:
        """How many tokens a pass of this length takes; 0 when its overhead alone is longer."""
        if self.per_token_s <= 0:
            return 0
        return max(0, int((seconds - self.overhead_s) / self.per_token_s))

    @property
    def overhead_tokens(self) -> int:
        """How many tokens take as long as the overhead."""
        return int(self.overhead_s / self.per_token_s) if self.per_token_s > 0 else 0

    def _fit(self) -> None:
        """Least squares, each size weighted so that an error counts as a part of its seconds."""
        usual = [sorted(passes, key=_per_token)[(len(passes) - 1) // 2] for passes in self._sizes.values()]
        points = [(n, s, 1 / max(s, 1e-9)) for n, s in usual]
        total = sum(w for _, _, w in points)
        mean_n = sum(w * n for n, _, w in points) / total
        mean_s = sum(w * s for _, s, w in points) / total
        spread = sum(w * (n - mean_n) ** 2 for n, _, w in points)
        slope = sum(w * (n - mean_n) * (s - mean_s) for n, s, w in points) / spread if spread > 0 else 0.0
        # Neither part is negative. One size alone says nothing of the overhead.
        self.per_token_s = min(slope, mean_s / mean_n) if slope > 0 else mean_s / mean_n
        self.overhead_s = max(0.0, mean_s - self.per_token_s * mean_n)


def _per_token(one: tuple[int, float]) -> float:
    n_tokens, seconds = one
    return seconds / n_tokens
