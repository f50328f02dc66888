"""Limits the memory that the request bodies of all connections take together.

Must not know sockets or what a body means.
"""

from __future__ import annotations

from threading import Lock

from mlx_serve.wire.admission import unavailable


class BodyBudget:
    """At most ``max_bytes``; a body counts from its first byte to the last byte of its reply."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self.n_held = 0

    def hold(self, n_bytes: int) -> None:
        """Counts arrived bytes. Raises ApiError 503 if that exceeds the limit, and then counts none of them."""
        with self._lock:
            if self.n_held + n_bytes > self._max_bytes:
                text = f"the bodies of all requests are larger than {self._max_bytes} bytes (--max-total-body-bytes)"
                raise unavailable(text, code="too_many_bytes")
            self.n_held += n_bytes

    def release(self, n_bytes: int) -> None:
        """Called when a request has ended."""
        with self._lock:
            self.n_held -= n_bytes
