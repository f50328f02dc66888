"""What the MLX thread is doing and for how long, compared with earlier work of the kind. Knows no MLX and no jobs.

The MLX thread records the start of each piece of work. Any other thread may ask whether the current piece takes far
longer than usual. Work inside MLX cannot be interrupted, so a piece that hangs can only be reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# A piece of work is overdue after so many times the duration of recent pieces of its kind.
_N_LAST = 32
_FAR_LONGER = 20


class Costs:
    """The durations of the last pieces of one kind of work, in seconds.

    No piece is overdue before ``least_s``. The first piece, without anything to compare, is not before ``first_s``.
    """

    def __init__(self, least_s: float, first_s: float) -> None:
        self._least_s = least_s
        self._first_s = first_s
        self._last: deque[float] = deque(maxlen=_N_LAST)

    def note(self, seconds: float) -> None:
        """Record the duration of a piece."""
        self._last.append(seconds)

    def limit_s(self) -> float:
        """After how long a piece is overdue.

        The longest of several pieces is ignored. Otherwise, after a hang of a minute, the next piece would have twenty.
        """
        if not self._last:
            return self._first_s
        usual_s = sorted(self._last)[-2:][0]
        return max(self._least_s, _FAR_LONGER * usual_s)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A piece of work that has taken ``seconds`` so far, where ``limit_s`` would be far longer than usual."""

    work: str
    seconds: float
    limit_s: float

    def __str__(self) -> str:
        usual = f"more than {self.limit_s:.0f} s is unusual"
        return f"the MLX thread has been busy with {self.work} for {self.seconds:.0f} s; {usual}"


@dataclass(frozen=True, slots=True)
class _Work:
    name: str
    costs: Costs
    since_s: float
    limit_s: float


class Heartbeat:
    """Written by the MLX thread alone, read by any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Replaced as a whole, so that readers need no lock.
        self._work: _Work | None = None

    def turn_to(self, name: str, costs: Costs) -> None:
        """End the current piece of work and begin another one."""
        now = self._clock()
        self._end(now)
        self._work = _Work(name, costs, now, costs.limit_s())

    def rest(self) -> None:
        """End the current piece of work; the thread is idle now."""
        self._end(self._clock())
        self._work = None

    @property
    def is_resting(self) -> bool:
        """Whether the thread is idle."""
        return self._work is None

    def overdue(self) -> Overdue | None:
        """The current piece of work, if it takes far longer than usual."""
        work = self._work
        if work is None:
            return None
        seconds = self._clock() - work.since_s
        return Overdue(work.name, seconds, work.limit_s) if seconds > work.limit_s else None

    def _end(self, now: float) -> None:
        if self._work is not None:
            self._work.costs.note(now - self._work.since_s)
