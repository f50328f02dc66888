"""How tests wait for what another thread or process does: by a condition, for as long as the deadline at most."""

import threading
from collections.abc import Callable

DEADLINE_S = 20.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another thread brings about."""
    gate = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        gate.wait(0.01)
    raise AssertionError(f"never came: {what}")
