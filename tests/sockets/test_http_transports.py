"""Unix sockets, IPv6, TLS; binding and what is left behind."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_serve.wire.framing import FramingLimits
from mlx_serve.wire.server import Server
from mlx_serve.wire.server_options import ServerOptions
from tests.sockets.wirekit import Client, FakeApp, Running, get, post, post_head, serving


@pytest.fixture
def uds() -> Iterator[str]:
    # Not tmp_path: the path of a Unix socket has at most about 100 characters.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield os.path.join(folder, "s")


def test_a_unix_socket_serves_its_owner_alone_and_is_removed(uds: str) -> None:
    with serving(uds=uds) as running:
        assert running.server.address == uds
        assert stat.S_IMODE(os.stat(uds).st_mode) == 0o600
        with running.connect() as client:
            assert client.send(post(b"/echo", b"x")).reply().body == b"x"
            assert client.send(get()).reply().status == 200
    assert not os.path.exists(uds)


def test_a_unix_client_that_leaves_or_half_closes_is_told_apart(uds: str) -> None:
    with serving(uds=uds) as running:
        with running.connect() as client:
            client.send(post(b"/wait"))
            assert running.app.waiting.acquire(timeout=10)
            client.half_close()
            assert client.peek(1) == b"H"
        assert running.app.gone.wait(10)


def test_a_stale_socket_is_replaced(uds: str) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(uds)
    with serving(uds=uds) as running:
        assert running.ask(get()).status == 200


def test_a_socket_that_is_served_or_a_file_is_not(uds: str) -> None:
    with serving(uds=uds):
        with pytest.raises(OSError, match="in use"):
            Server(FakeApp(), ServerOptions(uds=uds))
        assert os.path.exists(uds)
    Path(uds).write_text("mine")
    with pytest.raises(OSError, match="in use"):
        Server(FakeApp(), ServerOptions(uds=uds))
    assert Path(uds).read_text() == "mine"


def test_another_servers_socket_is_not_removed(uds: str) -> None:
    with serving(uds=uds):
        os.unlink(uds)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(uds)
    assert os.path.exists(uds)


def test_a_port_in_use_is_the_callers_to_know() -> None:
    with serving() as running:
        assert isinstance(running.server.address, tuple)
        with pytest.raises(OSError, match="in use"):
            Server(FakeApp(), ServerOptions(address=running.server.address))


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(address=("::1", 0)) as running:
        assert running.ask(get().replace(b"localhost", b"[::1]:80")).status == 200


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    return cert, key


def secure(running: Running, cert: str) -> Client:
    context = ssl.create_default_context(cafile=cert)
    return Client(context.wrap_socket(running.connect().sock, server_hostname="localhost"))


def test_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(tls_cert=cert, tls_key=key) as running, secure(running, cert) as client:
        assert client.send(post(b"/echo", b"x" * 100_000)).reply().body == b"x" * 100_000
        client.send(post(b"/stream") + get(b"/hello", b"Connection: close"))
        running.app.streams.get().put(b"1", b"2", None)
        assert client.reply().body == b"12"
        assert client.reply().status == 200
        assert client.at_end()


def test_a_refusal_is_read_under_tls_while_sending(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(tls_cert=cert, tls_key=key) as running, secure(running, cert) as client:
        client.send(post_head(b"/nope", b"Content-Length: 4000000") + b"x" * 1_000_000)
        assert client.reply().status == 404


def test_a_refusal_is_read_under_tls_by_a_client_that_sends_everything_first(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    limits = FramingLimits(max_body_bytes=1_000_000)
    with serving(tls_cert=cert, tls_key=key, limits=limits) as running, secure(running, cert) as client:
        client.send(post_head(b"/echo", b"Content-Length: 16000000"))
        for _ in range(16):
            client.send(b"x" * 1_000_000)
        assert client.reply().status == 413
        assert client.at_end()


def test_a_stream_to_http_1_0_ends_with_a_close_notify(certificate: tuple[str, str]) -> None:
    """Without it the client could not tell the end of the body from a cut."""
    cert, key = certificate
    with serving(tls_cert=cert, tls_key=key) as running, secure(running, cert) as client:
        assert isinstance(client.sock, ssl.SSLSocket)
        client.sock.suppress_ragged_eofs = False
        client.send(post(b"/stream", version=b"1.0"))
        running.app.streams.get().put(b"1", None)
        assert client.reply().body == b"1"


def test_a_tls_client_that_closes_is_noticed(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(tls_cert=cert, tls_key=key) as running:
        with secure(running, cert) as client:
            client.send(post(b"/wait"))
            assert running.app.waiting.acquire(timeout=10)
        assert running.app.gone.wait(10)
        running.empty()


def test_handshakes_hold_up_nobody_and_time_out(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(tls_cert=cert, tls_key=key, head_timeout_s=0.3) as running:
        with running.connect() as silent, running.connect() as plain:
            plain.send(get())
            with secure(running, cert) as client:
                assert client.send(get()).reply().status == 200
            assert plain.cut()
            assert silent.cut()
        running.empty()
