"""Tells systemd that the service is ready (sd_notify(3)); nothing where it did not ask."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress


def notify(state: str, environ: Mapping[str, str]) -> None:
    """Send a state such as ``READY=1``. A service manager that does not listen is no reason not to serve."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), address)
