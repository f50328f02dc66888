"""Maps paths to routes. A route is a value that holds everything about its path.

The table resolves each request's path once; ``/v1`` is taken off here and nowhere else. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from mlx_serve.api.errors import OPENAI, Dialect
from mlx_serve.api.serving import Services
from mlx_serve.values import RawRequest, Response

Handler: TypeAlias = Callable[[Services, RawRequest], Response]


@dataclass(frozen=True, slots=True)
class Route:
    """``path`` is without ``/v1``. ``{id}`` in it stands for one segment; a last ``/`` for a name that may hold more.

    ``is_open``: answered without a key, and while the server drains. ``is_quiet``: its log lines are for level DEBUG.
    ``takes_body``: of methods that send content, whether the request needs any.
    """

    method: str
    path: str
    handler: Handler
    dialect: Dialect = OPENAI
    is_open: bool = False
    is_quiet: bool = False
    takes_body: bool = True

    def matches(self, path: str) -> bool:
        """Whether it is the route of a path that ``route_path`` returned."""
        start, has_id, end = self.path.partition("{id}")
        if has_id:
            middle = path[len(start) : len(path) - len(end)]
            return path == start + middle + end and middle != "" and "/" not in middle
        if self.path.endswith("/") and self.path != "/":
            return path.startswith(self.path) and len(path) > len(self.path)
        return path == self.path


@dataclass(frozen=True, slots=True)
class Resolved:
    """The routes of one path by their methods; none: nothing is there. ``path`` is as the routes have it.

    A path without routes has the dialect of the nearest route above it.
    """

    path: str
    routes: dict[str, Route]
    dialect: Dialect


class RouteTable:
    """All routes. If several have one method and path, the first is used."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = tuple(routes)

    def resolve(self, path: str) -> Resolved:
        """The routes of a request's path."""
        plain = route_path(path)
        found: dict[str, Route] = {}
        for route in self._routes:
            if route.matches(plain):
                found.setdefault(route.method, route)
        dialect = next(iter(found.values())).dialect if found else self._dialect_above(plain)
        return Resolved(plain, found, dialect)

    def _dialect_above(self, plain: str) -> Dialect:
        above = [route for route in self._routes if plain.startswith(route.path.rstrip("/") + "/")]
        return max(above, key=lambda route: len(route.path)).dialect if above else OPENAI


def route_path(path: str) -> str:
    """A request's path without ``/v1`` before it and without the slashes that joining URLs leaves.

    A base URL that ends in a slash makes ``/v1//models``, a client that adds one makes ``/v1/models/``.
    """
    stripped = path.strip("/")
    if not stripped:
        return path
    plain = "/" + stripped
    return "/" + plain.removeprefix("/v1").lstrip("/") if plain.startswith("/v1/") else plain
