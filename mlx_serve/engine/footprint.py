"""The memory that this process holds by the system's own count, and how freed memory goes back to the system.

MLX counts its arrays alone. The system also counts what MLX keeps for its next arrays, Python, its libraries, and
memory that was freed but not returned; and it is this count by which the system kills. Knows no MLX.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

# proc_pid_rusage's first flavor, which has all that is needed here (sys/resource.h).
_RUSAGE_INFO_V0 = 0
_STATM = Path("/proc/self/statm")


class _RUsageInfo(ctypes.Structure):
    """``struct rusage_info_v0``."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("idle_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("start_abstime", ctypes.c_uint64),
        ("exit_abstime", ctypes.c_uint64),
    )


@cache
def _libc() -> Any:
    """The system's library, opened once: the footprint is asked for after each step."""
    return ctypes.CDLL(None)


def footprint_bytes() -> int:
    """macOS's ``phys_footprint``; on Linux the resident memory without mapped files. 0: not known."""
    if sys.platform == "darwin":
        return darwin_footprint(_libc())
    try:
        return linux_footprint(_STATM.read_text(encoding="ascii"))
    except OSError:
        # Neither macOS nor a Linux with /proc.
        return 0


def darwin_footprint(libc: Any) -> int:
    """By the system's library, which is ``libc``."""
    usage = _RUsageInfo()
    failed = libc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(usage))
    return 0 if failed else int(usage.phys_footprint)


def linux_footprint(statm: str) -> int:
    """From the text of /proc/self/statm (proc_pid_statm(5)). The system can drop the pages of files at any time."""
    _, resident, of_files, *_ = map(int, statm.split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def return_freed() -> None:
    """Return freed memory to the system. glibc keeps it otherwise; other libraries return it by themselves."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)
