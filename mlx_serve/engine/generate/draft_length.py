"""How many tokens to draft in a step, so that no sequence is slower for it. Knows no MLX, no model, and no clock.

What a step with drafts takes is measured, for each number of rows and of drafted tokens, and expressed in steps without
drafts of the same rows. All rows of a step wait for its drafts. So each row has an account: a step with drafts adds the
tokens that the row got and subtracts what the step took. A row whose account is overdrawn stops the drafts of all,
unless the next step is expected to settle it. Whatever the guesses are worth, a row loses no more than its overdraft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol, TypeAlias

# What tells steps apart that take different times: the banks and how many rows each has. They decode in the same step,
# one after the other.
Shape: TypeAlias = Hashable

# How many tokens a step may draft for each row, if their limits allow it.
LENGTHS = (1, 3, 7, 15)
# The most tokens of all rows in a step with drafts: the logits of each take memory. Such passes compute enough anyway.
_MOST_TOKENS = 128
# Drafting must promise so many times the tokens per second of a step without drafts.
_LEAST_GAIN = 1.05
# The same for a length whose cost is not known, if it costs no more than a shorter one.
_WORTH_A_TRIAL = 1.2
# What a row may lose for each step, in steps, and at any time.
_LOSS = 0.02
_OVERDRAFT = 2.0
# The most steps that a row can have saved. What it saves beyond that is no reason to lose it again.
_MOST_CREDIT = 16.0
# So many of the newest times are kept of each kind of step.
_KEPT = 5
# Steps without drafts must have been timed so often, not longer ago than so many steps.
_LEAST_PLAIN = 3
_FRESH = 100
# A cost that can't be measured now may be higher than it was by this factor: so many rows may have been fewer.
_DOUBT = 1.5
# Steps with drafts that seem to take less than this, in steps without, show that those were timed beside other work.
_TOO_FAST = 0.8
# What a length costs is guessed again when it was not measured for so many steps.
_STALE = 400


class Drafting(Protocol):
    """A row. ``credit``: how many steps without drafts its drafts have saved it so far. ``max_drafts``: its limit."""

    credit: float
    max_drafts: int

    def expected(self, n_tokens: int) -> float:
        """How many of ``n_tokens`` drafted tokens will be right."""


@dataclass(frozen=True, slots=True)
class Times:
    """When a step began, when the pass that ran before it had ended, and when the step ended, in seconds.

    A step without drafts does not wait for its own pass, nor know when the one before it ended.
    """

    started_s: float
    ready_s: float
    ended_s: float


class DraftLength:
    """Chooses how many tokens the next step drafts for each row, by the times of past steps."""

    def __init__(self) -> None:
        # The steps so far whose times say something, and how many they were when rows last came or went.
        self._n_steps = self._n_before_change = 0
        # By shape: when steps without drafts were timed, and their seconds.
        self._plain: dict[Shape, _Newest] = {}
        # By the power of two of the rows, and the drafted tokens: when steps were timed, and what they took, in steps
        # of the same rows without drafts.
        self._costs: dict[tuple[int, int], _Newest] = {}
        # Seconds from the end of a step to the next one.
        self._between_s: deque[float] = deque([0.0], maxlen=_KEPT)
        # When the last step ended, and whether its pass was still running then.
        self._ended_s: float | None = None
        self._ran_on = False
        # Whether other work ran in the last step.
        self._was_interrupted = False

    def choose(self, shape: Shape, rows: Sequence[Drafting]) -> int:
        """How many tokens to draft for each row; 0: a step without drafts."""
        if _gain(rows, LENGTHS[-1], 1.0) < _LEAST_GAIN:
            return 0
        knows_plain = self._plain_s(shape) is not None
        if not knows_plain and not self._was_interrupted:
            # Steps without drafts are timed now. Beside other work they can't be, and drafts cost less than alone.
            return 0
        best, best_gain = 0, 0.0
        most_drafts = max(row.max_drafts for row in rows)
        lengths = sorted({min(n, most_drafts) for n in LENGTHS})
        for shorter, n in pairwise([0, *lengths]):
            cost = self._cost(len(rows), n, shorter)
            if cost is None or len(rows) * (1 + n) > _MOST_TOKENS:
                break
            least, most = cost
            if not knows_plain:
                if least != most:
                    break
                least = most = most * _DOUBT
            gain = _gain(rows, n, least)
            is_worth_it = gain > (_LEAST_GAIN if least == most else _WORTH_A_TRIAL)
            if is_worth_it and gain > best_gain and all(_affords(row, n, most) for row in rows):
                best, best_gain = n, gain
        return best

    def interrupted(self) -> None:
        """Other work runs: the time since the last step's end is not a step's."""
        self._ended_s = None

    def changed(self) -> None:
        """Rows came or went. Those that are there now may be longer or shorter than the ones that were timed."""
        self._n_before_change = self._n_steps
        self.interrupted()

    def ran(self, shape: Shape, n_drafted: int, taken: Sequence[tuple[Drafting, int]], times: Times) -> None:
        """A step drafted at most ``n_drafted`` tokens for a row, and gave each row some."""
        self._follow(times, runs_on=False)
        key = (len(taken).bit_length(), n_drafted)
        plain_s = self._plain_s(shape)
        if plain_s is not None:
            cost = (times.ended_s - times.ready_s + median(self._between_s)) / plain_s
            self._note_cost(key, shape, cost)
        elif key in self._costs and self._costs[key].values:
            cost = median(self._costs[key].values) * _DOUBT
        else:
            # Rows moved to another bank as the step began; or this rank is not the one that chooses.
            return
        for row, n_tokens in taken:
            # A pause of the machine is nobody's debt.
            row.credit = min(row.credit + n_tokens - min(cost, 2.0 + n_drafted), _MOST_CREDIT)

    def _note_cost(self, key: tuple[int, int], shape: Shape, cost: float) -> None:
        if key not in self._costs:
            # The first step of a kind may have compiled kernels.
            self._costs[key] = _Newest()
            return
        noted = self._costs[key]
        noted.add(self._n_steps, cost)
        if len(noted.values) >= _LEAST_PLAIN and median(noted.values) < _TOO_FAST:
            del self._costs[key], self._plain[shape]

    def ran_plain(self, shape: Shape, rows: Sequence[Drafting], times: Times) -> None:
        """A step without drafts ran."""
        seconds = self._follow(times, runs_on=True)
        if seconds is not None:
            if shape not in self._plain:
                # There are many shapes over time, of which few are of now.
                since = self._n_steps - _FRESH
                self._plain = {one: times for one, times in self._plain.items() if times.n_since(since)}
                self._plain[shape] = _Newest()
            self._plain[shape].add(self._n_steps, seconds)
        for row in rows:
            row.credit = min(row.credit + _LOSS, _MOST_CREDIT)

    def _follow(self, times: Times, *, runs_on: bool) -> float | None:
        """Note when a step ended. Returns the time since the end of the step before, if both were without drafts."""
        last_s, self._ended_s = self._ended_s, times.ended_s
        ran_on, self._ran_on = self._ran_on, runs_on
        self._was_interrupted = last_s is None
        if last_s is None:
            return None
        self._n_steps += 1
        self._between_s.append(times.started_s - last_s)
        return times.ended_s - last_s if ran_on and runs_on else None

    def _plain_s(self, shape: Shape) -> float | None:
        """The seconds of a step without drafts. None: too few were timed lately, or none since rows came or went.

        The rows before may have taken longer, but a single time may be a pause of the machine.
        """
        known = self._plain.get(shape)
        if known is None or known.n_since(self._n_steps - _FRESH) < _LEAST_PLAIN:
            return None
        of_now = known.since(self._n_before_change)
        return min(median(known.values), median(of_now)) if of_now else None

    def _cost(self, n_rows: int, n_drafts: int, shorter: int) -> tuple[float, float] | None:
        """The least and the most that a step with drafts may take, in steps without. They are equal if it is known.

        None: it is to be guessed from that of the next ``shorter`` draft (0: of none), which is not known either.
        """
        size = n_rows.bit_length()
        known = self._costs.get((size, n_drafts))
        last = median(known.values) if known is not None and known.values else None
        if known is not None and last is not None and known.n_since(self._n_steps - _STALE):
            return last, last
        if not shorter:
            return 1.0, last or 1.0 + n_drafts
        measured = self._costs.get((size, shorter))
        if measured is None or not measured.values:
            return None
        least = max(1.0, median(measured.values))
        return least, last or 1 + (least - 1) * n_drafts / shorter


class _Newest:
    """The newest values of something, and at which steps they were noted."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def add(self, step: int, value: float) -> None:
        self._noted.append((step, value))

    @property
    def values(self) -> list[float]:
        return [value for _, value in self._noted]

    def since(self, step: int) -> list[float]:
        """The values that were noted after a step."""
        return [value for noted, value in self._noted if noted > step]

    def n_since(self, step: int) -> int:
        return len(self.since(step))


def _gain(rows: Sequence[Drafting], n_drafts: int, cost: float) -> float:
    """How many times as fast as without drafts a step is, which takes ``cost`` steps without."""
    return (1 + sum(row.expected(n_drafts) for row in rows) / len(rows)) / cost


def _affords(row: Drafting, n_drafts: int, cost: float) -> bool:
    return row.credit + _OVERDRAFT + 1 + row.expected(n_drafts) >= cost
