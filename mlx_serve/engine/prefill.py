"""How many prompt tokens the next step may take, so that it lasts no longer than it should."""

from __future__ import annotations

# Before the speed is known: little enough for the slowest machine.
_FIRST_TOKENS = 64
_LEAST_TOKENS = 16
# What prompts get at least, as a multiple of the time that a step's decoding takes; and while many of them wait: then
# each step that decodes few of them together is a step that all could have had later.
SHARE = 2.0
CROWDED_SHARE = 8.0
# The newest measurement's weight in the average.
_WEIGHT = 0.3


class PrefillBudget:
    """From the measured speed. ``step_size``: the most tokens in one step."""

    def __init__(self, step_size: int) -> None:
        self._step_size = step_size
        self._tokens_per_s: float | None = None
        self._decode_s = 0.0

    def tokens(self, gap_s: float, share: float = SHARE) -> int:
        """How many tokens take about ``gap_s`` seconds, or ``share`` times as long as decoding takes in a step, if that
        is more: where decoding is slow, a prompt would otherwise get next to nothing of the machine.
        """
        if self._tokens_per_s is None:
            return min(_FIRST_TOKENS, self._step_size)
        # Whole multiples, so that the same shapes come again.
        n = int(self._tokens_per_s * max(gap_s, share * self._decode_s)) // _LEAST_TOKENS * _LEAST_TOKENS
        return min(max(n, _LEAST_TOKENS), self._step_size)

    def note_decoding(self, seconds: float) -> None:
        """A step decoded for so long; 0: nothing was decoding."""
        self._decode_s = self._decode_s + _WEIGHT * (seconds - self._decode_s) if seconds else 0.0

    def note(self, n_tokens: int, seconds: float) -> None:
        """A step took ``n_tokens`` in ``seconds``. Small ones tell more about the overhead than about the speed."""
        if n_tokens < _LEAST_TOKENS or seconds <= 0:
            return
        speed = n_tokens / seconds
        old = self._tokens_per_s
        self._tokens_per_s = speed if old is None else old + _WEIGHT * (speed - old)
