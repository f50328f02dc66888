"""Reports the progress of long steps: as a bar on a terminal, as lines in a log. Knows nothing of the steps' work.

A step reports ``(name, amount done, total)``. A total of 0 means that the total is unknown.
"""

from __future__ import annotations

import io
import logging
import shutil
import time
from collections.abc import Callable
from threading import Lock, RLock
from typing import Any, TextIO

from tqdm import tqdm

from mlx_serve.values import Progress

# Seconds between two log lines of one step.
_EVERY_S = 5.0


def printed(stream: TextIO) -> Progress:
    """Progress on ``stream``: a bar on a terminal, otherwise one line when a step begins."""
    bar = stream.isatty()
    begun, finished = "", ""

    def report(step: str, n_done: int, n_total: int) -> None:
        nonlocal begun, finished
        if bar and n_total and (step != finished or n_done < n_total):
            finished = step if n_done >= n_total else ""
            # An unfinished bar ends with a carriage return, so that the next bar or an error message overwrites it.
            end = "\n" if finished else "\r"
            stream.write(f"\x1b[K{_bar(step, n_done, n_total)}{end}")
        elif step != begun:
            stream.write(f"{step}\n")
        begun = step
        stream.flush()

    return report


def _bar(step: str, n_done: int, n_total: int) -> str:
    # A bar wider than the terminal would wrap, and each report would begin another line.
    n_columns = shutil.get_terminal_size().columns
    width = min(30, n_columns - len(step) - 9)
    bar = f" [{'#' * (width * n_done // n_total):{width}}]" if width > 0 else ""
    return f"{step[: max(0, n_columns - 6)]}{bar} {100 * n_done // n_total:3}%"


def logged(log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress in a log: a line when a step begins at 0, then one every few seconds. Safe to call from any thread."""
    lock = Lock()
    begun, done, told_at = "", 0, 0.0

    def report(step: str, n_done: int, n_total: int) -> None:
        nonlocal begun, done, told_at
        with lock:
            now = clock()
            # Less progress than before means that the same step runs once more.
            if step != begun or n_done < done:
                begun, told_at = step, now
                if n_done == 0:
                    log.info("%s", step)
            elif n_total and now - told_at >= _EVERY_S:
                told_at = now
                log.info("%s: %d %%", step, 100 * n_done // n_total)
            done = n_done

    return report


def hub_bars(report: Progress, step: str) -> type[Any]:
    """A ``tqdm_class`` for huggingface_hub that reports its bars as one step.

    Without it the hub prints nothing if there is no terminal, even during a download of hours.
    """
    most = 0

    class Told(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that redraws bars

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own argument, which tqdm does not accept
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> None:
            nonlocal most
            # The hub shows three bars: one counts files, two count bytes. The larger byte count is reported.
            if self.unit == "B" and self.total:
                most = max(most, min(int(self.n), int(self.total)))
                report(step, most, int(self.total))

    # A lock of its own: tqdm's default lock also synchronizes processes.
    Told.set_lock(RLock())
    return Told
