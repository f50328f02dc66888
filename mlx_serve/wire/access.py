"""Who may send requests: API keys, browser origins (CORS), host names.

Functions over a policy and a request's headers; each returns header fields, or raises the ApiError to send.
Must not know: sockets, routes, bodies. No message repeats what the client sent.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from mlx_serve.values import ApiError

Fields = tuple[tuple[str, str], ...]

# A page's own server has an origin of one of these schemes; extensions and apps have others (app, file).
_WEB_ORIGIN = re.compile(r"(https?)://([A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://[A-Za-z0-9._~:\[\]-]*")
_BEARER = re.compile(r"bearer +(.+)", re.IGNORECASE)
_FIELD_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_REQUESTED_FIELDS = 50
_PREFLIGHT_MAX_AGE_S = 600


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Empty tuples: no key is needed, no foreign origin is allowed, every host is accepted (unless ``loopback_only``).

    ``allowed_origins`` and ``allowed_hosts`` may be ("*",); an origin may be ``scheme://*``. A host without a port
    allows every port. ``is_tls``: the server's connections use TLS.
    """

    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    loopback_only: bool = True
    is_tls: bool = False


def check_scheme(policy: AccessPolicy, scheme: str) -> None:
    """RFC 9110 7.4: a request for an https resource must be refused on a connection without TLS."""
    if scheme == "https" and not policy.is_tls:
        raise ApiError(421, "this connection is not secured: an https target is not served on it (RFC 9110 7.4)")


def check(
    policy: AccessPolicy, method: str, headers: Mapping[str, str], authority: str | None, *, is_open: bool = False
) -> None:
    """Checks host, then origin, then key; an open target (``is_open``) needs no key.

    A preflight has no key: the browser makes it itself (Fetch 3.2.2).
    """
    if not _host_allowed(policy, authority):
        raise ApiError(
            403, "this host name is not allowed here: --allowed-hosts NAME allows it", code="host_not_allowed"
        )
    origin = headers.get("origin")
    if origin is not None and not _origin_allowed(policy, origin):
        _check_own_page(policy, origin, authority)
    if not is_open and not is_preflight(method, headers) and not _key_given(policy, headers):
        raise ApiError(
            401,
            "Incorrect API key provided: a valid one is required, as Authorization: Bearer KEY or x-api-key: KEY.",
            code="invalid_api_key",
            headers=(("WWW-Authenticate", "Bearer"),),
        )


def client(policy: AccessPolicy, headers: Mapping[str, str]) -> str:
    """A digest of the request's key, which identifies the client; "" when no key is needed."""
    fitting = [raw for raw, fits in _given_keys(policy, headers) if fits]
    return hashlib.sha256(b"mlx-serve client\0" + fitting[0]).hexdigest() if fitting else ""


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def cors_fields(policy: AccessPolicy, headers: Mapping[str, str]) -> Fields:
    """Fields that allow the page to read the reply; none for an origin that is not on the list."""
    origin = headers.get("origin")
    if origin is None or not _origin_allowed(policy, origin):
        return ()
    return (
        ("Access-Control-Allow-Origin", origin),
        ("Access-Control-Expose-Headers", "x-request-id, request-id, retry-after"),
        ("Vary", "Origin"),
    )


def preflight_fields(policy: AccessPolicy, headers: Mapping[str, str], methods: Iterable[str]) -> Fields:
    origin = headers.get("origin")
    if origin is None or not _origin_allowed(policy, origin):
        return ()
    return (
        ("Access-Control-Allow-Methods", ", ".join(methods)),
        ("Access-Control-Allow-Headers", ", ".join(_allowed_fields(headers))),
        ("Access-Control-Max-Age", str(_PREFLIGHT_MAX_AGE_S)),
    )


def _allowed_fields(headers: Mapping[str, str]) -> list[str]:
    """The requested fields by name, because "*" would not include Authorization (Fetch 4.9)."""
    asked = headers.get("access-control-request-headers", "").lower().split(",")[:_MAX_REQUESTED_FIELDS]
    names = [name for part in asked if _FIELD_NAME.fullmatch(name := part.strip(" \t"))]
    return list(dict.fromkeys(["authorization", "content-type", *names]))


def _origin_allowed(policy: AccessPolicy, origin: str) -> bool:
    if origin in policy.allowed_origins:
        return True
    # The reply repeats the origin only if it has the form of an origin.
    match = _ORIGIN.fullmatch(origin)
    if "*" in policy.allowed_origins:
        return origin == "null" or match is not None
    return match is not None and f"{match[1].lower()}://*" in policy.allowed_origins


def _check_own_page(policy: AccessPolicy, origin: str, authority: str | None) -> None:
    """Raises ApiError 403 unless the page came from this server."""
    if not _same_origin(origin, authority):
        raise ApiError(
            403, "this origin is not allowed here: --allowed-origins ORIGIN allows it", code="origin_not_allowed"
        )
    if _rebindable(policy, authority or ""):
        text = "this origin is not allowed here: the server does not know its own name (--allowed-hosts)"
        raise ApiError(403, text, code="origin_not_allowed")


def _rebindable(policy: AccessPolicy, authority: str) -> bool:
    """Whether a foreign page could have this name and let it point at this server: any host is accepted without a key.

    Never true of an address, or of a name that exists only on the local network.
    """
    hosts_are_checked = (policy.loopback_only or policy.allowed_hosts) and "*" not in policy.allowed_hosts
    if hosts_are_checked or policy.api_keys:
        return False
    host = authority.lower().removesuffix(_port(authority))
    return "." in host and not host.endswith(".local") and not _is_address(host)


def _same_origin(origin: str, authority: str | None) -> bool:
    """Whether the page's origin is the host that it calls. The check of the host decides whether it is allowed."""
    match = _WEB_ORIGIN.fullmatch(origin)
    if match is None or authority is None:
        return False
    scheme, host, port = match.groups()
    default = _DEFAULT_PORTS[scheme]
    return (host + (port or default)).lower() == (authority + ("" if _port(authority) else default)).lower()


def _host_allowed(policy: AccessPolicy, authority: str | None) -> bool:
    """Against DNS rebinding: a page whose name points at 127.0.0.1 is "same-origin", but has the attacker's name.

    Every browser sends a host, so an HTTP/1.0 client without one may pass.
    """
    if authority is None or "*" in policy.allowed_hosts:
        return True
    authority = authority.lower()
    host = authority.removesuffix(_port(authority))
    if {authority, host} & {name.lower() for name in policy.allowed_hosts}:
        return True
    return _loopback(host) if policy.loopback_only else not policy.allowed_hosts


def _port(authority: str) -> str:
    match = re.search(r":[0-9]+$", authority)
    return match[0] if match and not authority.endswith("]") else ""


def _loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host.strip("[]")).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _key_given(policy: AccessPolicy, headers: Mapping[str, str]) -> bool:
    return not policy.api_keys or any(fits for _, fits in _given_keys(policy, headers))


def _given_keys(policy: AccessPolicy, headers: Mapping[str, str]) -> list[tuple[bytes, bool]]:
    """The keys that a request carries, and whether each is valid.

    All keys are compared, each in constant time, so the time tells nothing about a key.
    """
    bearer = _BEARER.fullmatch(headers.get("authorization", ""))
    # Header text is latin-1, one character per byte; a configured key is text, and clients send it as UTF-8.
    given = [text.encode("latin-1") for text in (bearer[1] if bearer else None, headers.get("x-api-key")) if text]
    return [(raw, sum(hmac.compare_digest(raw, key.encode()) for key in policy.api_keys) > 0) for raw in given]
