"""The list of models in pages, as Anthropic's clients ask for it."""

import pytest

from mlx_serve.engine.catalog import Catalog, ModelEntry
from tests.sockets.apikit import serving
from tests.sockets.requiredkeys import check_model

NAMES = ("a", "b", "c", "d")


class Listing(Catalog):
    """Several models without their directories."""

    def entries(self):
        return [ModelEntry(name, None, 0, None, None) for name in NAMES]


@pytest.fixture(scope="module")
def server():
    with serving(catalog=Listing()) as running:
        yield running


def page(server, query: str):
    status, _, body = server.request("GET", f"/v1/models{query}")
    assert status == 200, body
    names = [model["id"] for model in body["data"]]
    for model in body["data"]:
        check_model(model)
    assert (body["first_id"], body["last_id"]) == ((names[0], names[-1]) if names else (None, None))
    return "".join(names), body["has_more"]


@pytest.mark.parametrize(("query", "names", "has_more"), [
    ("", "abcd", False),
    ("?limit=1000", "abcd", False),
    ("?limit=2", "ab", True),
    ("?limit=2&after_id=b", "cd", False),
    ("?limit=1&after_id=b", "c", True),
    ("?after_id=d", "", False),
    ("?limit=2&before_id=d", "bc", True),
    ("?before_id=c", "ab", False),
    ("?before_id=a", "", False),
    ("?unknown=1", "abcd", False),
])  # fmt: skip
def test_pages(server, query, names, has_more):
    assert page(server, query) == (names, has_more)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "limit=%D9%A3", "after_id=x", "before_id=%00"]
)
def test_a_bad_query_names_its_parameter(server, query):
    status, _, body = server.request("GET", f"/v1/models?{query}")
    assert (status, body["error"]["param"]) == (400, query.partition("=")[0])
