"""Who may ask: API keys, browser origins (CORS), host names.

Functions over a policy and a request's headers; each answers with header fields or raises the ApiError to send.
Must not know: sockets, routes, bodies. Nothing the client sent is repeated in a message.
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

# A page's own server has one of these origins; extensions and apps have others (chrome-extension://, app://, file://).
_WEB_ORIGIN = re.compile(r"(https?)://([A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://[A-Za-z0-9._~:\[\]-]*")
_BEARER = re.compile(r"bearer +(.+)", re.IGNORECASE)
_FIELD_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_REQUESTED_FIELDS = 50
_PREFLIGHT_MAX_AGE_S = 600


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Empty tuples: no key needed, no foreign origin let in, every host name taken (unless ``loopback_only``).

    ``allowed_origins`` and ``allowed_hosts`` may be ("*",); an origin may be ``scheme://*``. A host without a port
    stands for every port. ``is_tls``: connections are secured.
    """

    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    loopback_only: bool = True
    is_tls: bool = False


def check_scheme(policy: AccessPolicy, scheme: str) -> None:
    """RFC 9110 7.4: an https resource must be refused on a connection that is not secured."""
    if scheme == "https" and not policy.is_tls:
        raise ApiError(421, "this connection is not secured: an https target is not served on it (RFC 9110 7.4)")


def check(
    policy: AccessPolicy, method: str, headers: Mapping[str, str], authority: str | None, *, is_open: bool = False
) -> None:
    """Host, then origin, then key, unless the target ``is_open``.

    A preflight carries no key: the browser sends it on its own (Fetch 3.2.2).
    """
    if not _host_allowed(policy, authority):
        raise ApiError(403, "this host name is not allowed here", code="host_not_allowed")
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
    """A digest of the key that let the request in, which tells clients apart; "" when no key is needed."""
    fitting = [raw for raw, fits in _given_keys(policy, headers) if fits]
    return hashlib.sha256(b"mlx-serve client\0" + fitting[0]).hexdigest() if fitting else ""


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def cors_fields(policy: AccessPolicy, headers: Mapping[str, str]) -> Fields:
    """What lets the page that asked read the reply; nothing for an origin that is not on the list."""
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
    """Those asked for by name: "*" would not cover Authorization (Fetch 4.9)."""
    asked = headers.get("access-control-request-headers", "").lower().split(",")[:_MAX_REQUESTED_FIELDS]
    names = [name for part in asked if _FIELD_NAME.fullmatch(name := part.strip(" \t"))]
    return list(dict.fromkeys(["authorization", "content-type", *names]))


def _origin_allowed(policy: AccessPolicy, origin: str) -> bool:
    if origin in policy.allowed_origins:
        return True
    # Only what has the form of an origin is repeated in the reply.
    match = _ORIGIN.fullmatch(origin)
    if "*" in policy.allowed_origins:
        return origin == "null" or match is not None
    return match is not None and f"{match[1].lower()}://*" in policy.allowed_origins


def _check_own_page(policy: AccessPolicy, origin: str, authority: str | None) -> None:
    """Raises ApiError 403 unless the page that asks came from this server."""
    if not _same_origin(origin, authority):
        raise ApiError(403, "this origin is not allowed here", code="origin_not_allowed")
    if _rebindable(policy, authority or ""):
        text = "this origin is not allowed here: the server does not know its own name (--allowed-hosts)"
        raise ApiError(403, text, code="origin_not_allowed")


def _rebindable(policy: AccessPolicy, authority: str) -> bool:
    """Whether somebody else's page could have this name, pointed here: any host is taken, and no key is needed.

    Not an address, nor a name that only the local network gives.
    """
    hosts_are_checked = (policy.loopback_only or policy.allowed_hosts) and "*" not in policy.allowed_hosts
    if hosts_are_checked or policy.api_keys:
        return False
    host = authority.lower().removesuffix(_port(authority))
    return "." in host and not host.endswith(".local") and not _is_address(host)


def _same_origin(origin: str, authority: str | None) -> bool:
    """Whether the page came from this server itself. Whether that name may be ours is the host check's affair."""
    match = _WEB_ORIGIN.fullmatch(origin)
    if match is None or authority is None:
        return False
    scheme, host, port = match.groups()
    default = _DEFAULT_PORTS[scheme]
    return (host + (port or default)).lower() == (authority + ("" if _port(authority) else default)).lower()


def _host_allowed(policy: AccessPolicy, authority: str | None) -> bool:
    """Against DNS rebinding: a page whose name an attacker points at 127.0.0.1 is "same-origin", but has his name.

    No browser leaves the host out, so an HTTP/1.0 client without one may pass.
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
    """The keys that a request carries, and whether each is one of ours.

    All keys are compared, each in constant time: neither which key nor how much of it fitted shows in the time.
    """
    bearer = _BEARER.fullmatch(headers.get("authorization", ""))
    # Header text is latin-1, byte for byte; a key is configured as text and travels as UTF-8.
    given = [text.encode("latin-1") for text in (bearer[1] if bearer else None, headers.get("x-api-key")) if text]
    return [(raw, sum(hmac.compare_digest(raw, key.encode()) for key in policy.api_keys) > 0) for raw in given]
