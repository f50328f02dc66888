"""Several models, aliases and adapters as clients see them: the list, and what each model's own settings do."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from mlx_serve.engine.catalog import Catalog
from mlx_serve.testing import ENTRY, FakeBackend, FakeTokenizer, render_lines
from tests.sockets.apikit import serving

SECOND = replace(
    ENTRY,
    name="org/second",
    max_model_len=64,
    template_options={"enable_thinking": True, "b": 2},
    defaults={"temperature": 0.5, "top_k": 7, "max_tokens": 3, "repetition_penalty": 1.5, "frequency_penalty": 0.25},
)
ADAPTED = replace(ENTRY, name="sql", adapter_path=Path("lora"), base="fake")


class Recorded:
    """A backend that keeps the sampling of the last job of each model."""

    def __init__(self):
        self.sampling = {}

    def __call__(self, model):
        def keep(jobs):
            self.sampling |= {job.model: job.sampling for job in jobs}

        return FakeBackend(on_step=keep)


@pytest.fixture(scope="module")
def backend():
    return Recorded()


@pytest.fixture(scope="module")
def server(backend):
    aliases = {"gpt-4o": "org/second", "a/b": "sql", "claude-*": "org/second"}
    catalog = Catalog(ENTRY, models=[SECOND, ADAPTED], aliases=aliases)
    defaults = {"max_tokens": 9, "temperature": 0.25, "min_p": 0.125}
    with serving(backend, catalog=catalog, defaults=defaults, max_model_len=128) as running:
        yield running


def test_the_list_has_models_adapters_and_exact_aliases(server):
    server.chat(model="org/second")
    data = server.request("GET", "/v1/models")[2]["data"]
    assert [(m["id"], m["root"], m["loaded"], m["max_model_len"]) for m in data] == [
        ("fake", "fake", False, 128),
        ("org/second", "org/second", True, 64),
        ("sql", "fake", False, 128),
        ("gpt-4o", "org/second", True, 64),
        ("a/b", "sql", False, 128),
    ]


@pytest.mark.parametrize(
    ("path", "name", "root"),
    [
        ("org/second", "org/second", "org/second"),
        ("org%2Fsecond", "org/second", "org/second"),
        ("default_model", "fake", "fake"),
        ("gpt-4o", "gpt-4o", "org/second"),
        ("a%2fb", "a/b", "sql"),
        ("a%2Fb", "a/b", "sql"),
        ("claude-3", "claude-3", "org/second"),
    ],
)
def test_each_name_finds_its_object(server, path, name, root):
    status, _, found = server.request("GET", f"/v1/models/{path}")
    assert (status, found["id"], found["root"]) == (200, name, root)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "other",
            "..%2fsecond",
            "%2e%2e/second",
            "org%5Csecond",
            "org%2fsecond%00",
            "fake%3Dx",
            "%252e%252e%252fsecond",
            "org%252Fsecond",
        ),
        *("claude", "Claude-3", "claude-" + "x" * 300, "claude-%00", quote("ｆａｋｅ")),
    ],
)
def test_other_names_find_nothing(server, path):
    status, _, body = server.request("GET", f"/v1/models/{path}")
    assert status in (400, 404)
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "model"), [("gpt-4o", "org/second"), ("claude-3", "org/second"), ("a/b", "sql"), (None, "fake")]
)
def test_an_answer_names_the_model_that_gave_it(server, name, model):
    assert server.chat(model=name)[2]["model"] == model


def test_what_a_request_leaves_out_comes_from_its_model_and_then_from_the_server(server, backend):
    body = server.chat(model="org/second")[2]
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (3, "length")
    assert server.chat()[2]["usage"]["completion_tokens"] == 9
    found = backend.sampling["org/second"]
    assert (found.temperature, found.top_k, found.min_p, found.max_tokens) == (0.5, 7, 0.125, 3)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.5, 0.0, 0.25)
    found = backend.sampling["fake"]
    assert (found.temperature, found.top_k, found.min_p, found.max_tokens) == (0.25, 0, 0.125, 9)
    assert (found.repetition_penalty, found.frequency_penalty) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_the_other_dialects_have_the_same_defaults(server, backend, path, asked):
    assert server.request("POST", path, {"model": "org/second", **asked})[0] == 200
    found = backend.sampling["org/second"]
    assert (found.temperature, found.top_k, found.min_p, found.max_tokens) == (0.5, 7, 0.125, 3)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.5, 0.0, 0.25)


def test_what_a_request_says_wins(server, backend):
    said = {"temperature": 0, "top_k": 0, "repetition_penalty": 0, "frequency_penalty": 0, "max_tokens": 5}
    assert server.chat(model="gpt-4o", **said)[2]["usage"]["completion_tokens"] == 5
    found = backend.sampling["org/second"]
    assert {name: getattr(found, name) for name in said} == said


def test_a_plain_completion_has_16_tokens_and_the_model_s_other_defaults(server, backend):
    body = server.complete("x" * 20, model="org/second", max_tokens=None)[2]
    assert body["usage"]["completion_tokens"] == 16
    assert backend.sampling["org/second"].temperature == 0.5


def test_a_model_s_own_context_counts(server):
    status, _, body = server.complete("x" * 64, model="claude-3")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "64" in body["error"]["message"]
    assert server.complete("x" * 64, max_tokens=1)[0] == 200
    assert server.complete("x" * 128, max_tokens=1)[2]["error"]["code"] == "context_length_exceeded"


def test_template_arguments_of_the_server_the_model_and_the_request_add_up():
    seen = []

    def render(messages, tools, options):
        # Not when the template is probed.
        if "a" in options:
            seen.append(dict(options))
        return render_lines(messages, tools, {})

    catalog = Catalog(ENTRY, models=[SECOND])
    options = {"enable_thinking": False, "a": 1}
    with serving(catalog=catalog, tokenizer=FakeTokenizer(render=render), template_options=options) as server:
        server.chat()
        server.chat(model="org/second")
        server.chat(model="org/second", chat_template_kwargs={"b": 3})
    assert seen == [
        {"enable_thinking": False, "a": 1},
        {"enable_thinking": True, "a": 1, "b": 2},
        {"enable_thinking": True, "a": 1, "b": 3},
    ]
