"""No client library may call home: neither by what it is told, nor when it does not listen."""

import ipaddress
import os
import socket

import pytest

SILENCE = {
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "*",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    # The prices that the package ships, not those of the day.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
}
# Before any of them is imported: some read it then.
os.environ.update(SILENCE)

from tests.clients.clientserver import served  # noqa: E402


def _is_here(host: object) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    try:
        return name in (None, "", "localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def _nothing_leaves_this_machine(monkeypatch):
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def look_up_here(host, *args, **kwargs):
        assert _is_here(host), f"a look-up of {host}"
        return look_up(host, *args, **kwargs)

    def connect_here(sock, address):
        assert isinstance(address, str | bytes) or _is_here(address[0]), f"a connection to {address}"
        return connect(sock, address)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    monkeypatch.setattr(socket.socket, "connect", connect_here)


@pytest.fixture(scope="module")
def server():
    """One for all tests of a package; a test that needs another makes its own."""
    with served() as running:
        yield running
