"""How much of the machine others used during a measurement, from Linux's /proc; elsewhere unknown.

A comparison is disturbed when another program, or the host of this virtual machine, takes processor time away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

# A larger share of the machine disturbs a measurement.
MAX_OTHERS = 0.1

_STAT = Path("/proc/stat")


def watch_others(pids: Sequence[int]) -> Callable[[], float | None]:
    """Starts now; the function that it gives tells which share of all processors neither ``pids`` nor idling took."""
    if not _STAT.exists():
        return lambda: None
    busy, total = _machine()
    own = _own(pids)

    def share() -> float:
        busy_now, total_now = _machine()
        return max(0, busy_now - busy - (_own(pids) - own)) / max(1, total_now - total)

    return share


def warnings(shares: Sequence[float | None]) -> list[str]:
    """What to say of measurements beside which other programs took such shares of the machine."""
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        return ["busy? how much other programs worked is not known here"]
    worst = max(known, default=0.0)
    return [f"busy: other programs took up to {worst:.0%} of the machine"] if worst > MAX_OTHERS else []


def holds(pid: int) -> dict[str, int]:
    """What a process holds: threads, descriptors, and its memory in bytes now and at most. Linux only."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "rss": int(fields["VmRSS"].split()[0]) * 1024,
        "peak_rss": int(fields["VmHWM"].split()[0]) * 1024,
    }


def children(pid: int) -> dict[str, int]:
    """How many processes descend from a process, and their memory in bytes. Linux only."""
    found, todo = 0, [pid]
    rss = 0
    while todo:
        parent = todo.pop()
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):  # it has ended since
                todo += map(int, file.read_text(encoding="ascii").split())
        if parent != pid:
            with suppress(OSError, KeyError):  # as a zombie has no memory
                rss += holds(parent)["rss"]
                found += 1
    return {"children": found, "children_rss": rss}


def watch_process(pid: int) -> Callable[[], float | None]:
    """Starts now; the function that it gives tells the seconds of processor time that the process took."""
    if not _STAT.exists():
        return lambda: None
    before = _ticks(pid)
    return lambda: (_ticks(pid) - before) / os.sysconf("SC_CLK_TCK")


def _machine() -> tuple[int, int]:
    """Ticks not idle, and all ticks."""
    # user nice system idle iowait irq softirq steal; the guests after them are in user already
    ticks = [int(field) for field in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _own(pids: Sequence[int]) -> int:
    return sum(_ticks(pid) for pid in (os.getpid(), *pids))


def _ticks(pid: int) -> int:
    # The second field, the program's name in brackets, may hold blanks.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
