"""Who may ask: tables over policy, header and verdict."""

from __future__ import annotations

import pytest

from mlx_serve.values import ApiError
from mlx_serve.wire.access import AccessPolicy, check, client, cors_fields, is_preflight, preflight_fields

OPEN = AccessPolicy()
KEYS = AccessPolicy(api_keys=("sk-one", "sk-tw\u00f6"))
PAGES = AccessPolicy(allowed_origins=("https://app.example",))
ANY_PAGE = AccessPolicy(allowed_origins=("*",))
EXTENSIONS = AccessPolicy(allowed_origins=("chrome-extension://*", "file://*"))
APPS = (
    "chrome-extension://aapbdbdomjkkjkaonfhkkikfgjllcleb",
    "moz-extension://0f2d6c3e-1b7a-4c1d-9a55-3d2f0a7b9c11",
    "app://obsidian.md",
    "tauri://localhost",
    "vscode-webview://1k7v0c4a8",
    "file://",
)


def verdict(
    policy: AccessPolicy,
    headers: dict[str, str] | None = None,
    *,
    method: str = "POST",
    is_open: bool = False,
    authority: str | None = "localhost:8080",
) -> int:
    try:
        check(policy, method, headers or {}, authority, is_open=is_open)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(("headers", "status"), [
    ({"authorization": "Bearer sk-one"}, 200),
    ({"authorization": "bearer sk-one"}, 200),
    ({"authorization": "BEARER  sk-one"}, 200),
    ({"x-api-key": "sk-one"}, 200),
    ({"authorization": "Bearer other", "x-api-key": "sk-one"}, 200),
    ({"authorization": "Bearer " + "sk-tw\u00f6".encode().decode("latin-1")}, 200),
    ({}, 401),
    ({"authorization": ""}, 401),
    ({"authorization": "sk-one"}, 401),
    ({"authorization": "Basic sk-one"}, 401),
    ({"authorization": "Bearer"}, 401),
    ({"authorization": "Bearer sk-on"}, 401),
    ({"authorization": "Bearer sk-one2"}, 401),
    ({"authorization": "Bearer sk-one, Bearer sk-one"}, 401),
    ({"authorization": "Bearer SK-ONE"}, 401),
    ({"x-api-key": ""}, 401),
])  # fmt: skip
def test_keys(headers: dict[str, str], status: int) -> None:
    assert verdict(KEYS, headers) == status


def test_without_keys_any_or_none_will_do() -> None:
    assert verdict(OPEN) == verdict(OPEN, {"authorization": "Bearer whatever"}) == 200


def test_what_is_open_needs_no_key() -> None:
    assert verdict(KEYS, is_open=True) == 200
    assert verdict(KEYS, is_open=False) == 401


def test_a_missing_key_is_told_in_openais_words() -> None:
    with pytest.raises(ApiError) as raised:
        check(KEYS, "POST", {"authorization": "Bearer wrong"}, "localhost")
    error = raised.value
    assert (error.status, error.type, error.code) == (401, "invalid_request_error", "invalid_api_key")
    assert ("WWW-Authenticate", "Bearer") in error.headers
    assert "wrong" not in error.message


@pytest.mark.parametrize(("policy", "authority", "status"), [
    (OPEN, "localhost", 200),
    (OPEN, "LocalHost:1", 200),
    (OPEN, "127.0.0.1:8080", 200),
    (OPEN, "127.1.2.3", 200),
    (OPEN, "[::1]", 200),
    (OPEN, "[::1]:8080", 200),
    (OPEN, None, 200),
    (OPEN, "evil.example", 403),
    (OPEN, "localhost.evil.example", 403),
    (OPEN, "127.0.0.1.evil.example", 403),
    (OPEN, "192.168.0.7", 403),
    (OPEN, "[::2]", 403),
    (OPEN, "0.0.0.0", 403),
    (AccessPolicy(allowed_hosts=("mac.local",)), "mac.local:8080", 200),
    (AccessPolicy(allowed_hosts=("mac.local",)), "localhost", 200),
    (AccessPolicy(allowed_hosts=("mac.local",)), "evil.example", 403),
    (AccessPolicy(allowed_hosts=("mac.local:8080",)), "mac.local:8081", 403),
    (AccessPolicy(allowed_hosts=("*",)), "evil.example", 200),
    (AccessPolicy(loopback_only=False), "evil.example", 200),
    (AccessPolicy(loopback_only=False, allowed_hosts=("Mac.local",)), "mac.LOCAL", 200),
    (AccessPolicy(loopback_only=False, allowed_hosts=("mac.local",)), "localhost", 403),
])  # fmt: skip
def test_hosts(policy: AccessPolicy, authority: str | None, status: int) -> None:
    assert verdict(policy, authority=authority) == status


@pytest.mark.parametrize(("policy", "origin", "status"), [
    (OPEN, "https://app.example", 403),
    (OPEN, "null", 403),
    (OPEN, "", 403),
    (OPEN, "http://localhost:8080", 200),
    (OPEN, "http://LOCALHOST:8080", 200),
    (OPEN, "http://localhost", 403),
    (OPEN, "http://localhost:8080.evil.example", 403),
    (PAGES, "https://app.example", 200),
    (PAGES, "http://app.example", 403),
    (PAGES, "https://app.example:444", 403),
    (PAGES, "https://app.example.evil.example", 403),
    (ANY_PAGE, "https://whatever.example", 200),
    (ANY_PAGE, "null", 200),
    (ANY_PAGE, "what is this", 403),
    (ANY_PAGE, "http://a b", 403),
    *[(ANY_PAGE, origin, 200) for origin in APPS],
    *[(PAGES, origin, 403) for origin in APPS],
    (EXTENSIONS, "chrome-extension://aapbdbdomjkkjkaonfhkkikfgjllcleb", 200),
    (EXTENSIONS, "Chrome-Extension://abc", 200),
    (EXTENSIONS, "file://", 200),
    (EXTENSIONS, "moz-extension://abc", 403),
    (EXTENSIONS, "https://chrome-extension", 403),
    (EXTENSIONS, "chrome-extension://*", 200),
    (EXTENSIONS, "null", 403),
])  # fmt: skip
def test_origins(policy: AccessPolicy, origin: str, status: int) -> None:
    assert verdict(policy, {"origin": origin}) == status


@pytest.mark.parametrize(("origin", "authority"), [
    ("http://localhost", "localhost"),
    ("http://localhost", "localhost:80"),
    ("https://localhost", "localhost:443"),
    ("https://localhost:443", "localhost"),
    ("http://[::1]:8080", "[::1]:8080"),
    ("http://[::1]", "[::1]"),
])  # fmt: skip
def test_same_origin_knows_the_default_ports(origin: str, authority: str) -> None:
    assert verdict(OPEN, {"origin": origin}, authority=authority) == 200


# A page is served at /, and its own origin passes. Without a key, and where every host name is taken, somebody else's
# page could have that origin: its name is pointed at this server after it was loaded (DNS rebinding).
OPEN_BIND = AccessPolicy(loopback_only=False)


@pytest.mark.parametrize(("policy", "name", "status"), [
    (OPEN, "localhost:8080", 200),
    (OPEN, "evil.example:8080", 403),
    (OPEN_BIND, "192.168.0.7:8080", 200),
    (OPEN_BIND, "[fd00::7]:8080", 200),
    (OPEN_BIND, "mac.local:8080", 200),
    (OPEN_BIND, "MAC.Local", 200),
    (OPEN_BIND, "studio:8080", 200),
    (OPEN_BIND, "localhost", 200),
    (OPEN_BIND, "evil.example:8080", 403),
    (OPEN_BIND, "evil.example", 403),
    (OPEN_BIND, "192.168.0.7.evil.example", 403),
    (OPEN_BIND, "mac.local.evil.example", 403),
    (OPEN_BIND, "evil.", 403),
    (OPEN_BIND, "1.2.3", 403),
    (AccessPolicy(loopback_only=False, allowed_hosts=("ai.example",)), "ai.example", 200),
    (AccessPolicy(loopback_only=False, allowed_hosts=("ai.example",)), "evil.example", 403),
    (AccessPolicy(loopback_only=False, allowed_hosts=("*",)), "evil.example", 403),
    (AccessPolicy(loopback_only=True, allowed_hosts=("*",)), "evil.example", 403),
    (AccessPolicy(loopback_only=True, allowed_hosts=("*",)), "localhost", 200),
])  # fmt: skip
def test_the_own_page_passes_but_under_no_name_that_can_be_rebound(
    policy: AccessPolicy, name: str, status: int
) -> None:
    assert verdict(policy, {"origin": f"http://{name}"}, authority=name) == status


def test_with_a_key_a_rebound_page_may_ask_since_it_has_none() -> None:
    policy = AccessPolicy(api_keys=("k",), loopback_only=False)
    headers = {"origin": "http://ai.example"}
    assert verdict(policy, headers, authority="ai.example") == 401
    assert verdict(policy, headers | {"authorization": "Bearer k"}, authority="ai.example") == 200


@pytest.mark.parametrize(("origin", "authority"), [
    ("http://192.168.0.7:8080", "192.168.0.7:8081"),
    ("http://192.168.0.7:8080", "192.168.0.8:8080"),
    ("http://192.168.0.7", "192.168.0.7:8080"),
    ("null", "192.168.0.7:8080"),
    ("http://user@192.168.0.7:8080", "192.168.0.7:8080"),
    ("http://192.168.0.7:8080/", "192.168.0.7:8080"),
    ("http://192.168.0.7:8080, http://evil.example", "192.168.0.7:8080"),
    ("file://192.168.0.7:8080", "192.168.0.7:8080"),
    ("http://192.168.0.7:8080", None),
])  # fmt: skip
def test_another_origin_is_not_the_own_one(origin: str, authority: str | None) -> None:
    assert verdict(OPEN_BIND, {"origin": origin}, authority=authority) == 403


def test_a_page_under_an_unknown_name_is_told_the_flag() -> None:
    with pytest.raises(ApiError, match="--allowed-hosts") as raised:
        check(OPEN_BIND, "POST", {"origin": "http://ai.example"}, "ai.example")
    assert "ai.example" not in raised.value.message


def test_cors_is_for_allowed_origins_alone() -> None:
    assert ("Access-Control-Allow-Origin", "https://app.example") in cors_fields(
        PAGES, {"origin": "https://app.example"}
    )
    assert ("Vary", "Origin") in cors_fields(PAGES, {"origin": "https://app.example"})
    assert cors_fields(PAGES, {"origin": "http://localhost:8080"}) == ()
    assert cors_fields(PAGES, {}) == ()


def test_a_preflight_needs_no_key_but_an_allowed_origin() -> None:
    policy = AccessPolicy(api_keys=("k",), allowed_origins=("https://app.example",))
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert is_preflight("OPTIONS", headers)
    assert verdict(policy, headers, method="OPTIONS") == 200
    assert verdict(policy, headers, method="POST") == 401
    assert verdict(policy, headers | {"origin": "https://evil.example"}, method="OPTIONS") == 403
    assert verdict(policy, {}, method="OPTIONS") == 401


def test_a_preflight_names_the_fields_asked_for() -> None:
    asked = {
        "origin": "https://app.example",
        "access-control-request-headers": "X-Stainless-OS, authorization,a b,\u00e9,",
    }
    fields = dict(preflight_fields(PAGES, asked, ["GET", "POST"]))
    assert fields["Access-Control-Allow-Methods"] == "GET, POST"
    assert fields["Access-Control-Allow-Headers"] == "authorization, content-type, x-stainless-os"
    assert int(fields["Access-Control-Max-Age"]) > 0
    assert preflight_fields(PAGES, {"origin": "https://evil.example"}, ["GET"]) == ()


def test_a_client_is_told_by_the_key_that_let_it_in() -> None:
    policy = AccessPolicy(api_keys=("one", "tw\u00f6"))
    one = client(policy, {"authorization": "Bearer one"})
    assert one == client(policy, {"x-api-key": "one"})
    assert one == client(policy, {"authorization": "Bearer wrong", "x-api-key": "one"})
    two = client(policy, {"x-api-key": "tw\u00f6".encode().decode("latin-1")})
    assert len({one, two, client(policy, {"x-api-key": "wrong"})}) == 3
    assert "one" not in one
    assert client(policy, {}) == client(policy, {"x-api-key": "wrong"}) == ""
    assert client(AccessPolicy(), {"authorization": "Bearer one"}) == ""
