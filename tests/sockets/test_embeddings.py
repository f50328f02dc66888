"""POST /v1/embeddings on the fake backend, whose vectors are known."""

import base64
import json
import struct
import threading

import pytest

from mlx_serve.api import embeddings
from mlx_serve.engine.catalog import Catalog, ModelEntry
from mlx_serve.metrics import Metrics
from mlx_serve.testing import ENTRY, VOCAB_SIZE, WIDTH, FakeBackend, vector_of
from tests.sockets.apikit import serving
from tests.waiting import DEADLINE_S, until


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def post(server, value, **fields):
    return server.request("POST", "/v1/embeddings", {"input": value, **fields})


def vectors(server, value, **fields):
    status, _, answer = post(server, value, **fields)
    assert status == 200, answer
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["embedding"] for item in answer["data"]]


def near(numbers):
    return pytest.approx(numbers, rel=1e-6)


def test_the_whole_answer(server):
    status, headers, answer = post(server, "ab", model="fake", user="u", encoding_format=None)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": near(vector_of(b"ab"))}],
        "model": "fake",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


@pytest.mark.parametrize(("value", "inputs"), [
    ("ab", [b"ab"]),
    (["ab"], [b"ab"]),
    (["ab", "c", "ab"], [b"ab", b"c", b"ab"]),
    ([97, 98], [b"ab"]),
    ([[97, 98]], [b"ab"]),
    ([[97, 98], [99]], [b"ab", b"c"]),
])  # fmt: skip
def test_each_form_of_input(server, value, inputs):
    assert vectors(server, value) == [near(vector_of(one)) for one in inputs]
    usage = post(server, value)[2]["usage"]
    assert usage == {"prompt_tokens": len(b"".join(inputs)), "total_tokens": len(b"".join(inputs))}


def test_base64_is_the_same_numbers_in_four_bytes_each(server):
    plain = vectors(server, ["ab", "ccc"])
    encoded = vectors(server, ["ab", "ccc"], encoding_format="base64")
    raw = [base64.b64decode(text, validate=True) for text in encoded]
    assert [len(one) for one in raw] == [4 * WIDTH] * 2
    # The numbers in the JSON have all digits that four bytes hold.
    assert [b"".join(struct.pack("<f", number) for number in vector) for vector in plain] == raw


def test_fewer_dimensions_are_the_first_ones_and_of_length_1_again(server):
    (whole,), (short,) = vectors(server, "abc"), vectors(server, "abc", dimensions=3)
    length = sum(number**2 for number in whole[:3]) ** 0.5
    assert short == near([number / length for number in whole[:3]])
    assert vectors(server, "abc", dimensions=WIDTH) == [whole]


@pytest.mark.parametrize(("body", "param", "word"), [
    ({}, "input", "Missing"),
    ({"input": None}, "input", "Missing"),
    ({"input": 5}, "input", "Must be a string"),
    ({"input": {}}, "input", "Must be a string"),
    ({"input": ""}, "input", "Must not be empty"),
    ({"input": []}, "input", "not empty"),
    ({"input": ["a", ""]}, "input", "Input 1 is empty"),
    ({"input": [[97], []]}, "input", "Input 1 is empty"),
    ({"input": [[]]}, "input", "Input 0 is empty"),
    ({"input": ["a", 1]}, "input", "only"),
    ({"input": ["a", [97]]}, "input", "only"),
    ({"input": [True]}, "input", "only"),
    ({"input": [[1.5]]}, "input", "only"),
    ({"input": "\ud800"}, "input", "surrogate"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"input": [VOCAB_SIZE]}, "input", "vocabulary"),
    ({"input": [[97], [-1]]}, "input[1]", "vocabulary"),
    ({"input": [[97], [10**30]]}, "input[1]", "vocabulary"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
    ({"input": "a", "encoding_format": 5}, "encoding_format", "float"),
    ({"input": "a", "dimensions": 0}, "dimensions", "greater"),
    ({"input": "a", "dimensions": "3"}, "dimensions", "integer"),
    ({"input": "a", "dimensions": WIDTH + 1}, "dimensions", str(WIDTH)),
])  # fmt: skip
def test_a_bad_field_is_named(server, body, param, word):
    status, _, answer = server.request("POST", "/v1/embeddings", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"].startswith(param)
    assert word in answer["error"]["message"]


@pytest.mark.parametrize(("value", "param"), [
    ("x" * (ENTRY.context_tokens + 1), "input"),
    ("x" * 100_000, "input"),
    ([97] * (ENTRY.context_tokens + 1), "input"),
    (["a", "b", "x" * (ENTRY.context_tokens + 1)], "input[2]"),
    ([[97], [97] * (ENTRY.context_tokens + 1)], "input[1]"),
])  # fmt: skip
def test_an_input_over_the_context_is_named(server, value, param):
    status, _, answer = post(server, value)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["code"] == "context_length_exceeded"
    assert f"your {param} resulted in" in answer["error"]["message"]


def test_an_input_may_fill_the_context(server):
    assert post(server, "x" * ENTRY.context_tokens)[2]["usage"]["total_tokens"] == ENTRY.context_tokens


@pytest.mark.parametrize("entry", [ENTRY, ModelEntry("fake", ENTRY.path, ENTRY.created, None, ENTRY.vocab_size)])
def test_all_inputs_together_have_a_bound(entry, monkeypatch):
    monkeypatch.setattr(embeddings, "MAX_TOTAL_TOKENS", 10)
    with serving(catalog=Catalog(entry, ["fake"])) as server:
        assert len(vectors(server, ["aaaaa", "bbbbb"])) == 2
        for value in (["aaaaa", "bbbbb", "c"], [[97] * 5, [97] * 6]):
            status, _, answer = post(server, value)
            assert (status, answer["error"]["param"]) == (400, "input")
            assert "At most 10 tokens" in answer["error"]["message"]


def test_an_unknown_model_is_not_found(server):
    status, _, answer = post(server, "a", model="other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_the_other_methods_are_not_allowed(server):
    status, headers, _ = server.request("GET", "/v1/embeddings")
    assert (status, headers["Allow"]) == (405, "OPTIONS, POST")


def test_many_inputs_take_one_place_in_the_queue():
    with serving(max_queue=1) as server:
        assert len(vectors(server, ["a"] * 2048)) == 2048


def test_chat_goes_on_beside_it():
    begun, asked = threading.Event(), threading.Event()

    def on_step(jobs):
        if any(job.inputs for job in jobs):
            begun.set()
            assert asked.wait(DEADLINE_S)

    with serving(lambda _: FakeBackend(on_step=on_step)) as server:
        found = []
        embedding = threading.Thread(target=lambda: found.extend(vectors(server, ["ab"] * 50)))
        embedding.start()
        assert begun.wait(DEADLINE_S)
        answers = []
        chatting = threading.Thread(target=lambda: answers.append(server.complete("hello")))
        chatting.start()
        until(lambda: server.scheduler.health().waiting == 1, "a chat beside the embedding")
        asked.set()
        chatting.join(DEADLINE_S)
        embedding.join(DEADLINE_S)
        assert answers[0][2]["choices"][0]["text"] == "hello"
        assert found == [near(vector_of(b"ab"))] * 50


def test_a_client_that_leaves_frees_its_place():
    go_on, begun = threading.Event(), threading.Event()

    def on_step(jobs):
        begun.set()
        assert go_on.wait(DEADLINE_S)

    metrics = Metrics()
    # A step waits until the client has gone, so its thousand vectors can't be done before.
    with serving(lambda _: FakeBackend(on_step=on_step), metrics=metrics) as server:
        connection = server.connection()
        connection.request("POST", "/v1/embeddings", json.dumps({"input": ["a"] * 1000}))
        assert begun.wait(DEADLINE_S)
        connection.close()
        until(lambda: metrics.finished.series() == {("fake", "abort"): 1}, "the end of what nobody waits for")
        go_on.set()
        until(lambda: server.scheduler.health().running == 0, "a free place")


def test_a_step_that_fails_is_a_500_and_the_next_request_works():
    faults = [RuntimeError("out of memory")]

    def on_step(jobs):
        if faults and jobs:
            raise faults.pop()

    with serving(lambda _: FakeBackend(on_step=on_step)) as server:
        status, _, answer = post(server, "ab")
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert vectors(server, "ab") == [near(vector_of(b"ab"))]


def test_numbers_that_are_none_are_a_500(monkeypatch, caplog):
    monkeypatch.setattr("mlx_serve.testing.vector_of", lambda tokens, dimensions: [float("nan")] * WIDTH)
    with serving() as server:
        for encoding in ("float", "base64"):
            status, _, answer = post(server, "ab", encoding_format=encoding)
            assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "NaN" in caplog.text


def test_it_is_counted():
    metrics = Metrics()
    with serving(metrics=metrics) as server:
        vectors(server, ["ab", "c"])
        until(lambda: not metrics.running(), "the end of the request")
    assert metrics.prompt_tokens.series() == {("fake",): 3}
    assert metrics.finished.series() == {("fake", "stop"): 1}
    assert metrics.generation_tokens.total() == 0
    # It looks for no prefix, and so is no miss.
    assert metrics.prefix_queries.total() == 0
