"""Whose KV caches a request may share: the scope of its jobs, in every dialect."""

import pytest

from mlx_serve.testing import FakeBackend
from mlx_serve.wire.access import AccessPolicy
from tests.sockets.apikit import serving

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


class Asking:
    """A server that notes the scopes of the jobs that it runs."""

    def __init__(self, running, seen):
        self.running, self.seen = running, seen

    def scope(self, path="/v1/chat/completions", key=None, **fields):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        status, _, body = self.running.request("POST", path, ROUTES[path] | fields, headers)
        assert status == 200, body
        (scope,) = {job.scope for job in self.seen}
        self.seen.clear()
        return scope


@pytest.fixture
def asking():
    """Starts such a server, with keys."""
    contexts = []

    def start(keys=(), **services):
        seen = []
        context = serving(
            lambda _: FakeBackend(on_step=seen.extend), access=AccessPolicy(api_keys=tuple(keys)), **services
        )
        contexts.append(context)
        return Asking(context.__enter__(), seen)

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("path", ROUTES)
def test_each_key_has_a_scope_of_its_own(asking, path):
    server = asking(["one", "two"])
    one, two = server.scope(path, "one"), server.scope(path, "two")
    assert one != two
    assert "" not in (one, two)
    assert "one" not in one
    assert server.scope("/v1/completions", "one") == one


@pytest.mark.parametrize("path", ROUTES)
def test_a_salt_makes_a_scope_of_its_own(asking, path):
    server = asking(["one", "two"])
    plain = server.scope(path, "one")
    salted = server.scope(path, "one", cache_salt="x")
    assert (
        len({plain, salted, server.scope(path, "two", cache_salt="x"), server.scope(path, "one", cache_salt="y")}) == 4
    )
    assert server.scope(path, "one", cache_salt="x") == salted


def test_keys_share_where_the_operator_says_so_and_salts_do_not(asking):
    server = asking(["one", "two"], share_prefixes=True)
    assert server.scope(key="one") == server.scope(key="two") == ""
    salted = server.scope(key="one", cache_salt="x")
    assert salted == server.scope(key="two", cache_salt="x") != ""


def kept_by_one(server):
    """A response that the first key's client made: what the requests that name it or its items get, by key."""
    status, _, made = server.running.request("POST", "/v1/responses", {"input": "hi"}, {"Authorization": "Bearer one"})
    assert status == 200
    path, item = f"/v1/responses/{made['id']}", {"type": "item_reference", "id": made["output"][0]["id"]}
    asked = [
        ("POST", "/v1/responses", {"input": "so?", "previous_response_id": made["id"], "store": False}),
        ("POST", "/v1/responses/input_tokens", {"input": "so?", "previous_response_id": made["id"]}),
        ("POST", "/v1/responses", {"input": [item], "store": False}),
        ("GET", path, None),
        ("GET", f"{path}/input_items", None),
        ("DELETE", path, None),
    ]
    return {
        key: [server.running.request(*request, {"Authorization": f"Bearer {key}"})[0] for request in asked]
        for key in ("two", "one")
    }


def test_a_kept_response_is_there_for_its_own_key_alone(asking):
    assert kept_by_one(asking(["one", "two"])) == {"two": [400, 400, 400, 404, 404, 404], "one": [200] * 6}


def test_kept_responses_are_shared_where_prefixes_are(asking):
    assert kept_by_one(asking(["one", "two"], share_prefixes=True))["two"] == [200] * 6


def test_without_keys_everybody_shares_whatever_he_says_he_is(asking):
    server = asking()
    assert server.scope() == server.scope(key="anything") == ""
    assert server.scope(cache_salt="x") == server.scope(key="anything", cache_salt="x") != ""


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("salt", ["", "x" * 1025, 5])
def test_a_salt_that_is_none_is_a_400(asking, path, salt):
    status, _, body = asking().running.request("POST", path, ROUTES[path] | {"cache_salt": salt})
    assert status == 400
    assert "cache_salt" in str(body)
