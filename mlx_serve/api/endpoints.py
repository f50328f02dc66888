"""The routes, and what each does. To add an endpoint, add a function and a row in ``ROUTES``.

``Api`` is the application that the wire layer calls: a RawRequest in, a Response out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mlx_serve.api import embeddings, errors, models
from mlx_serve.api.anthropic import endpoints as anthropic
from mlx_serve.api.cost import check_values
from mlx_serve.api.openai import endpoints as openai
from mlx_serve.api.responses import endpoints as responses
from mlx_serve.api.routes import route_path
from mlx_serve.api.serving import (
    Services,
)
from mlx_serve.api.shapes import json_response
from mlx_serve.api.status import health, stats
from mlx_serve.values import ApiError, RawRequest, Response
from mlx_serve.wire.request_log import RequestLog


class Api:
    """The API as a function from request to response."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def methods(self, path: str) -> frozenset[str]:
        """The methods that a path has; none: there is no such route."""
        if path in self._services.page:
            return frozenset({"GET"})
        return frozenset(method for method, route in ROUTES if _matches(route, path))

    def takes_body(self, method: str, path: str) -> bool:
        """Whether this method of the route needs a request body."""
        return not any(method == m and _matches(route, path) for m, route in BODILESS)

    def __call__(self, request: RawRequest) -> Response:
        """Answer a request. Raises ApiError, and ClientGone when nobody waits any more."""
        if request.path in self._services.page:
            return self._services.page[request.path]
        endpoint = next(e for (m, route), e in ROUTES.items() if m == request.method and _matches(route, request.path))
        check_values(request.body, self._services.max_json_values)
        try:
            return endpoint(self._services, replace(request, path=route_path(request.path)))
        except RecursionError:
            # Whatever it was that went down into the request's JSON: checking, the chat template, writing it out.
            raise ApiError(400, "The request is nested too deeply.") from None

    def error(self, error: ApiError, path: str, request_id: str) -> Response:
        """The reply that an error becomes, in the words of the route's clients."""
        return errors.as_response(error, path, request_id)

    def observe(self, entry: RequestLog) -> None:
        """Count a request that has ended, however it did."""
        stats.observe(self._services.metrics, entry, self._route(entry.path))

    def _route(self, path: str) -> str:
        # A name out of our tables: a client can ask for any number of paths.
        if path in self._services.page:
            return path
        return next((route for _, route in ROUTES if _matches(route, path)), "other")


def _matches(route: str, path: str) -> bool:
    # A route that ends in "/" takes the rest of the path as a name, which may hold "/" itself; {id} holds none.
    plain = route_path(path)
    start, is_open, end = route.partition("{id}")
    if is_open:
        middle = plain[len(start) : len(plain) - len(end)]
        return plain == start + middle + end and middle != "" and "/" not in middle
    if route == "/":
        return path == "/"
    return plain.startswith(route) and len(plain) > len(route) if route.endswith("/") else plain == route


def root(services: Services, request: RawRequest) -> Response:
    """GET /: Claude Code asks for it with HEAD, to see whether anybody is there."""
    return json_response({"name": "mlx-serve"})


ROUTES: dict[tuple[str, str], Callable[[Services, RawRequest], Response]] = {
    **openai.ROUTES,
    ("POST", "/embeddings"): embeddings.embeddings,
    ("POST", "/responses"): responses.create,
    ("POST", "/responses/input_tokens"): responses.input_tokens,
    ("POST", "/responses/compact"): responses.compact,
    ("GET", "/responses/{id}"): responses.get,
    ("DELETE", "/responses/{id}"): responses.delete,
    ("GET", "/responses/{id}/input_items"): responses.input_items,
    ("POST", "/responses/{id}/cancel"): responses.cancel,
    ("POST", "/messages"): anthropic.messages,
    ("POST", "/messages/count_tokens"): anthropic.count_tokens,
    ("GET", "/models"): models.list_models,
    ("GET", "/models/"): models.get_model,
    ("GET", "/health"): health.health,
    ("GET", "/ready"): health.ready,
    ("GET", "/stats"): health.live_stats,
    ("GET", "/metrics"): health.prometheus_metrics,
    ("GET", "/"): root,
}

# Routes of methods that send content, which need none.
BODILESS = frozenset({("POST", "/responses/{id}/cancel")})
