"""Turns flags into the options of the HTTP layer: addresses, limits, access. Raises StartError of one line."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Literal, cast

from mlx_serve.paths import expanded, why_missing
from mlx_serve.settings.config import Config
from mlx_serve.values import StartError
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.framing import FramingLimits
from mlx_serve.wire.server import Server
from mlx_serve.wire.server_options import Application, ServerOptions
from mlx_serve.wire.sockets import Listening

# Exactly what browsers send, or "scheme://*".
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://(?:\*|[^*/?#@\s]*)")


def bind(app: Application, options: ServerOptions) -> Server:
    """The server, bound. Raises StartError when its address is taken or its certificate is unusable."""
    try:
        return Server(app, options)
    except ssl.SSLError as error:
        raise StartError(f"cannot use the TLS certificate {options.tls_cert}: {error.reason or error}") from error
    except OSError as error:
        raise _cannot_listen(options, error) from error


def listen(options: ServerOptions) -> Listening:
    """The server's socket alone, for ``ServerOptions.listening`` of another process. Raises StartError."""
    try:
        return Listening(options.address, options.uds, options.backlog)
    except OSError as error:
        raise _cannot_listen(options, error) from error


def _cannot_listen(options: ServerOptions, error: OSError) -> StartError:
    where = options.uds or "{} port {}".format(*options.address)
    return StartError(f"cannot listen on {where}: {error.strerror or error}")


def options(settings: Config) -> ServerOptions:
    """The HTTP layer's options."""
    _check_tls(settings)
    _check_origins(settings)
    return ServerOptions(
        address=(settings.host, settings.port),
        uds=settings.uds,
        limits=FramingLimits(max_body_bytes=settings.max_body_bytes, max_header_bytes=settings.max_header_bytes),
        access=AccessPolicy(
            api_keys=api_keys(settings),
            allowed_origins=settings.allowed_origins,
            allowed_hosts=settings.allowed_hosts,
            loopback_only=is_loopback(settings) and settings.uds is None,
            is_tls=settings.tls_cert is not None,
        ),
        head_timeout_s=settings.head_timeout,
        body_timeout_s=settings.body_timeout,
        body_min_bytes_per_s=settings.body_min_rate,
        idle_timeout_s=settings.idle_timeout,
        write_timeout_s=settings.write_timeout,
        max_connections=settings.max_connections,
        max_total_body_bytes=settings.max_total_body_bytes,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        log_format=cast('Literal["text", "json"]', settings.log_format),
    )


def is_loopback(settings: Config) -> bool:
    """Whether only this machine can connect."""
    return settings.uds is not None or settings.host in ("localhost", "::1") or settings.host.startswith("127.")


def api_keys(settings: Config) -> tuple[str, ...]:
    """The keys of --api-key and --api-key-file. The file has one key per line; lines that begin with # are comments."""
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        keys += _keys_in(expanded(settings.api_key_file))
    if not all(key.isascii() and key.isprintable() and " " not in key and key for key in keys):
        raise StartError("an API key must be printable ASCII without blanks")
    return tuple(keys)


def _keys_in(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartError(f"cannot read the API keys in {path}: {reason}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        # Otherwise a file that was emptied by mistake would open the server to everybody.
        raise StartError(f"{path} holds no API key")
    return keys


def _check_tls(settings: Config) -> None:
    if settings.tls_key is not None and settings.tls_cert is None:
        raise StartError("--tls-key needs --tls-cert")
    for path in (settings.tls_cert, settings.tls_key):
        if path is not None and not os.path.isfile(path):
            raise StartError(f"TLS file not found: {path}{why_missing(Path(path))}")


def _check_origins(settings: Config) -> None:
    for origin in settings.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            # Such a value could never equal a page's origin, so it would refuse all pages without a message.
            form = "scheme://host, scheme://host:port, scheme://* or *, without a path"
            raise StartError(f"--allowed-origins: {origin!r} is not an origin; write {form}")
