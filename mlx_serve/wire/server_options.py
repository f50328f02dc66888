"""What the operator sets for the HTTP side, and what the HTTP side asks of the application behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlx_serve.values import ApiError, RawRequest, Response
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.framing import FramingLimits
from mlx_serve.wire.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Target:
    """What a path leads to. Without ``methods`` there is nothing.

    ``answer`` gets HEAD as GET; OPTIONS, and methods that are not listed, never reach it. ``error`` makes the reply to
    a refusal, given the request's id. ``name`` stands for the path where paths are counted.
    """

    methods: frozenset[str]
    answer: Callable[[RawRequest], Response]
    error: Callable[[ApiError, str], Response]
    name: str = "other"
    # Methods that send content, and need none here.
    bodiless: frozenset[str] = frozenset()
    # Answered without a key, and while the server drains.
    is_open: bool = False
    # Asked every few seconds by machines: its log lines are for level DEBUG, unless something went wrong.
    is_quiet: bool = False


class Application(Protocol):
    """What is served."""

    def find(self, path: str) -> Target:
        """What a request's path leads to; ``path`` is "" when it is not known. Asked once for each request."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``uds``, the path of a Unix socket, takes the place of ``address``. Times are in seconds."""

    address: tuple[str, int] = ("127.0.0.1", 8080)
    uds: str | None = None
    limits: FramingLimits = field(default_factory=FramingLimits)
    access: AccessPolicy = field(default_factory=AccessPolicy)
    # A whole head (and TLS handshake); a whole body; and the slowest upload that is waited for once
    # ``head_timeout_s`` has passed, or a byte now and then would hold a thread for the whole of ``body_timeout_s``.
    head_timeout_s: float = 20.0
    body_timeout_s: float = 300.0
    # 0: however slow.
    body_min_bytes_per_s: int = 256
    # Longer than routers keep idle upstream connections (90 s), so that it is they who close.
    idle_timeout_s: float = 600.0
    # A client that takes nothing for so long is cut; one that takes a little now and then is not.
    write_timeout_s: float = 60.0
    # How long a client may go on sending after a refusal, and how long it may be silent then, so that it reads the
    # reply instead of a reset. It can be evicted all the while.
    linger_s: float = 30.0
    linger_silence_s: float = 2.0
    max_connections: int = 512
    max_total_body_bytes: int = 256 * 2**20
    backlog: int = 1024
    tls_cert: str | None = None
    tls_key: str | None = None
    server_name: str = "mlx-serve"
    log_format: Literal["text", "json"] = "text"
    # Told of each request when it has ended, on the thread that served it.
    on_end: Callable[[RequestLog], None] = lambda entry: None
