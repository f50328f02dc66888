"""Finds other programs that compute on this machine's GPU, by the names of their processes.

Two processes that use Metal at once run out of memory sooner, and make panics of macOS likelier.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_PS = ("ps", "-axo", "pid=,ppid=,args=")
_TIMEOUT_S = 5
SERVER = "mlx-serve"
# By a part of the command line. A sub-command of this program does not compute, "serve" and flags start a server.
_PROGRAMS = (
    (SERVER, re.compile(r"(?:^|/|-m )mlx[-_]serve(?: serve\b| -|$)")),
    ("mlx_lm", re.compile(r"(?:^|/|-m )mlx_lm\.?(?:server|generate|chat|lora|batch|\s)")),
    ("another MLX server", re.compile(r"(?:^|/|-m )(?:vllm[-_]mlx|rapid[-_]mlx|mlx[-_]omni[-_]server|omlx)\b")),
    ("Ollama", re.compile(r"(?:^|/)ollama (?:serve|runner)\b")),
    ("llama.cpp", re.compile(r"(?:^|/)llama-(?:server|cli|run)\b")),
    ("LM Studio", re.compile(r"/LM Studio(?:\.app/Contents/MacOS/LM Studio| Helper)|/\.lmstudio/")),
)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process that may use the GPU."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


def running() -> list[Neighbour]:
    """The other programs that run now. Empty if the system does not tell."""
    try:
        done = subprocess.run(_PS, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, errors="replace")  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    return among(done.stdout.splitlines(), {os.getpid(), os.getppid()})


def among(lines: Sequence[str], own: Collection[int]) -> list[Neighbour]:
    """Those among the lines of ps. ``own``: the ids of this server's processes; their children are left out too.

    Of a program with several processes, one that started others stands for them.
    """
    found: dict[int, Neighbour] = {}
    parents: dict[int, int] = {}
    for line in lines:
        pid, parent, command = [*line.split(maxsplit=2), "", "", ""][:3]
        name = next((name for name, pattern in _PROGRAMS if pattern.search(command)), "")
        if name and pid.isdigit() and parent.isdigit() and not {int(pid), int(parent)} & set(own):
            found[int(pid)], parents[int(pid)] = Neighbour(int(pid), name), int(parent)
    return [each for pid, each in found.items() if parents[pid] not in found]
