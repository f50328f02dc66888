"""Keys, origins and host names, as a client meets them."""

from __future__ import annotations

from mlx_serve.wire.access import AccessPolicy
from tests.sockets.wirekit import get, post, serving

PAGE = b"Origin: https://app.example"
POLICY = AccessPolicy(api_keys=("sk-1",), allowed_origins=("https://app.example",), loopback_only=True)


def test_a_key_is_asked_for() -> None:
    with serving(access=POLICY) as running, running.connect() as client:
        reply = client.send(post(b"/echo", b"x")).reply()
        assert (reply.status, reply.error()["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
        # Who may not ask does not learn which routes there are.
        assert client.send(get(b"/nope")).reply().status == 401
        assert client.send(get(b"/health")).reply().status == 200
        assert client.send(get(b"/nope", b"Authorization: Bearer sk-1")).reply().status == 404
        assert client.send(post(b"/echo", b"x", b"x-api-key: sk-1")).reply().body == b"x"
        assert [request.path for request in running.app.requests] == ["/health", "/echo"]


def test_no_100_continue_without_a_key() -> None:
    with serving(access=POLICY) as running, running.connect() as client:
        reply = client.send(post(b"/echo", b"", b"Expect: 100-continue").replace(b"Length: 0", b"Length: 9")).reply()
        assert (reply.status, reply.interim) == (401, [])


def test_a_foreign_page_is_kept_out_and_learns_nothing() -> None:
    with serving(access=POLICY) as running:
        reply = running.ask(post(b"/echo", b"x", b"Origin: https://evil.example", b"x-api-key: sk-1"))
        assert reply.status == 403
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert running.app.requests == []


def test_a_rebound_name_is_kept_out() -> None:
    with serving() as running:
        raw = get(b"/hello", b"Origin: http://evil.example").replace(b"localhost", b"evil.example")
        assert running.ask(raw).status == 403
        assert running.ask(get().replace(b"localhost", b"evil.example")).status == 403
        # The target's own host counts, and not the Host field (RFC 9112 3.2.2).
        assert running.ask(get(b"http://evil.example/hello")).status == 403
        assert running.ask(get(version=b"1.0").replace(b"Host: localhost\r\n", b"")).status == 200


def test_an_allowed_page_may_read_replies_and_errors() -> None:
    with serving(access=POLICY) as running:
        for raw in (post(b"/echo", b"x", PAGE, b"x-api-key: sk-1"), post(b"/echo", b"x", PAGE), get(b"/nope", PAGE)):
            headers = running.ask(raw).headers
            assert (headers["access-control-allow-origin"], headers["vary"]) == ("https://app.example", "Origin")


def test_preflight() -> None:
    asked = (b"Access-Control-Request-Method: POST", b"Access-Control-Request-Headers: authorization,x-stainless-os")
    with serving(access=POLICY) as running:
        reply = running.ask(get(b"/echo", PAGE, *asked, method=b"OPTIONS"))
        assert reply.status == 204
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-os"
        foreign = running.ask(get(b"/echo", b"Origin: https://evil.example", *asked, method=b"OPTIONS"))
        assert foreign.status == 403
        assert "access-control-allow-origin" not in foreign.headers


def test_the_servers_own_page_needs_no_permission_but_gets_no_cors_fields() -> None:
    with serving() as running:
        reply = running.ask(get(b"/hello", b"Origin: http://localhost"))
        assert reply.status == 200
        assert "access-control-allow-origin" not in reply.headers
