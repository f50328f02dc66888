"""Loads OpenBLAS for MLX's CPU backend on Linux, because MLX's wheel contains only the slow reference BLAS.

OpenBLAS has to be loaded with global symbols before the first import of mlx: it then replaces the reference BLAS.
Prefill and batched decoding become at least ten times faster (docs/decisions.md). Without OpenBLAS nothing changes.
"""

from __future__ import annotations

import ctypes
import sys

_NAMES = ("libopenblas.so.0", "libopenblas.so")


def preload_openblas() -> str | None:
    """Loads OpenBLAS and returns the library's name, or None. Call this before anything imports mlx."""
    if sys.platform != "linux":
        return None
    for name in _NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None
