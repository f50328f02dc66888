"""The table of routes: what is said of each path, and that a dialect can be taken off it."""

from pathlib import Path

import pytest

from mlx_serve.api.anthropic.errors import ANTHROPIC
from mlx_serve.api.endpoints import ROUTES, Api
from mlx_serve.api.errors import OPENAI
from mlx_serve.api.routes import Route, RouteTable
from mlx_serve.api.serving import Services
from mlx_serve.api.status import page

ROOT = Path(__file__).parents[2]
TABLE = RouteTable(ROUTES)


def targets(**services):
    return Api(Services(None, None, None, "", None, **services)).find


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/models", "/models"),
        ("/models", "/models"),
        ("/v1//models", "/models"),
        ("/v1/models/", "/models"),
        ("/v1/models/a/b", "/models/"),
        ("/v1/responses/resp_1", "/responses/{id}"),
        ("/v1/responses/resp_1/cancel", "/responses/{id}/cancel"),
        ("/", "/"),
    ],
)
def test_a_path_is_resolved(path, route):
    assert {found.path for found in TABLE.resolve(path).routes.values()} == {route}


@pytest.mark.parametrize(
    "path", ["", "//", "/v1", "/v1/", "/v1/v1/models", "/responses/a/b", "/responses//cancel", "/nothing"]
)
def test_a_path_that_leads_nowhere(path):
    assert not TABLE.resolve(path).routes


def test_a_path_without_routes_has_the_dialect_of_the_nearest_route_above_it():
    assert TABLE.resolve("/v1/messages/batches/b_1").dialect is ANTHROPIC
    assert TABLE.resolve("/v1/messages2").dialect is TABLE.resolve("").dialect is OPENAI


def test_of_two_routes_for_one_path_the_first_counts():
    first, second = Route("GET", "/a", None), Route("GET", "/{id}", None)
    assert RouteTable([first, second]).resolve("/a").routes == {"GET": first}
    assert RouteTable([second, first]).resolve("/a").routes == {"GET": second}


def test_what_is_open_without_a_key():
    find = targets(page=page.files())
    open_paths = {"/", "/health", "/v1/health", "/ready", "/v1/ready", *page.files()}
    assert all(find(path).is_open for path in open_paths)
    assert find("/v1//health/").is_open
    assert {route.path for route in ROUTES if route.is_open} == {"/", "/health", "/ready"}
    bare = targets()
    assert bare("/").is_open
    assert not bare("/ui/page.js").is_open
    assert not bare("/ui/page.js").methods


def test_what_is_quiet_in_the_log():
    assert {route.path for route in ROUTES if route.is_quiet} == {"/stats", "/metrics", "/health", "/ready"}
    assert targets()("/v1/stats").is_quiet


def test_what_needs_no_body():
    find = targets()
    assert find("/v1/responses/resp_1/cancel").bodiless == {"POST"}
    assert not find("/v1/responses/compact").bodiless
