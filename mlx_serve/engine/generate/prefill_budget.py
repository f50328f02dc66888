"""How much prefill the next step may do, and whether it decodes: no stream may stall, and no prompt starve."""

from __future__ import annotations

from collections.abc import Collection

from mlx_serve.engine.backend import NO_GAP, StepPlan
from mlx_serve.engine.generate.pass_cost import PassCost

# A step may exceed its tokens by this factor to finish a prompt. The rest would need another pass through the model.
STRETCH = 1.25
# The tokens of a step before the cost of a pass is known: few enough for the slowest machine.
_FIRST_TOKENS = 64
_LEAST_TOKENS = 16
# A step is at most so many times as long as the longest that was measured. A few short passes on a busy machine, or
# of a mixture-of-experts model, may show no cost of a token at all: then the first long prompt would run in one go.
_GROWTH = 2
# Beside streams a slice lasts at least so many times the overhead of a pass, so at most a third of it is overhead.
_LEAST_OVERHEADS = 3.0
# While nothing decodes, a slice lasts 1 s, or longer if more than a tenth of it would be overhead. It is not longer
# than that, because a step cannot be interrupted when its client hangs up.
_IDLE_OVERHEADS = 10.0
_IDLE_S = 1.0
# A step prefills no longer than this if it need not: jobs come and go between steps.
_STEP_S = 0.75
# Seconds of prefill for each second of decoding: at least, where decoding is slow, so that a prompt gets on; and at
# most, while many prompts wait beside few streams. A step that decodes few takes as long as one that decodes them all.
_LEAST_SHARE = 2.0
_MOST_SHARE = 16.0
# With so many streams for each prompt that waits, the least is enough.
_CROWD = 8
# A prompt that is done waits so long for others that can be done within that time: they then begin to decode together.
_MOST_HELD_S = 0.5
# The newest measurement's weight in the average.
_WEIGHT = 0.3


class PrefillBudget:
    """Plans steps by the measured cost of passes. ``step_size``: the most prompt tokens in one step."""

    def __init__(self, step_size: int) -> None:
        self.step_size = step_size
        self._cost = PassCost()
        # The time that a step's decoding takes, and the prefill time since the last decoding.
        self._decode_s = 0.0
        self._since_s = 0.0

    def plan(self, gap_s: float, n_left: Collection[int], n_decoding: int) -> StepPlan:
        """The next step. ``n_left``: the tokens that are left of each prompt that waits.

        ``gap_s``: how long one prompt may hold streams up; NO_GAP if there are none. Only the model's own streams may
        wait longer. Without any, another model's streams may be the ones that wait.
        """
        slice_s, n_held, n_overhead = self._slice_s(gap_s), self._cost.tokens(_MOST_HELD_S), self._cost.overhead_tokens
        if not n_left:
            return StepPlan(self.tokens(gap_s), n_held=n_held, n_overhead=n_overhead)
        if not n_decoding:
            return StepPlan(self._tokens(slice_s), n_held=n_held, n_overhead=n_overhead)
        share = min(max(_LEAST_SHARE, _LEAST_SHARE * _CROWD * len(n_left) / n_decoding), _MOST_SHARE)
        left_s = max(slice_s, share * self._decode_s) - self._since_s
        step_s = min(max(left_s, slice_s), max(slice_s, _STEP_S))
        n_tokens = self._tokens(step_s)
        return StepPlan(n_tokens, left_s <= step_s or min(n_left) <= n_tokens * STRETCH, n_held, n_overhead)

    def tokens(self, gap_s: float) -> int:
        """How many tokens take about ``gap_s`` seconds, or their share of a step's time if that is more."""
        return self._tokens(max(self._slice_s(gap_s), _LEAST_SHARE * self._decode_s))

    def prefill_s(self, n_tokens: int) -> float:
        """How long so many tokens would take with nobody decoding; 0 before a pass was measured."""
        n_passes = -(-n_tokens // self.step_size)
        return n_passes * self._cost.overhead_s + n_tokens * self._cost.per_token_s

    def note_decoding(self, seconds: float) -> None:
        """Record that a step decoded for ``seconds``."""
        self._since_s = 0.0
        self._decode_s += _WEIGHT * (seconds - self._decode_s) if self._decode_s else seconds

    def note_nobody(self) -> None:
        """Record that there was no sequence to decode, so the next prefill delays none."""
        self._since_s = 0.0

    def note(self, n_tokens: int, seconds: float) -> None:
        """Record a pass over ``n_tokens``. A very short pass says nothing about longer ones."""
        self._since_s += seconds
        if n_tokens >= _LEAST_TOKENS and seconds > 0:
            self._cost.note(n_tokens, seconds)

    def _slice_s(self, gap_s: float) -> float:
        if gap_s == NO_GAP:
            return max(_IDLE_S, _IDLE_OVERHEADS * self._cost.overhead_s)
        return max(gap_s, _LEAST_OVERHEADS * self._cost.overhead_s)

    def _tokens(self, seconds: float) -> int:
        if not self._cost.per_token_s:
            return min(_FIRST_TOKENS, self.step_size)
        n = min(self._cost.tokens(seconds), _GROWTH * self._cost.longest)
        # Whole multiples, so that the same shapes come again; up rather than down, since short slices are overhead.
        n = -(-n // _LEAST_TOKENS) * _LEAST_TOKENS
        return min(max(n, _LEAST_TOKENS), self.step_size)
