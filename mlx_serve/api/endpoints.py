"""The application that the wire layer calls, and the table of all routes.

Each module with endpoints lists its routes in ``ROUTES``. To add an endpoint, add a function and a ``Route`` there. A
dialect is a folder with a module ``endpoints``. Adding or deleting the folder adds or removes the dialect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from mlx_serve import api
from mlx_serve.api import embeddings, errors, models
from mlx_serve.api.cost import check_values
from mlx_serve.api.routes import Resolved, Route, RouteTable
from mlx_serve.api.serving import Services
from mlx_serve.api.shapes import json_response
from mlx_serve.api.status import health, stats
from mlx_serve.values import ApiError, RawRequest, Response
from mlx_serve.wire.request_log import RequestLog
from mlx_serve.wire.server_options import Target


def root(services: Services, request: RawRequest) -> Response:
    """GET /: Claude Code sends HEAD to it, to check that the server is there."""
    return json_response({"name": "mlx-serve"})


def _dialect_routes() -> Iterator[Route]:
    for folder in iter_modules(api.__path__, f"{api.__name__}."):
        modules = iter_modules(import_module(folder.name).__path__) if folder.ispkg else ()
        if any(module.name == "endpoints" for module in modules):
            yield from import_module(f"{folder.name}.endpoints").ROUTES


ROUTES = (
    *_dialect_routes(),
    *embeddings.ROUTES,
    *models.ROUTES,
    *health.ROUTES,
    Route("GET", "/", root, is_open=True),
)


class Api:
    """The API as a function from a path to its handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        stats.begin(services.metrics)
        # The page needs no key: it holds no data, and sends the key with its own requests.
        page = [Route("GET", path, _file, is_open=True) for path in services.page]
        self._table = RouteTable([*page, *ROUTES])

    def find(self, path: str) -> Target:
        """The target of a path."""
        found = self._table.resolve(path)
        routes = found.routes.values()
        return Target(
            name=next((route.path for route in routes), "other"),
            methods=frozenset(found.routes),
            bodiless=frozenset(route.method for route in routes if not route.takes_body),
            is_open=any(route.is_open for route in routes),
            is_quiet=any(route.is_quiet for route in routes),
            answer=lambda request: self._answer(found, request),
            error=lambda error, request_id: errors.as_response(error, found.dialect, request_id),
        )

    def _answer(self, found: Resolved, request: RawRequest) -> Response:
        """Raises ApiError, and ClientGone when the client has left."""
        check_values(request.body, self._services.max_json_values)
        try:
            return found.routes[request.method].handler(self._services, replace(request, path=found.path))
        except RecursionError:
            # Deeply nested JSON can exceed the recursion limit in validation, in the chat template, or in writing.
            raise ApiError(400, "The request is nested too deeply.") from None

    def observe(self, entry: RequestLog) -> None:
        """Count a request that has ended, whatever its outcome."""
        stats.observe(self._services.metrics, entry)


def _file(services: Services, request: RawRequest) -> Response:
    return services.page[request.path]
