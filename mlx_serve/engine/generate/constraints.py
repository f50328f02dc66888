"""Which tokens may come next in a job: the grammar's masks, where the grammar applies, and when the end may come.

Masks are numpy arrays of booleans. Knows no MLX, text or HTTP. A matcher of llguidance (``grammars.py``) does not raise
for faults of a client's grammar (such as too much complexity). It keeps the error, which then fails that job alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_serve.values import Sampling

Mask: TypeAlias = NDArray[np.bool_]

# The CPU time that one job's grammar may take on the shared MLX thread: for all its masks so far, and for one mask. CPU
# time is used because wall time includes other processes. llguidance's own limits end most masks sooner; ordinary
# schemas need 0.01 to 1 ms a token.
_BUDGET_S = 0.5
_BUDGET_PER_TOKEN_S = 0.01
_MASK_S = 0.25


class Constraint:
    """The tokens that may come next in one job.

    ``fault``: why its grammar failed. The output is not masked from token ``fault_at`` on. ``judges_time``: a grammar
    that takes too long fails by itself. With several ranks the clocks differ, so rank 0 asks ``is_late`` and all ranks
    call ``give_up``.

        waiting --until--> begin --a token of the grammar--> inside
           ^                 | \\
           +---- detours ----+  +-- exits --> outside
    """

    def __init__(
        self, sampling: Sampling, eos_ids: Collection[int], matcher: Any = None, *, judges_time: bool = True
    ) -> None:
        self._sampling = sampling
        self._gate = sampling.gate
        self.ends = frozenset(eos_ids)
        self._matcher = matcher
        self._judges_time = judges_time
        self.fault = ""
        self.fault_at = 0
        self.spent_s = 0.0
        self._longest_s = 0.0
        self.taken: list[int] = []
        # Masks that were made ahead, by the number of tokens before them. Each is taken once.
        self.noted: dict[int, Mask | None] = {}
        # The newest mask, and the width of the vocabulary; 0: not known yet.
        self.newest: Mask | None = None
        self.width = 0
        self._place = self._first_place()

    @property
    def follows_tokens(self) -> bool:
        """Whether ``take`` must get each token. Otherwise the number of tokens is enough."""
        return self._matcher is not None and not self.fault

    @property
    def is_late(self) -> bool:
        """Whether the grammar has used up its CPU time and has not failed yet."""
        return not self.fault and self.takes_too_long

    @property
    def takes_too_long(self) -> bool:
        """Whether the grammar has taken more CPU time than it may."""
        return self._longest_s > _MASK_S or self.spent_s > self._budget_s

    def give_up(self) -> None:
        """Fail the grammar because it takes too long."""
        if not self.fault:
            self._fail(
                f"it takes too long: {self.spent_s:.2f} s of CPU time for {len(self.taken)} tokens, of which "
                f"{self._budget_s:.2f} s are allowed, and {self._longest_s:.2f} s for one, of which {_MASK_S} s are."
            )

    def ahead(self, spent_s: float) -> Constraint | None:
        """A copy that takes drafted tokens. It has spent ``spent_s`` so far: its time is not charged to this one.

        None if that is too long already.
        """
        if spent_s > self._budget_s:
            return None
        started_s = time.thread_time()
        ahead = copy.copy(self)
        ahead._matcher = self._matcher.deep_copy()
        ahead.taken, ahead.noted = self.taken.copy(), {}
        ahead.spent_s, ahead._longest_s = spent_s, 0.0
        ahead._charge(started_s)
        return ahead

    def take(self, token: int) -> None:
        """Advance past ``token``, the next one of the output."""
        self.taken.append(token)
        if self._place == "waiting":
            self._wait(token)
        elif self._place == "begin" and token in self._gate.exits:
            self._place = "outside"
        elif self._place == "begin" and len(self.taken) == 1 and token in self._gate.detours:
            self._place = "waiting"
        elif self._place in ("begin", "inside"):
            self._place = "inside"
            started_s = time.thread_time()
            if not self._matcher.consume_token(token):
                self._fail()
            self._charge(started_s)

    def allowed(self, n_output: int, width: int) -> Mask | None:
        """The tokens that may follow the first ``n_output``, in a vocabulary of ``width``; None: all tokens."""
        self.width = width
        self.newest = self._allowed(n_output, width)
        return self.newest

    def _allowed(self, n_output: int, width: int) -> Mask | None:
        may_end = not self._sampling.ignore_eos and n_output >= self._sampling.min_tokens
        if self._place == "outside":
            return None if may_end else self._all_but_ends(width)
        if self._place == "waiting":
            return self._of_waiting(width)
        allowed = self._of_grammar(width)
        return allowed if allowed is None or may_end else self._put_off_end(allowed)

    @property
    def _budget_s(self) -> float:
        return _BUDGET_S + _BUDGET_PER_TOKEN_S * len(self.taken)

    def _charge(self, started_s: float) -> None:
        """Charge this thread's CPU time since ``started_s`` to the grammar."""
        spent_s = time.thread_time() - started_s
        self.spent_s += spent_s
        self._longest_s = max(self._longest_s, spent_s)

    def _first_place(self) -> Literal["waiting", "begin", "inside", "outside"]:
        if self._matcher is None:
            return "outside"
        return "waiting" if self._gate.waiting else "begin"

    def _wait(self, token: int) -> None:
        until = self._gate.until
        if token in self._gate.exits:
            self._place = "outside"
        elif tuple(self.taken[-len(until) :]) == until:
            self._place = "begin"

    def _of_waiting(self, width: int) -> Mask:
        *begun, last = self._gate.until
        if len(begun) > 1 and self.taken[-len(begun) :] == begun:
            # gpt-oss may extend the header of its final message; the marker would then never appear.
            mask = np.zeros(width, dtype=np.bool_)
            mask[_below([last], width)] = True
            return mask
        mask = self._all_but_ends(width)
        mask[_below(self._gate.exits, width)] = True
        return mask

    def _of_grammar(self, width: int) -> Mask | None:
        started_s = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._charge(started_s)
        if self._judges_time and self.is_late:
            self.give_up()
            return None
        if self._matcher.is_error():
            self._fail()
            return None
        # Ids beyond the tokenizer's are padding of the model's output layer.
        mask = np.zeros(width, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[:width]
        mask[: len(known)] = known
        if self._place == "begin":
            mask[_below(self._gate.exits, width)] = True
            if not self.taken:
                mask[_below(self._gate.detours, width)] = True
        if not mask.any():
            self._fail("no token continues it")
            return None
        return mask

    def _put_off_end(self, allowed: Mask) -> Mask:
        """Mask the end tokens, unless the grammar allows nothing else."""
        longer = allowed & self._all_but_ends(len(allowed))
        return longer if longer.any() else allowed

    def _all_but_ends(self, width: int) -> Mask:
        mask = np.ones(width, dtype=np.bool_)
        mask[_below(self.ends, width)] = False
        return mask

    def _fail(self, reason: str = "") -> None:
        self.fault = reason or str(self._matcher.get_error())
        self.fault_at = len(self.taken)
        self._place = "outside"


def _below(ids: Collection[int], width: int) -> list[int]:
    return [token for token in ids if token < width]
