"""Paths as the table of routes has them. Knows no endpoint."""

from __future__ import annotations


def route_path(path: str) -> str:
    """A request's path without ``/v1`` before it and without the slashes that joining URLs leaves.

    A base URL that ends in a slash makes ``/v1//models``, a client that adds one makes ``/v1/models/``.
    """
    plain = "/" + path.strip("/")
    return "/" + plain.removeprefix("/v1").lstrip("/") if plain.startswith("/v1/") else plain
