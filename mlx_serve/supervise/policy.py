"""What to do about a death: restart or stop, after which pause, and which requests to suspect; and what a hang is.

Decisions alone, over times in seconds that the caller measured.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# A process that dies sooner after it was ready has died quickly; so many quick deaths in a row are the last.
QUICK_S = 60.0
MOST_QUICK = 3
_LONGEST_PAUSE_S = 30.0
# A busy process may miss a few beats.
_LEAST_SILENT_S = 5.0
# The time-out for a process that was told to end. It is short, as launchd and systemd wait little longer than requests.
_MOST_SILENT_ENDING_S = 10.0


class Restarts:
    """Counts the quick deaths in a row. ``quick_s`` 0: none is quick."""

    def __init__(self, quick_s: float = QUICK_S) -> None:
        self._quick_s = quick_s
        self.n_quick = 0

    def pause_s(self, served_s: float) -> float | None:
        """After a death: the pause before the next start; None: give up. ``served_s``: since ready, 0 if it never was.

        The first restart is at once: most deaths come after hours.
        """
        self.n_quick = self.n_quick + 1 if served_s < self._quick_s else 0
        if self.n_quick >= MOST_QUICK:
            return None
        return min(_LONGEST_PAUSE_S, 2.0 ** (self.n_quick - 1)) if self.n_quick else 0.0


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that the server process had queued and not ended. Never its text: ``fingerprint`` is a digest of it.

    Requests with the same model and fingerprint have the same prompt: a client's next try has another id.
    """

    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    sequences: int
    fingerprint: str

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.fingerprint

    def __str__(self) -> str:
        sizes = f"prompt_tokens={self.prompt_tokens} max_tokens={self.max_tokens} sequences={self.sequences}"
        return f"id={self.id} model={self.model} {sizes}"


class Suspects:
    """The requests that were running at two deaths in a row."""

    def __init__(self) -> None:
        self._before: frozenset[tuple[str, str]] = frozenset()

    def at_death(self, running: Collection[RunningRequest]) -> list[RunningRequest]:
        """Those of ``running`` that were running at the death before, too."""
        again = [request for request in running if request.key in self._before]
        self._before = frozenset(request.key for request in running)
        return again


class Silence:
    """For how long the server process has said nothing, counted while this process runs itself.

    A time in which this process was stopped too (the machine was frozen, a debugger) says nothing about the other:
    each call counts no more than ``step_s``.
    """

    def __init__(self, now: float, step_s: float) -> None:
        self._step_s = step_s
        self._at = now
        self._silent_s = 0.0

    def heard(self) -> None:
        """The process said something."""
        self._silent_s = 0.0

    def pass_to(self, now: float) -> float:
        """The seconds of silence so far. Call it more often than every ``step_s``."""
        self._silent_s += min(now - self._at, self._step_s)
        self._at = now
        return self._silent_s


def hang(overdue_s: float, work: str, silent_s: float, timeout_s: float, *, is_ending: bool = False) -> str:
    """Why the server process counts as hanging; "" if it does not.

    ``overdue_s``: how long the MLX thread has been at work that takes far longer than its last pieces; 0: it is not.
    ``is_ending``: the process was told to end. It then limits its work itself, so only its silence counts.
    """
    if not timeout_s:
        return ""
    if is_ending:
        overdue_s, timeout_s = 0.0, min(timeout_s, _MOST_SILENT_ENDING_S)
    if silent_s >= max(timeout_s, _LEAST_SILENT_S):
        return f"it has said nothing for {silent_s:.0f} s"
    if overdue_s >= timeout_s:
        return f"the MLX thread has been busy with {work or 'its work'} for {overdue_s:.0f} s"
    return ""
