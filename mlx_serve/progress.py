"""How far a long step is: a bar for people at a terminal, lines in a log. Knows nothing of what the steps do.

A step reports ``(its name, how much is done, of how much)``; a total of 0 says that nobody knows how much there is.
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

# Between two log lines of one step.
_EVERY_S = 5.0


def printed(stream: TextIO) -> Progress:
    """Progress for people: a bar on a terminal, else a line when a step begins."""
    bar = stream.isatty()
    begun, finished = "", ""

    def report(step: str, n_done: int, n_total: int) -> None:
        nonlocal begun, finished
        if bar and n_total and (step != finished or n_done < n_total):
            finished = step if n_done >= n_total else ""
            # Without its end of line the bar leaves the cursor at its start, for the next one or an error to cover it.
            end = "\n" if finished else "\r"
            stream.write(f"\x1b[K{_bar(step, n_done, n_total)}{end}")
        elif step != begun:
            stream.write(f"{step}\n")
        begun = step
        stream.flush()

    return report


def _bar(step: str, n_done: int, n_total: int) -> str:
    # What is wider than the terminal would begin a line at each report.
    n_columns = shutil.get_terminal_size().columns
    width = min(30, n_columns - len(step) - 9)
    bar = f" [{'#' * (width * n_done // n_total):{width}}]" if width > 0 else ""
    return f"{step[: max(0, n_columns - 6)]}{bar} {100 * n_done // n_total:3}%"


def logged(log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress for a log: a line when a step begins at nothing, then one every few seconds. Any thread may report."""
    lock = Lock()
    begun, done, told_at = "", 0, 0.0

    def report(step: str, n_done: int, n_total: int) -> None:
        nonlocal begun, done, told_at
        with lock:
            now = clock()
            # Less than before: the same once more.
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
    """The bars of huggingface_hub (its ``tqdm_class``) as reports of one step: on its own it is silent without a
    terminal, for however many hours a download takes.
    """
    most = 0

    class Told(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that draws a bar again

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # the hub's own, which tqdm does not take
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> None:
            nonlocal most
            # One counts files, of which a single one is nearly all of a model; two count bytes, one a little ahead.
            if self.unit == "B" and self.total:
                most = max(most, min(int(self.n), int(self.total)))
                report(step, most, int(self.total))

    # Of its own: tqdm's default lock also is one between processes.
    Told.set_lock(RLock())
    return Told
