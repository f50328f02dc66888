"""What all request bodies together may hold of memory, over all connections.

Must not know sockets or what a body means.
"""

from __future__ import annotations

from threading import Lock

from mlx_serve.wire.admission import unavailable


class BodyBudget:
    """At most ``max_bytes``, from the first byte of a body to the last one of its reply."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self.n_held = 0

    def hold(self, n_bytes: int) -> None:
        """More has come. Raises ApiError 503 when that is too much, and then holds nothing of it."""
        with self._lock:
            if self.n_held + n_bytes > self._max_bytes:
                text = f"the bodies of all requests come to more than {self._max_bytes} bytes (--max-total-body-bytes)"
                raise unavailable(text, code="too_many_bytes")
            self.n_held += n_bytes

    def release(self, n_bytes: int) -> None:
        """A request has ended."""
        with self._lock:
            self.n_held -= n_bytes
