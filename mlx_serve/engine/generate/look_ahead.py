"""Drafts of an output that a grammar restricts: what the grammar allows of proposed tokens, and text that it forces.

The masks of drafted tokens are made with a copy of the grammar's state. So a wrong draft leaves no trace, neither in
what the grammar has read nor in what it may still cost. Knows no MLX.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_serve.engine.generate.constraints import Constraint, Mask

# Where the grammar allows more tokens, it forces no text.
_FEW = 64


class LookAhead:
    """``texts``: the bytes of each token, by its id. ``n_prompt``: how many tokens come before the output."""

    def __init__(self, constraint: Constraint, texts: Sequence[bytes], n_prompt: int) -> None:
        self._constraint = constraint
        self._texts = texts
        self._n_prompt = n_prompt
        # The CPU time of all drafts so far. Together they may take as long as the grammar itself.
        self._spent_s = 0.0
        self.has_ended = False

    def draft(
        self, tokens: Sequence[int], last: int, proposed: Sequence[int], n_tokens: int
    ) -> tuple[list[int], list[int]]:
        """At most ``n_tokens`` that may follow ``tokens`` and ``last``, the prompt and the output so far.

        These are the proposed ones while the grammar allows them, then the forced ones. The masks for them and for the
        token behind them are noted in the constraint. The second list has what is forced there, or else nothing.
        """
        constraint = self._constraint
        if not self._follow(tokens, last):
            return [], []
        ahead = constraint.ahead(self._spent_s)
        if ahead is None:
            self.has_ended = True
            return [], []
        draft: list[int] = []
        behind: int | None = None
        while True:
            mask = ahead.allowed(len(ahead.taken), constraint.width) if not ahead.takes_too_long else None
            if ahead.fault or ahead.takes_too_long:
                # Without a mask behind the last token, that one can't be checked.
                draft, behind = draft[:-1], None
                break
            constraint.noted[len(ahead.taken)] = mask
            behind = self._next(mask, proposed[len(draft)] if len(draft) < len(proposed) else None)
            if behind is None or len(draft) == n_tokens:
                break
            if list(proposed[len(draft) : len(draft) + 1]) != [behind]:
                proposed = ()
            draft.append(behind)
            ahead.take(behind)
        self._spent_s = ahead.spent_s
        return draft, [] if behind is None else [behind]

    def guess(self, tokens: Sequence[int], last: int | None) -> list[int]:
        """The token that is forced behind ``tokens`` and ``last``, or none. Without ``last``: in the running pass.

        With ``last``, the mask is noted in the constraint.
        """
        constraint = self._constraint
        if last is not None and self._follow(tokens, last):
            n_output = len(constraint.taken)
            mask = constraint.allowed(n_output, constraint.width)
            if not constraint.fault:
                constraint.noted[n_output] = mask
        forced = self._forced(constraint.newest) if constraint.newest is not None else None
        return [] if forced is None else [forced]

    def _follow(self, tokens: Sequence[int], last: int) -> bool:
        """Let the constraint take what it has not taken yet. Returns whether it can look ahead."""
        n_known = self._n_prompt + len(self._constraint.taken)
        if len(tokens) >= n_known:
            for newest in (*tokens[n_known:], last):
                self._constraint.take(newest)
        return self._constraint.width > 0 and self._constraint.follows_tokens

    def _next(self, mask: Mask | None, proposed: int | None) -> int | None:
        """The proposed token if it is allowed, else the forced one. None: there is neither, or the output may end."""
        if proposed is not None and (mask is None or (proposed < len(mask) and mask[proposed])):
            return proposed if proposed not in self._constraint.ends else None
        return self._forced(mask) if mask is not None else None

    def _forced(self, mask: Mask) -> int | None:
        """The longest token that every continuation begins with, or is the beginning of.

        So the text is forced as far as this token goes, and models mostly write it with the longest tokens.
        """
        ids = np.flatnonzero(mask)
        if not 0 < len(ids) <= _FEW or not self._constraint.ends.isdisjoint(ids.tolist()):
            return None
        by_text = {self._texts[token]: token for token in ids.tolist() if token < len(self._texts)}
        texts = sorted(by_text)
        found = None
        for text in texts:
            if not texts[-1].startswith(text):
                break
            found = by_text[text]
        return found
