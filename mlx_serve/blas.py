"""OpenBLAS for MLX's CPU backend on Linux, whose wheel carries the slow reference BLAS.

Loaded with its symbols global before mlx is first imported, it takes the reference's place: prefill and batched
decoding become ten times faster and more (docs/decisions.md). Does nothing where it is not installed.
"""

from __future__ import annotations

import ctypes
import sys

_NAMES = ("libopenblas.so.0", "libopenblas.so")


def preload_openblas() -> str | None:
    """The library that was loaded, or None. Call before anything imports mlx."""
    if sys.platform != "linux":
        return None
    for name in _NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None
