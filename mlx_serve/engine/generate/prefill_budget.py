"""How much prefill the next step does, and whether it decodes. No stream may stall, and no prompt may starve."""

from __future__ import annotations

from mlx_serve.engine.backend import StepPlan

# The tokens of a step before the speed is known: few enough for the slowest machine.
_FIRST_TOKENS = 64
_LEAST_TOKENS = 16
# The newest measurement's weight in the average.
_WEIGHT = 0.3
# A step should not last longer than this, because jobs join and leave only between steps.
_STEP_S = 0.5
# Seconds of prefill for each second of decoding. The minimum lets prompts advance where decoding is slow. The maximum
# is for many prompts beside few streams: a step that decodes few streams takes as long as one that decodes all.
_LEAST_SHARE = 2.0
_MOST_SHARE = 16.0
# With so many streams for each waiting prompt, the minimum applies.
_CROWD = 8
# Prompts that came together start to decode together, if this delays the first of them by no more than the time of so
# many steps.
_MOST_HELD = 64


class PrefillBudget:
    """Plans steps by the measured speed. ``step_size``: the most prompt tokens in one step."""

    def __init__(self, step_size: int) -> None:
        self._step_size = step_size
        self._tokens_per_s: float | None = None
        # The time that a step's decoding takes, and the prefill time since the last decoding.
        self._decode_s = 0.0
        self._since_s = 0.0

    def plan(self, gap_s: float, n_waiting: int, n_decoding: int) -> StepPlan:
        """The next step for ``n_waiting`` prompts. ``gap_s``: how long one prompt may hold streams up.

        Only the model's own streams may wait longer. Without any, another model's streams may be the ones that wait.
        """
        if not n_waiting:
            return StepPlan(self.tokens(gap_s))
        if n_decoding:
            share = min(max(_LEAST_SHARE, _LEAST_SHARE * _CROWD * n_waiting / n_decoding), _MOST_SHARE)
            due_s = max(gap_s, share * self._decode_s)
        else:
            due_s = _MOST_HELD * self._decode_s
        left_s = due_s - self._since_s
        step_s = min(max(left_s, gap_s), max(gap_s, _STEP_S))
        return StepPlan(self._tokens(step_s if n_decoding else gap_s), left_s <= step_s)

    def tokens(self, gap_s: float) -> int:
        """How many tokens take about ``gap_s`` seconds, or their share of a step's time if that is more."""
        return self._tokens(max(gap_s, _LEAST_SHARE * self._decode_s))

    def note_decoding(self, seconds: float) -> None:
        """Record that a step decoded for ``seconds``."""
        self._since_s = 0.0
        self._decode_s = _average(self._decode_s, seconds)

    def note_nobody(self) -> None:
        """Record that there was no sequence to decode, so the next prefill delays none."""
        self._since_s = 0.0

    def note(self, n_tokens: int, seconds: float) -> None:
        """Record a pass over ``n_tokens``. Small passes show the overhead rather than the speed."""
        self._since_s += seconds
        if n_tokens >= _LEAST_TOKENS and seconds > 0:
            self._tokens_per_s = _average(self._tokens_per_s, n_tokens / seconds)

    def _tokens(self, seconds: float) -> int:
        if self._tokens_per_s is None:
            return min(_FIRST_TOKENS, self._step_size)
        # Whole multiples, so that MLX sees the same shapes again.
        n = int(self._tokens_per_s * seconds) // _LEAST_TOKENS * _LEAST_TOKENS
        return min(max(n, _LEAST_TOKENS), self._step_size)


def _average(old: float | None, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
