"""What the operator sets for the HTTP side, and the interface of the application behind it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlx_serve.values import ApiError, RawRequest, Response
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.framing import FramingLimits
from mlx_serve.wire.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Target:
    """The route of a path. Without ``methods`` there is no such route.

    ``answer`` gets HEAD as GET, and never OPTIONS or a method that is not listed. ``error`` makes the reply to a
    refusal, given the request's id. ``name`` is the path's name in metrics.
    """

    methods: frozenset[str]
    answer: Callable[[RawRequest], Response]
    error: Callable[[ApiError, str], Response]
    name: str = "other"
    # Methods that usually have a body, but need none on this route.
    bodiless: frozenset[str] = frozenset()
    # Answered without a key, and while the server drains.
    is_open: bool = False
    # Machines poll this route every few seconds: its log lines have level DEBUG, unless the request was wrong.
    is_quiet: bool = False


class Application(Protocol):
    """The routes of the server."""

    def find(self, path: str) -> Target:
        """The route of a path; ``path`` is "" when it is not known. Called once for each request."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``uds``, the path of a Unix socket, replaces ``address``. Times are in seconds."""

    address: tuple[str, int] = ("127.0.0.1", 8080)
    uds: str | None = None
    # A socket that listens there already and belongs to another process.
    listening: socket.socket | None = None
    limits: FramingLimits = field(default_factory=FramingLimits)
    access: AccessPolicy = field(default_factory=AccessPolicy)
    # The limit for a whole head (with the TLS handshake); for a whole body; and the lowest speed of an upload, which
    # counts once ``head_timeout_s`` has passed. Otherwise a byte now and then would hold a thread for all of
    # ``body_timeout_s``.
    head_timeout_s: float = 20.0
    body_timeout_s: float = 300.0
    # 0: any speed is accepted.
    body_min_bytes_per_s: int = 256
    # Longer than routers keep idle upstream connections (90 s), so that the router closes first.
    idle_timeout_s: float = 600.0
    # A client that takes nothing for this time is cut off; one that takes a little now and then is not.
    write_timeout_s: float = 60.0
    # How long a client may go on sending after a refusal, and how long it may be silent then, so that it reads the
    # reply instead of a reset. The connection can be evicted during that time.
    linger_s: float = 30.0
    linger_silence_s: float = 2.0
    max_connections: int = 512
    max_total_body_bytes: int = 256 * 2**20
    backlog: int = 1024
    tls_cert: str | None = None
    tls_key: str | None = None
    server_name: str = "mlx-serve"
    log_format: Literal["text", "json"] = "text"
    # Called for each request when it has ended, on the thread that served it.
    on_end: Callable[[RequestLog], None] = lambda entry: None
