"""Shows a bar on a terminal; elsewhere prints one line at the start of each round. Everything goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from mlx_serve.commands.bench.load import Watch


@contextmanager
def progress(label: str, n_requests: int) -> Iterator[Watch]:
    """Yields a function that takes the numbers of answered and failed requests."""
    if not sys.stderr.isatty():
        note(f"{label}: {n_requests} requests")
        yield lambda n_done, n_failed: None
        return
    with tqdm(total=n_requests, desc=label, unit="request", leave=False, file=sys.stderr) as bar:

        def watch(n_done: int, n_failed: int) -> None:
            if n_failed:
                bar.set_postfix(failed=n_failed, refresh=False)
            bar.update(n_done - bar.n)

        yield watch


def note(text: str) -> None:
    """Prints a line for the user."""
    print(text, file=sys.stderr, flush=True)
