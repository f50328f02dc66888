"""What users of mlx_lm.server are used to: the same requests get the same kind of answer here."""

import http.client
import json
from contextlib import contextmanager

import pytest

from mlx_serve import serve
from mlx_serve.settings import config
from tests.engine.tinymodel import write_model

DEADLINE_S = 60
TEXT = {"model": "default_model", "prompt": "Once upon a time", "max_tokens": 10}
CHAT = {
    "model": "default_model",
    "max_tokens": 10,
    "temperature": 0.7,
    "top_p": 0.85,
    "repetition_penalty": 1.2,
    "messages": [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello!"}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    # Heads of 64 numbers, the least that mlx-lm quantizes in its usual groups.
    path = write_model(tmp_path_factory.mktemp("models") / "tiny", head_dim=64)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return path


@contextmanager
def serving(*flags):
    """The server that a command line for mlx_lm.server starts; gives a function that posts to it, or gets a page."""
    settings = config.from_args(["--port", "0", *map(str, flags)], {})
    with serve.configured(settings, *serve.open_models(settings)) as server:

        def post(path, body=None):
            connection = http.client.HTTPConnection(*server.http.address, timeout=DEADLINE_S)
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            connection.close()
            assert response.status == 200, raw
            return raw.decode() if body is not None and body.get("stream") else json.loads(raw)

        yield post


@pytest.fixture(scope="module", params=["plain", "draft", "quantized"])
def post(request, model):
    flags = {
        "plain": [],
        "draft": ["--draft-model", model],
        "quantized": ["--kv-bits", 8, "--quantized-kv-start", 5000],
    }
    with serving("--model", model, *flags[request.param]) as post:
        yield post


def test_a_seeded_completion_is_the_same_twice(post):
    body = TEXT | {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 999, "stop": "stop sequence"}
    first, second = (post("/v1/completions", body) for _ in range(2))
    assert first["id"] != second["id"]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["completion_tokens"] > 0


def test_a_chat_has_content_and_usage(post):
    body = post("/chat/completions", CHAT)
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] > 0


def test_content_fragments_are_the_plain_text(post):
    def fragments(message):
        return message | {"content": [{"type": "text", "text": message["content"]}]}

    body = CHAT | {"temperature": 0, "messages": [fragments(m) for m in CHAT["messages"]]}
    assert (
        post("/v1/chat/completions", body)["choices"]
        == post("/v1/chat/completions", CHAT | {"temperature": 0})["choices"]
    )


def test_a_tool_turn_may_have_null_content(post):
    call = {"type": "function", "id": "123", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    turns = [
        {"role": "user", "content": "what is 2+3?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "123"},
    ]
    assert post("/v1/chat/completions", CHAT | {"messages": turns})["choices"]


def test_each_event_of_a_stream_has_one_choice(post):
    text = post("/v1/chat/completions", CHAT | {"temperature": 0, "stream": True})
    lines = [line for line in text.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(chunks) > 1
    assert all(len(chunk["choices"]) == 1 and "delta" in chunk["choices"][0] for chunk in chunks)


def test_a_longer_turn_after_a_shorter_one_is_answered(post):
    for question in ("Tell me a story about", "Tell me a story about dragons."):
        turns = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": question}]
        assert post("/v1/chat/completions", CHAT | {"messages": turns, "max_tokens": 5})["choices"][0]["message"]


def test_parameters_that_only_mlx_lm_server_has_are_taken(post):
    fields = {"top_k": 5, "min_p": 0.05, "xtc_probability": 0.5, "xtc_threshold": 0.1, "num_draft_tokens": 2}
    fields |= {"repetition_context_size": 10, "presence_context_size": 10, "frequency_context_size": 10}
    fields |= {
        "draft_model": "default_model",
        "adapters": None,
        "role_mapping": {"user": "U: "},
        "logit_bias": {"5": 1},
    }
    assert post("/v1/chat/completions", CHAT | fields)["choices"]
