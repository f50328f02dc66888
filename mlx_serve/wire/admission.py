"""Whether a request is accepted, judged only by its head: before its body is read, and before 100 Continue.

Functions over values; must not know sockets or bodies.
"""

from __future__ import annotations

import re

from mlx_serve.values import ApiError, Response
from mlx_serve.wire import access
from mlx_serve.wire.framing import Head, Refusal
from mlx_serve.wire.server_options import Target

# Case-sensitive (RFC 9110 9.1). TRACE is missing because it would return fields that a proxy added, such as keys, to a
# page.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_WITH_CONTENT = frozenset({"POST", "PUT", "PATCH"})

# Media types that are certainly a mistake. There is no list of right types, because clients send JSON as form data
# (curl --data-binary), as text, and without a type.
_NOT_JSON = re.compile(
    r"(?:multipart|image|audio|video|font|message)/.*|text/(?!plain$|json$).*|.*[/+]xml|application/(?:zip|gzip|pdf)"
)


def admit(target: Target, policy: access.AccessPolicy, head: Head, draining: bool) -> Response | None:
    """None: read the body and run the request. A Response: the answer. Raises ApiError or Refusal to refuse.

    The order of the checks decides which error is sent: a client that may not send requests learns nothing about
    routes.
    """
    # 1. Scheme, Host, Origin, key.
    access.check_scheme(policy, head.scheme)
    access.check(policy, head.method, head.headers, head.authority, is_open=target.is_open)
    # 2. Shutting down. Health checks are still answered, so that they can say so.
    if draining and not target.is_open:
        raise unavailable("the server is shutting down", code="draining")
    # 3. Methods that no route has (RFC 9110 15.6.2).
    if head.method not in _METHODS:
        raise ApiError(501, "this method is not implemented", code="method_not_supported")
    # 4. The route; "*" is the whole server (RFC 9110 9.3.7).
    methods = _methods(target, head.path)
    if not methods:
        raise ApiError(404, "no such route")
    if head.method == "OPTIONS":
        return _options(policy, head, methods)
    # 5. The route's methods.
    if head.method not in methods:
        allow = (("Allow", ", ".join(methods)),)
        raise ApiError(405, "this route does not have this method", code="method_not_supported", headers=allow)
    # 6. Whether a body is there if one is needed, and its type.
    if length_is_missing(head) and head.method not in target.bodiless:
        raise Refusal(411, "a Content-Length or Transfer-Encoding field is required (RFC 9110 15.5.12)")
    _check_content(head)
    return None


def length_is_missing(head: Head) -> bool:
    """Whether a method that sends content does not say where the content ends.

    By RFC 9112 6.3 there is no content then, and `curl -X POST` means that. A broken client may send a body anyway, and
    that body must not be read as its next request.
    """
    return head.body is None and head.method in _WITH_CONTENT


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, headers=(("Retry-After", "5"),))


def check_expectation(head: Head) -> None:
    """RFC 9110 10.1.1: any expectation except 100-continue gets 417."""
    if head.expect not in (None, "100-continue"):
        raise ApiError(417, "100-continue is the only expectation that is supported (RFC 9110 10.1.1)")


def _methods(target: Target, path: str) -> list[str]:
    known = set(_METHODS) if path == "*" else set(target.methods)
    if not known:
        return []
    # RFC 9110 9.1: every route with GET has HEAD too.
    return sorted(known | {"OPTIONS"} | ({"HEAD"} if "GET" in known else set()))


def _options(policy: access.AccessPolicy, head: Head, methods: list[str]) -> Response:
    fields: access.Fields = (("Allow", ", ".join(methods)),)
    if access.is_preflight(head.method, head.headers):
        fields += access.preflight_fields(policy, head.headers, methods)
    return Response(204, b"", headers=fields)


def _check_content(head: Head) -> None:
    if head.body in (None, 0):
        return
    media_type = head.headers.get("content-type", "").partition(";")[0].strip(" \t").lower()
    if _NOT_JSON.fullmatch(media_type):
        raise ApiError(415, "the request body must be JSON", code="unsupported_media_type")
    if head.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        # RFC 9110 15.5.16: the answer names the accepted codings.
        accepted = (("Accept-Encoding", "identity"),)
        message, code = "the request body must not be compressed", "unsupported_content_encoding"
        raise ApiError(415, message, code=code, headers=accepted)
