"""HAProxy and Caddy in front of the whole server, set up by the examples themselves, on the fake backend."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real.clientkit import CHAT, chat, content_of, held, program, served, started
from tests.real.test_proxies import (
    MORE_THAN_A_HEAD,
    Proxy,
    check_events_come_as_they_are_made,
    chunks,
    framing,
    free_port,
    listening,
)
from tests.waiting import until

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def haproxy(folder, server):
    with _proxy(
        folder, server, "haproxy/haproxy.cfg", "bind :8000", "bind 127.0.0.1:{}", ("haproxy", "-db", "-f")
    ) as it:
        yield it


@contextmanager
def caddy(folder, server):
    command = ("caddy", "run", "--adapter", "caddyfile", "--config")
    # Its own port for administration would be one for all.
    head = "{{\n\tadmin off\n}}\nhttp://127.0.0.1:{} {{"
    with _proxy(folder, server, "caddy/Caddyfile", ":8000 {", head, command) as it:
        yield it


@contextmanager
def _proxy(folder, server, example, listens, bound, command):
    """An example, listening on a free port, in front of ``server``."""
    port = free_port()
    text = (EXAMPLES / example).read_text()
    _, at = server.server.address
    for old, new in ((listens, bound.format(port)), ("127.0.0.1:8080", f"127.0.0.1:{at}")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    config = folder / "config"
    config.write_text(text)
    name, *words = command
    environ = [f"{name}={folder}" for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")]
    with started("env", *environ, program(name, "/usr/sbin", "/usr/local/sbin"), *words, config) as process:
        until(lambda: process.poll() is not None or listening(port), name)
        assert process.poll() is None
        yield Proxy(port)


PROXIES = pytest.mark.parametrize("proxy_of", [haproxy, caddy])


@PROXIES
def test_a_chunked_body_is_passed_on(tmp_path, proxy_of):
    with served() as server, proxy_of(tmp_path, server) as proxy:
        until(lambda: proxy.post(chat())[0] == 200, "a check of the server")
        assert content_of(proxy.post(chunks(chat("né 🐉", MORE_THAN_A_HEAD)))[2]) == "user: né 🐉\n"
        assert framing(server) == ("chunked", False)


@PROXIES
def test_events_come_as_they_are_made(tmp_path, proxy_of):
    with held() as (server, gate), proxy_of(tmp_path, server) as proxy:
        check_events_come_as_they_are_made(proxy, gate)


@PROXIES
def test_a_client_that_leaves_frees_its_place(tmp_path, proxy_of):
    with held(endless=True) as (server, gate), proxy_of(tmp_path, server) as proxy:
        with proxy.connection() as connection:
            connection.request("POST", CHAT, chat(max_tokens=10**9))
            until(lambda: server.n_running() == 1, "a running request")
        server.frees_its_place(gate)
