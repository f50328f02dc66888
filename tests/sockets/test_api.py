"""The OpenAI API over real sockets, on the fake backend: it answers a prompt with the prompt itself."""

import json
import socket
import threading
import tracemalloc
from dataclasses import replace

import pytest

from mlx_serve import testing
from mlx_serve.api import body as request_body
from mlx_serve.api import cost, shapes
from mlx_serve.api.endpoints import ROUTES
from mlx_serve.api.openai import render, schema
from mlx_serve.api.responses import resolved_request
from mlx_serve.engine.catalog import Catalog
from mlx_serve.testing import ENTRY, EOS, FakeBackend, FakeTokenizer, saying, tokens_of
from mlx_serve.values import ApiError, internal_error
from mlx_serve.wire.framing import FramingLimits
from tests.sockets.apikit import events, read, serving
from tests.waiting import DEADLINE_S, until

HI = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT_OF_HI = "user: hi\n"


def answering(text, **kwargs):
    """A backend whose model answers ``text``, in which control tokens are written out."""
    return lambda _: FakeBackend(answer=lambda _: [*tokens_of(text), EOS], **kwargs)


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def content_of(chunks, index=0):
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


def finishes(chunks, index=0):
    choices = [choice for c in chunks for choice in c["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


# Whole answers


def test_a_chat_answer_has_openai_s_shape(server):
    status, headers, body = server.chat()
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("chat.completion", "fake", "fp_test")
    message = {"role": "assistant", "content": PROMPT_OF_HI, "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    n = len(PROMPT_OF_HI)
    counts = {key: body["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counts == {"prompt_tokens": n, "completion_tokens": n + 1, "total_tokens": 2 * n + 1}


def test_a_completion_has_openai_s_shape(server):
    status, _, body = server.complete("abc")
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"text": "abc", "index": 0, "logprobs": None, "finish_reason": "stop"}]


def test_paths_work_without_v1_and_with_a_query(server):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for path in ("/chat/completions", "/v1/chat/completions?api-version=1"):
        assert server.request("POST", path, body)[0] == 200
    assert server.request("GET", "/models")[0] == 200


def test_every_answer_has_an_id_of_its_own(server):
    assert server.chat()[2]["id"] != server.chat()[2]["id"]


def test_max_tokens_ends_an_answer(server):
    choice = server.chat(max_tokens=4)[2]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("user", "length")


LONG = "x" * 1000


@pytest.mark.parametrize(
    ("defaults", "context_tokens", "fields", "n"),
    [
        ({}, 4096, {}, 4096 - 1007),
        ({}, 2048, {}, 2048 - 1007),
        ({"max_tokens": 512}, 4096, {}, 512),
        ({"max_tokens": 9000}, 4096, {}, 4096 - 1007),
        ({"max_tokens": 512}, 4096, {"max_tokens": 600}, 600),
        ({}, None, {}, 4096),
    ],
)
def test_an_answer_may_be_as_long_as_the_context_leaves_room_for(defaults, context_tokens, fields, n):
    entry = replace(ENTRY, context_tokens=context_tokens)
    endless = FakeBackend(answer=lambda _: [97] * 10_000)
    with serving(lambda _: endless, catalog=Catalog(entry, ["fake"]), defaults=defaults) as server:
        chat = server.chat(LONG, **fields)[2]
        whole = server.request("POST", "/v1/responses", {"input": LONG, **fields})[2]
    assert chat["usage"]["completion_tokens"] == whole["usage"]["output_tokens"] == n
    assert chat["choices"][0]["finish_reason"] == "length"


def test_max_tokens_is_cut_to_the_room_that_the_context_leaves(server):
    assert server.chat(max_tokens=10**9)[2]["choices"][0]["finish_reason"] == "stop"


def test_the_stop_string_is_not_in_the_answer(server):
    choice = server.chat("one two three", stop=["two"])[2]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("user: one ", "stop")


def test_a_stop_at_once_gives_an_empty_string(server):
    choice = server.chat(stop="u")[2]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_a_stop_string_frees_the_place(server):
    server.chat("x" * 2000, stop="user")
    until(lambda: server.scheduler.health().running == 0, "a free place")


def test_n_choices_count_the_prompt_once(server):
    body = server.chat(n=3)[2]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in body["choices"]} == {PROMPT_OF_HI}
    assert body["usage"]["prompt_tokens"] == len(PROMPT_OF_HI)
    assert body["usage"]["completion_tokens"] == 3 * (len(PROMPT_OF_HI) + 1)


def test_prompts_times_n_choices(server):
    body = server.complete(["a", "bb"], n=2)[2]
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "a"), (2, "bb"), (3, "bb")]
    assert body["usage"]["prompt_tokens"] == 3


def test_a_prompt_may_be_token_ids(server):
    assert server.complete([97, 98])[2]["choices"][0]["text"] == "ab"


def test_a_completion_has_sixteen_tokens_by_default(server):
    body = server.request("POST", "/v1/completions", {"prompt": "x" * 50})[2]
    assert body["usage"]["completion_tokens"] == 16


def test_echo_gives_the_prompt_first(server):
    assert server.complete("ab", echo=True)[2]["choices"][0]["text"] == "abab"


def test_logprobs_of_a_chat_cover_each_token(server):
    content = server.chat(logprobs=True, top_logprobs=2, max_tokens=3)[2]["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "use"
    first = {"token": "u", "logprob": -0.5, "bytes": [117]}
    second = {"token": "v", "logprob": -1.5, "bytes": [118]}
    assert content[0] == first | {"top_logprobs": [first, second]}


def test_logprobs_of_a_completion_cover_each_token(server):
    logprobs = server.complete("abc", logprobs=1)[2]["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }


# Streams


def test_a_stream_is_the_answer_in_pieces(server):
    status, headers, text = server.chat(stream=True)
    assert status == 200
    assert headers["Content-Type"] == "text/event-stream"
    chunks = events(text)
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    first = chunks[0]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert content_of(chunks) == PROMPT_OF_HI
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert finishes(chunks) == ["stop"]
    assert all("usage" not in c for c in chunks)


def test_usage_comes_last_when_it_is_asked_for(server):
    chunks = events(server.chat(stream=True, stream_options={"include_usage": True})[2])
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == server.chat()[2]["usage"]


def predicted(text):
    return {"prediction": {"type": "content", "content": text}}


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, (0, 0)),
        (predicted("abcdef"), (6, 0)),
        (predicted([{"type": "text", "text": "abXd"}]), (3, 1)),
        # Control tokens are text there.
        (predicted("abc<eos>"), (4, 3)),
        (predicted("abcdef") | {"n": 2}, (12, 0)),
        (predicted("XX") | {"stop": "cd", "logprobs": True}, (0, 2)),
    ],
)
def test_usage_counts_what_was_drafted_from_a_prediction(fields, counts):
    with serving(answering("abcdef")) as server:
        status, _, body = server.chat(**fields)
        chunks = events(server.chat(stream=True, stream_options={"include_usage": True}, **fields)[2])
    assert status == 200
    details = body["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == counts
    assert chunks[-1]["usage"] == body["usage"]


def test_no_more_predicted_tokens_are_accepted_than_the_answer_has():
    def ahead(jobs):
        for job in jobs:
            job.n_accepted += 3

    with serving(answering("abcdef", on_step=ahead)) as server:
        usage = server.chat(stop="b")[2]["usage"]
    assert usage["completion_tokens"] == usage["completion_tokens_details"]["accepted_prediction_tokens"] == 2


def test_a_prediction_has_the_limit_of_a_prompt(server):
    reply = server.chat(**predicted("x" * 5000))
    assert_error(reply, 400, code="context_length_exceeded", param="prediction")
    assert server.chat(**predicted("x" * 4096))[0] == 200


def test_the_choices_of_a_stream_interleave_and_end_each_for_itself(server):
    chunks = events(server.chat(stream=True, n=2)[2])
    order = [c["choices"][0]["index"] for c in chunks]
    assert order != sorted(order)
    for index in (0, 1):
        assert (content_of(chunks, index), finishes(chunks, index)) == (PROMPT_OF_HI, ["stop"])


def test_a_completion_streams_under_its_own_name(server):
    chunks = events(server.complete("abc", stream=True, stream_options={"include_usage": True})[2])
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "abc"
    assert chunks[-1]["choices"] == []


def test_an_echo_comes_first_in_a_stream(server):
    chunks = events(server.complete("ab", stream=True, echo=True)[2])
    assert chunks[0]["choices"][0]["text"] == "ab"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abab"


def test_characters_are_never_split(server):
    pieces = [c["choices"][0]["delta"].get("content") for c in events(server.chat("né 🐉🔥 你好", stream=True)[2])]
    assert "🐉" in pieces
    assert not any("\ufffd" in (piece or "") for piece in pieces)


def test_no_part_of_a_stop_string_leaks_into_a_stream(server):
    chunks = events(server.chat("one two three", stream=True, stop="two")[2])
    assert (content_of(chunks), finishes(chunks)) == ("user: one ", ["stop"])


def test_text_held_back_for_a_stop_string_comes_when_there_is_none(server):
    chunks = events(server.chat("one", stream=True, stop="one\nZ")[2])
    assert (content_of(chunks), finishes(chunks)) == ("user: one\n", ["stop"])


def test_logprobs_of_a_stream_cover_each_token(server):
    chunks = events(server.chat("one two", stream=True, logprobs=True, top_logprobs=1, stop="zzz")[2])
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    assert "".join(e["token"] for e in entries) == "user: one two\n"
    assert all(len(e["top_logprobs"]) == 1 for e in entries)


def test_a_bad_request_for_a_stream_is_no_stream(server):
    status, headers, body = server.chat(stream=True, temperature="hot")
    assert (status, headers["Content-Type"], body["error"]["param"]) == (400, "application/json", "temperature")


def test_a_silent_stream_is_kept_alive(monkeypatch):
    monkeypatch.setattr("mlx_serve.api.generation.BEAT_EVERY_S", 0.05)
    monkeypatch.setattr("mlx_serve.api.generation.ADMISSION_WAIT_S", 0.05)
    go = threading.Event()
    with serving(lambda _: FakeBackend(on_step=lambda _: go.wait(DEADLINE_S))) as server:
        connection = server.connection()
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        seen = b""
        while b": keep-alive\n\n" not in seen:
            seen += response.read1()
        go.set()
        assert content_of(events(seen.decode() + response.read().decode())) == PROMPT_OF_HI
        connection.close()


def test_a_stream_that_is_paused_for_memory_is_kept_alive_and_goes_on(monkeypatch):
    monkeypatch.setattr("mlx_serve.api.generation.BEAT_EVERY_S", 0.05)
    text = "abcdefghij" * 90
    has_both, go = threading.Event(), threading.Event()

    def before(jobs):
        if has_both.is_set() and len(jobs) == 1:
            go.wait(DEADLINE_S)
        elif len(jobs) == 1:
            has_both.wait(DEADLINE_S)

    backend = FakeBackend(token_bytes=1, answer=saying(text), on_step=before)
    # Both fit with outputs of usual length, but not with 900 tokens and a step's growth each.
    with serving(lambda _: backend, kv_limit=2 * 1100) as server:
        first, second = server.connection(), server.connection()
        for connection, place in ((first, "running"), (second, "waiting")):
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            until(lambda place=place: getattr(server.scheduler.health(), place) == 1, "the request")
        has_both.set()
        until(lambda: server.scheduler.stats().paused == 1, "the pause")
        response = second.getresponse()
        seen = b""
        while not seen.endswith(b": keep-alive\n\n"):
            seen += response.read1()
        assert b"data: " in seen
        assert server.scheduler.stats().running == 1
        go.set()
        assert content_of(events(seen.decode() + response.read().decode())) == text
        assert content_of(events(first.getresponse().read().decode())) == text
        assert server.scheduler.stats().preemptions == 1
        first.close()
        second.close()


def test_long_pieces_are_split_into_short_lines(server, monkeypatch):
    # An echo may be as long as the context; one line of a stream may not. A character takes up to six bytes of it.
    assert 6 * shapes.MAX_DELTA_CHARS + 4096 < 65_536
    monkeypatch.setattr(shapes, "MAX_DELTA_CHARS", 100)
    long = "".join(map(chr, range(0x100, 0x100 + 250)))
    texts = [c["choices"][0]["text"] for c in events(server.complete(long, echo=True, stream=True, max_tokens=2)[2])]
    assert texts == [long[:100], long[100:200], long[200:], long[0], ""]


def test_long_arguments_of_a_call_are_split_too(monkeypatch):
    monkeypatch.setattr(render, "MAX_DELTA_CHARS", 10)
    arguments = json.dumps({"a": "x" * 25})
    with serving(answering(f"<tool_call>add {arguments}</tool_call>")) as server:
        chunks = events(server.chat(tools=TOOLS, stream=True)[2])
    calls = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    pieces = [call["function"]["arguments"] for call in calls]
    assert "".join(pieces) == arguments
    assert max(map(len, pieces)) == 10


# Reasoning and tool calls

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_reasoning_goes_out_under_both_names():
    with serving(answering("<think>hmm</think>yes")) as server:
        message = server.chat()[2]["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("yes", "hmm", "hmm")
        body = server.chat()[2]
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hmm") + 1
        chunks = events(server.chat(stream=True)[2])
        assert "".join(c["choices"][0]["delta"].get("reasoning_content", "") for c in chunks) == "hmm"
        assert content_of(chunks) == "yes"


def test_logprobs_are_those_of_the_content_alone():
    with serving(answering("<think>hmm</think>yes")) as server:
        content = server.chat(logprobs=True)[2]["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["y", "e", "s"]


def test_a_completion_without_tokens_has_empty_lists_of_logprobs():
    none = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    with serving(answering("")) as server:
        (choice,) = server.complete(logprobs=0)[2]["choices"]
        assert (choice["text"], choice["logprobs"]) == ("", none)
        assert server.complete()[2]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("answer", ["", "<think>hmm</think>", "<tool_call>add {}</tool_call>"])
def test_an_answer_of_which_no_token_is_seen_has_an_empty_list_of_logprobs(answer):
    with serving(answering(answer)) as server:
        (choice,) = server.chat(logprobs=True, tools=TOOLS)[2]["choices"]
        assert choice["logprobs"] == {"content": [], "refusal": None}
        chunks = events(server.chat(logprobs=True, tools=TOOLS, stream=True)[2])
        # OpenAI's stream has it where the role is.
        assert chunks[0]["choices"][0]["logprobs"] == {"content": [], "refusal": None}
        assert {choice["logprobs"] for chunk in chunks[1:] for choice in chunk["choices"]} == {None}
        # Nobody asked:
        chunks = events(server.chat(tools=TOOLS, stream=True)[2])
        assert {choice["logprobs"] for chunk in chunks for choice in chunk["choices"]} == {None}


def test_stop_strings_do_not_match_in_reasoning():
    with serving(answering("<think>stop here</think>go on")) as server:
        message = server.chat(stop="stop")[2]["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("go on", "stop here")


def test_tool_calls():
    with serving(answering('<tool_call>add {"a":1}</tool_call><tool_call>add {"a":2}</tool_call>')) as server:
        choice = server.chat(tools=TOOLS)[2]["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        calls = choice["message"]["tool_calls"]
        assert [c["function"] for c in calls] == [{"name": "add", "arguments": f'{{"a":{i}}}'} for i in (1, 2)]
        assert len({c["id"] for c in calls}) == 2
        chunks = events(server.chat(tools=TOOLS, stream=True)[2])
        pieces = [piece for c in chunks for piece in c["choices"][0]["delta"].get("tool_calls", [])]
        assert [p["index"] for p in pieces] == [0, 0, 1, 1]
        assert [p["function"].get("name") for p in pieces] == ["add", None, "add", None]
        assert "".join(p["function"]["arguments"] for p in pieces if p["index"] == 1) == '{"a":2}'
        assert finishes(chunks) == ["tool_calls"]


def test_a_malformed_tool_call_comes_back_as_text():
    with serving(answering("<tool_call>nonsense</tool_call> sorry")) as server:
        choice = server.chat(tools=TOOLS)[2]["choices"][0]
        assert choice["message"]["content"] == "<tool_call>nonsense</tool_call> sorry"
        assert choice["finish_reason"] == "stop"


def test_without_tools_nothing_is_a_tool_call():
    with serving(answering("<tool_call>add {}</tool_call>")) as server:
        assert "tool_calls" not in server.chat()[2]["choices"][0]["message"]


# Models and health


def test_models_are_listed_and_found(server):
    model = {"id": "fake", "object": "model", "created": 1_700_000_000, "owned_by": "mlx-serve", "max_model_len": 4096}
    server.chat()
    model |= {"root": "fake", "loaded": True}
    # What Anthropic's clients read of it.
    model |= {"type": "model", "display_name": "fake", "created_at": "2023-11-14T22:13:20Z"}
    model |= {"lifecycle": "active", "max_input_tokens": 4096, "max_tokens": 4096}
    model |= dict.fromkeys(["capabilities", "deprecated_at", "line", "retires_at"])
    pages = {"has_more": False, "first_id": "fake", "last_id": "fake"}
    assert server.request("GET", "/v1/models")[2] == {"object": "list", "data": [model], **pages}
    assert server.request("GET", "/v1/models/fake")[2] == model


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_on_from_the_assistant_s_last_message(stream):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Grüße an "}]
    with serving(answering("alle")) as server:
        status, _, body = server.request(
            "POST", "/v1/chat/completions", {"messages": messages, "stream": stream, "continue_final_message": True}
        )
    assert status == 200
    content = content_of(events(body)) if stream else body["choices"][0]["message"]["content"]
    assert content == "alle"


def test_a_format_whose_turns_have_parts_begins_a_new_turn():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    tokenizer = FakeTokenizer(initial_region="header")
    with serving(answering("it is."), tokenizer=tokenizer) as server:
        path = "/apply-template"
        assert server.request("POST", path, {"messages": messages})[2]["prompt"] == "user: hi\nassistant: So\n"
        status, _, body = server.request("POST", path, {"messages": messages, "continue_final_message": True})
        assert (status, body["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("fields", "text", "n_tokens"),
    [
        ({"stop_token_ids": [ord("c")]}, "ab", 3),
        ({"stop_token_ids": [ord("c"), ord("a")]}, "", 1),
        ({"stop_token_ids": [ord("c")], "min_tokens": 3}, "abcdef", 7),
        ({"stop": "cd"}, "ab", 4),
        ({"stop": "cd", "include_stop_str_in_output": True}, "abcd", 4),
    ],
)
def test_where_vllm_s_fields_end_an_answer(fields, text, n_tokens):
    with serving(answering("abcdef")) as server:
        chat, complete = server.chat(**fields)[2], server.complete(**fields)[2]
        whole = server.request("POST", "/v1/responses", {"input": "hi", **fields})[2]
    assert chat["choices"][0]["message"]["content"] == complete["choices"][0]["text"] == text
    assert chat["choices"][0]["finish_reason"] == complete["choices"][0]["finish_reason"] == "stop"
    assert whole["output"][0]["content"][0]["text"] == text
    assert chat["usage"]["completion_tokens"] == complete["usage"]["completion_tokens"] == n_tokens


@pytest.mark.parametrize(("n", "text"), [(2, "fg"), (100, "abcdefg"), (-1, "abcdefg")])
def test_a_completion_s_prompt_can_be_cut_to_its_end(server, n, text):
    status, _, body = server.complete("abcdefg", truncate_prompt_tokens=n)
    assert (status, body["choices"][0]["text"]) == (200, text)
    assert body["usage"]["prompt_tokens"] == len(text)


def test_a_completion_s_prompt_can_be_cut_to_the_context(server):
    status, _, body = server.complete([97] * 5000, truncate_prompt_tokens=-1)
    assert (status, body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (200, 4095, 1)


def test_allowed_tokens_and_a_grammar_exclude_each_other(server):
    pytest.importorskip("llguidance")
    status, _, body = server.chat(allowed_token_ids=[97], guided_choice=["a"])
    assert (status, body["error"]["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize("path", ["/v1/models/", "/v1//models", "/models/", "/v1//models//", "//v1/models"])
def test_slashes_that_joined_urls_leave_are_harmless(server, path):
    assert server.request("GET", path)[2] == server.request("GET", "/v1/models")[2]
    assert server.request("GET", path.rstrip("/") + "/fake")[2]["id"] == "fake"


def test_a_doubled_slash_changes_nothing_about_a_route(server):
    assert server.request("POST", "/v1//messages", {})[2]["type"] == "error"
    assert server.request("GET", "//")[0] == server.request("GET", "/v1/")[0] == 404


@pytest.mark.parametrize("name", ["fake", "default_model", None])
def test_the_default_model_has_several_names(server, name):
    assert server.chat(model=name)[2]["model"] == "fake"


@pytest.mark.parametrize("name", ["other", "", "../fake", "/etc", "a/b/c", "x" * 5000, "credit\nbalance"])
def test_an_unknown_model_is_not_found(server, name):
    status, _, body = server.chat(model=name)
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    assert "credit" not in body["error"]["message"]


def test_health_tells_the_truth(server):
    assert server.request("GET", "/health")[2]["status"] == "ok"


def test_health_after_the_engine_has_stopped():
    with serving() as server:
        server.scheduler.stop()
        status, _, body = server.request("GET", "/health")
        assert (status, body["status"]) == (503, "stopped")
        status, headers, body = server.chat()
        assert (status, body["error"]["type"], headers["Retry-After"]) == (503, "server_error", "2")


# Refusals


def assert_error(reply, status, **fields):
    got, headers, body = reply
    assert (got, headers["Content-Type"]) == (status, "application/json")
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert {key: body["error"][key] for key in fields} == fields


def test_a_prompt_that_does_not_fit_says_so(server):
    reply = server.chat("x" * 5000)
    assert_error(reply, 400, code="context_length_exceeded", param="messages", type="invalid_request_error")
    assert "maximum context length is 4096 tokens" in reply[2]["error"]["message"]
    assert_error(server.complete("x" * 5000), 400, code="context_length_exceeded", param="prompt")


def render_all(messages, tools, options) -> str:
    return json.dumps([messages, tools, options])


def test_what_the_template_prints_counts_wherever_it_stands():
    long = "x" * 200_000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": long}}
    turns = [{"tool_calls": [call]}, {"tool_calls": [call | {"id": long}]}, {"reasoning_content": long}, {"name": long}]
    bodies = [{"messages": [{"role": "assistant", **turn}, {"role": "user", "content": "hi"}]} for turn in turns]
    bodies += [{"tools": [{"type": "function", "function": {"name": "f", "description": long}}]}]
    bodies += [{"chat_template_kwargs": {"a": long}}]
    tokenizer = FakeTokenizer(render=render_all)
    with serving(tokenizer=tokenizer) as server:
        assert server.chat(max_tokens=1)[0] == 200
        for body in bodies:
            reply = server.chat(max_tokens=1, **body)
            assert_error(reply, 400, code="context_length_exceeded", param="messages")


def test_what_the_template_leaves_out_does_not_count(server):
    turn = {"role": "assistant", "content": "a", "reasoning_content": "x" * 200_000}
    assert server.chat(messages=[turn, {"role": "user", "content": "hi"}], max_tokens=1)[0] == 200


POST_ROUTES = sorted({route.path for route in ROUTES if route.method == "POST"})


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize("unit", ["[],", "{},", "1,", '"",'])
def test_json_of_too_many_values_is_refused_before_it_is_parsed(monkeypatch, path, unit):
    def fail(body):
        raise AssertionError("parsed")

    with serving(max_json_values=1000) as server:
        monkeypatch.setattr(request_body, "read_object", fail)
        monkeypatch.setattr(resolved_request, "read_object", fail)
        body = '{"ignored": [' + unit * 1000 + "0]}"
        reply = server.request("POST", f"/v1{path.replace('{id}', 'x')}", body)
    assert reply[0] == 400
    assert "--max-json-values" in reply[2]["error"]["message"]


def test_json_of_as_many_values_as_allowed_is_taken():
    with serving(max_json_values=1000) as server:
        # Some more are those around the messages and the field.
        assert server.chat(ignored=[0] * 970)[0] == 200
        assert_error(server.chat(ignored=[0] * 1000), 400, code="too_many_json_values")


def test_keys_count_besides_their_values():
    """A million different keys take five times as long to parse as a million empty lists."""
    with serving(max_json_values=1000) as server:
        assert server.chat(ignored={f"k{i}": 0 for i in range(480)})[0] == 200
        assert_error(server.chat(ignored={f"k{i}": 0 for i in range(600)}), 400, code="too_many_json_values")


def test_a_tool_that_is_allowed_many_times_is_allowed_once():
    """Each tool was looked for among all names."""
    tool = {"type": "function", "function": {"name": "f"}}
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(3)]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool] * 1000}}
    body = schema.ChatRequest.model_validate({"messages": [], "tools": [tool, *tools], "tool_choice": allowed} | HI)
    assert body.tool_choice.names == {"f"}
    assert [offer["function"]["name"] for offer in body.offered_tools] == ["f"]


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (lambda s: s.chat(n=128, max_tokens=98, logprobs=True, top_logprobs=20), "max_tokens"),
        (lambda s: s.complete("x", n=128, max_tokens=400, logprobs=5), "max_tokens"),
        (lambda s: s.complete("x", n=1, best_of=128, max_tokens=3000), "max_tokens"),
        (lambda s: s.complete("x" * 4000, n=128, max_tokens=1, logprobs=5, echo=True), "echo"),
    ],
)
def test_more_log_probabilities_than_memory_holds_are_refused_before_the_work(server, ask, param):
    assert_error(ask(server), 400, code="too_many_logprobs", param=param)


def test_an_answer_without_a_limit_ends_where_its_log_probabilities_do(monkeypatch):
    monkeypatch.setattr(cost, "MAX_LOGPROBS", 60)
    monkeypatch.setattr(cost, "MAX_STREAMED_LOGPROBS", 120)
    asked = {"n": 2, "logprobs": True, "top_logprobs": 2}
    with serving() as server:
        choices = server.chat("x" * 100, **asked)[2]["choices"]
        assert [(len(c["logprobs"]["content"]), c["finish_reason"]) for c in choices] == [(10, "length")] * 2
        chunks = events(server.chat("x" * 100, stream=True, **asked)[2])
        assert len(content_of(chunks)) == 20
        # What is over the context is no wish for so many.
        assert server.chat("x" * 100, max_tokens=10, **asked)[0] == 200
        assert_error(server.chat("x" * 100, max_tokens=11, **asked), 400, code="too_many_logprobs")


def test_an_empty_prompt_is_echoed_with_no_log_probabilities(server):
    status, _, body = server.complete("", echo=True, logprobs=2, max_tokens=2)
    assert status == 200
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["prompt_tokens"] == 0


def test_roles_of_a_client_are_counted_before_they_are_repeated():
    """Written out, this prompt would be 2 GB."""
    bare = FakeTokenizer(has_chat_template=False, think=None, tool_call=None, controls={})
    messages = [{"role": "user", "content": "x"}] * 10_000
    with serving(tokenizer=bare) as server:
        tracemalloc.start()
        reply = server.chat(messages=messages, role_mapping={"user": "u" * 200_000})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert_error(reply, 400, code="context_length_exceeded", param="messages")
    assert peak < 100e6


def test_a_token_id_outside_of_the_vocabulary_is_refused(server):
    assert_error(server.complete([1, 99_999]), 400, param="prompt")
    assert_error(server.complete([1, 99_999], stream=True), 400, param="prompt")


def test_a_template_that_raises_is_the_request_s_fault(server):
    assert_error(server.chat(chat_template_kwargs={"fail": True}), 400, param="messages")


def test_a_client_names_no_paths(server):
    assert_error(server.chat(adapters="/etc"), 400, param="adapters")
    assert_error(server.chat(draft_model="someone/model"), 400, param="draft_model")
    assert server.chat(draft_model="default_model", adapters=None)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 405),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/fake", 405),
        # A proxy's rules for paths would not see the route.
        ("GET", "/v1%2Fmodels", 404),
        ("GET", "/v1/models%2ffake", 404),
        ("GET", "%2Fv1/models", 400),
    ],
)
def test_unknown_routes_and_methods_are_json_errors(server, method, path, status):
    assert_error(server.request(method, path), status, type="invalid_request_error")


def test_a_cancel_needs_no_length(server):
    """As `curl -X POST` sends it."""
    connection = server.connection()
    connection.putrequest("POST", "/v1/responses/resp_x/cancel")
    connection.endheaders()
    assert_error(read(connection.getresponse()), 404)
    connection.close()


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"", b'{"messages": NaN}'])
def test_a_body_that_is_no_json_object_is_refused(server, body):
    reply = server.request("POST", "/v1/chat/completions", body, {"Content-Length": str(len(body))})
    assert_error(reply, 400, type="invalid_request_error")


def test_a_full_queue_says_when_to_come_back():
    hold = threading.Event()
    with serving(lambda _: FakeBackend(capacity=1, on_step=lambda _: hold.wait(DEADLINE_S)), max_queue=1) as server:
        clients = [threading.Thread(target=server.chat) for _ in range(2)]
        clients[0].start()
        until(lambda: server.scheduler.health().running == 1, "one running")
        clients[1].start()
        until(lambda: server.scheduler.health().waiting == 1, "one waiting")
        reply = server.chat()
        assert_error(reply, 429, type="rate_limit_error", code="rate_limit_exceeded")
        assert reply[1]["Retry-After"] == "2"
        health = {"status": "ok", "model": "fake", "models": ["fake"], "waiting": 1, "running": 1}
        assert server.request("GET", "/health")[2] == health
        hold.set()
        for client in clients:
            client.join(DEADLINE_S)


# Failures


def test_a_failing_step_is_an_error_and_the_next_request_works():
    fail = [False]

    def on_step(_jobs):
        if fail[0]:
            raise RuntimeError("secret detail")

    with serving(lambda _: FakeBackend(on_step=on_step)) as server:
        fail[0] = True
        reply = server.chat()
        assert_error(reply, 500, type="server_error")
        assert reply[2]["error"]["message"] == internal_error().message
        fail[0] = False
        assert server.chat()[0] == 200
        assert server.request("GET", "/health")[2]["status"] == "ok"


def test_a_failure_in_mid_stream_is_the_stream_s_last_event():
    steps = [0]

    def on_step(_jobs):
        steps[0] += 1
        if steps[0] == 4:
            raise RuntimeError("secret detail")

    with serving(lambda _: FakeBackend(on_step=on_step)) as server:
        status, _, text = server.chat(stream=True)
        assert status == 200
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["message"] == internal_error().message
        assert server.chat()[0] == 200


def test_a_fault_of_the_server_s_own_in_mid_stream_names_the_request(monkeypatch, caplog):
    def no_usage(usage):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(render, "usage_object", no_usage)
    with serving() as server:
        status, headers, text = server.chat(stream=True, stream_options={"include_usage": True})
        assert status == 200
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["message"] == internal_error(headers["x-request-id"]).message
        assert "secret detail" in caplog.text


def test_a_panic_in_mid_stream_is_the_stream_s_last_event(monkeypatch, caplog):
    class Panic(BaseException):
        """As an extension in Rust raises it: no Exception."""

    def panic(usage):
        raise Panic("secret detail")

    monkeypatch.setattr(render, "usage_object", panic)
    with serving() as server:
        status, headers, text = server.chat(stream=True, stream_options={"include_usage": True})
        assert status == 200
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["message"] == internal_error(headers["x-request-id"]).message
        assert "secret detail" in caplog.text


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests():
    def make(_name):
        raise ApiError(500, "The model could not be loaded.", type="server_error", param="model")

    with serving(make) as server:
        assert_error(server.chat(stream=True), 500, type="server_error", param="model")
        assert server.request("GET", "/health")[2]["status"] == "ok"


# Bodies


CHAT = json.dumps({"messages": [{"role": "user", "content": "né 🐉"}]}, ensure_ascii=False).encode()


def chunks(body, size):
    return (body[i : i + size] for i in range(0, len(body), size))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_chunked_body_answers_as_one_with_a_length(server, size):
    plain = server.request("POST", "/v1/chat/completions", CHAT)
    chunked = server.request("POST", "/v1/chat/completions", chunks(CHAT, size), encode_chunked=True)
    assert plain[0] == chunked[0] == 200
    assert chunked[2]["choices"] == plain[2]["choices"]
    assert chunked[2]["choices"][0]["message"]["content"] == "user: né 🐉\n"


def test_a_chunk_may_end_inside_a_character(server):
    middle = CHAT.index("🐉".encode()) + 2
    reply = server.request("POST", "/v1/chat/completions", iter([CHAT[:middle], CHAT[middle:]]), encode_chunked=True)
    assert reply[2]["choices"][0]["message"]["content"] == "user: né 🐉\n"


def test_good_and_bad_requests_share_a_connection(server):
    connection = server.connection()
    for body, chunked, status in [
        (CHAT, False, 200),
        (CHAT, True, 200),
        (b"{", False, 400),
        (b"[]", True, 400),
        (CHAT, True, 200),
        (json.dumps({"model": "no", "messages": [{"role": "user", "content": "x"}]}).encode(), False, 404),
        (CHAT, False, 200),
    ]:
        data = chunks(body, 5) if chunked else body
        connection.request("POST", "/v1/chat/completions", data, encode_chunked=chunked)
        assert read(connection.getresponse())[0] == status
    sock = connection.sock
    connection.request("GET", "/v1/models")
    assert read(connection.getresponse())[0] == 200
    assert connection.sock is sock
    connection.close()


def test_a_body_over_the_limit_is_refused_at_once():
    with serving(limits=FramingLimits(max_body_bytes=100)) as server:
        reply = server.request("POST", "/v1/chat/completions", headers={"Content-Length": "1000000"})
        assert_error(reply, 413, type="invalid_request_error")
        assert "100" in reply[2]["error"]["message"]


def test_a_body_that_is_cut_off_runs_nothing():
    ran = []
    with serving(lambda _: FakeBackend(on_step=ran.append)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(CHAT) + 1}\r\n\r\n"
            sock.sendall(head.encode() + CHAT)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        assert ran == []


# Many clients, and clients that leave


def test_sixty_four_clients_get_exactly_their_own_tokens(server):
    replies = {}

    def client(i):
        text = f"client {i} says 🐉{i}"
        if i % 2:
            replies[i] = content_of(events(server.chat(text, stream=True, n=1)[2])) == f"user: {text}\n"
        else:
            replies[i] = server.chat(text)[2]["choices"][0]["message"]["content"] == f"user: {text}\n"

    threads = [threading.Thread(target=client, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert replies == dict.fromkeys(range(64), True)


def endless(job):
    while True:
        yield 97


def endless_backend(_):
    gate = threading.Event()
    return FakeBackend(answer=endless, on_step=lambda _: gate.wait(0.001))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(stream):
    with serving(endless_backend, max_model_len=None) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        until(lambda: server.scheduler.health().running == 1, "the request runs")
        if stream:
            sock.recv(1000)
        sock.close()
        until(lambda: server.scheduler.health().running == 0, "its place is free")


def wordless(job):
    """A letter, and then tokens that have no text."""
    yield 97
    while True:
        yield 257


def wordless_backend(_):
    gate = threading.Event()
    return FakeBackend(answer=wordless, on_step=lambda _: gate.wait(0.001))


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_a_client_that_leaves_a_silent_stream_frees_its_place(version):
    """It has read all that came, so that it leaves with a FIN: as one that only ended its sending."""
    with serving(wordless_backend, catalog=Catalog(replace(ENTRY, context_tokens=None), ["fake"])) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 10**6, "stream": True}).encode()
        head = f"POST /v1/completions {version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            sock.sendall(head.encode() + body)
            came = b""
            while not came.endswith(b"\n\n" if version == "HTTP/1.0" else b"\n\n\r\n"):
                came += sock.recv(1000)
        until(lambda: server.scheduler.health().running == 0, "its place is free")


def test_a_client_that_ended_its_sending_is_not_taken_for_one_that_left():
    with serving(wordless_backend, catalog=Catalog(replace(ENTRY, context_tokens=None), ["fake"])) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
            sock.sendall(head.encode() + body)
            came = sock.recv(1000)
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(65536):
                came += data
        assert came.endswith(b"data: [DONE]\n\n")
        # What the server asked it with.
        assert b"\n: \n\n" in came


def test_a_client_that_leaves_while_it_waits_is_forgotten():
    hold = threading.Event()
    with serving(lambda _: FakeBackend(capacity=1, on_step=lambda _: hold.wait(DEADLINE_S))) as server:
        first = threading.Thread(target=server.chat)
        first.start()
        until(lambda: server.scheduler.health().running == 1, "one running")
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(CHAT)}\r\n\r\n"
        sock.sendall(head.encode() + CHAT)
        until(lambda: server.scheduler.health().waiting == 1, "one waiting")
        sock.close()
        until(lambda: server.server.n_connections == 1, "the server noticed")
        hold.set()
        first.join(DEADLINE_S)
        until(lambda: server.scheduler.health().waiting == server.scheduler.health().running == 0, "nothing left")


def test_clients_that_leave_at_random_points_deadlock_nobody():
    with serving(endless_backend, max_model_len=None) as server:

        def client(i):
            body = json.dumps({"prompt": "x" * i, "max_tokens": 4000, "stream": bool(i % 2)}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            raw = head + body
            with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as sock:
                sock.sendall(raw[: 40 + i * 7])
                if i % 4 == 1 and len(raw) <= 40 + i * 7:
                    sock.recv(i * 50)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(1, 65)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        until(lambda: server.scheduler.health().waiting == server.scheduler.health().running == 0, "nothing left")
        assert server.complete("x", max_tokens=3)[2]["choices"][0]["text"] == "aaa"


# What one request must not cost the others


def test_a_body_of_a_million_faulty_items_is_refused_at_its_first(server):
    body = b'{"messages":[' + b",".join([b"1"] * 1_000_000) + b"]}"
    reply = server.request("POST", "/v1/chat/completions", body)
    assert_error(reply, 400, param="messages[0]")


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_lists_are_bounded(server, field):
    message = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f"}}
    item = message if field == "messages" else tool
    body = {"messages": [message], field: [item] * 20_000}
    assert_error(server.request("POST", "/v1/chat/completions", body), 400, param=field)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_context_sizes_are_bounded(server, name):
    assert_error(server.chat(**{f"{name}_context_size": 2**31}), 400, param=f"{name}_context_size")


def test_what_nests_deeply_is_the_request_s_fault(server):
    deep = "[" * 900 + "]" * 900
    for fields in (
        f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {deep}}}}}}}]',
        f'"chat_template_kwargs": {{"x": {deep}}}',
    ):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, {fields}}}'
        assert server.request("POST", "/v1/chat/completions", body)[0] in (200, 400)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "a", "content": "y"}]
    body = {"messages": turns, "max_tokens": 1}
    assert server.request("POST", "/v1/chat/completions", body)[0] in (200, 400)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    def fail(text, ids):
        raise AssertionError("tokenized")

    with serving() as server:
        monkeypatch.setattr(testing, "tokens_of", fail)
        assert_error(server.complete("x" * 100_000), 400, code="context_length_exceeded", param="prompt")
        assert_error(server.chat("x" * 100_000), 400, code="context_length_exceeded", param="messages")


# Completions, the older fields


def test_the_best_of_several_are_those_of_the_highest_mean_log_probability():
    from mlx_serve.api.openai.render import FoldedChoice, best
    from mlx_serve.values import TokenLogprob

    def choice(index, *logprobs):
        return FoldedChoice(index, content=[str(index)], logprobs=[TokenLogprob("x", b"x", p) for p in logprobs])

    choices = [choice(0, -3, -3), choice(1, -1, -2), choice(2, -2), choice(3), choice(4, -9), choice(5, -1)]
    kept = best(choices, 3, 2)
    assert [(c.index, c.content, c.logprobs) for c in kept] == [
        (0, ["1"], []),
        (1, ["2"], []),
        (2, ["5"], []),
        (3, ["4"], []),
    ]


def test_best_of_gives_n_and_counts_all(server):
    body = server.complete("ab", best_of=3, n=1)[2]
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [(0, "ab", None)]
    assert body["usage"]["completion_tokens"] == 9
    assert body["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_no_tokens_is_the_prompt(server, stream):
    reply = server.complete(["ab", "c"], echo=True, max_tokens=0, stream=stream)[2]
    if stream:
        choices = [choice for chunk in events(reply) for choice in chunk["choices"]]
        assert [(c["index"], c["text"]) for c in choices if c["text"]] == [(0, "ab"), (1, "c")]
    else:
        assert [(c["text"], c["finish_reason"]) for c in reply["choices"]] == [("ab", "length"), ("c", "length")]
        assert reply["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_with_logprobs_tells_how_likely_the_prompt_was(server, max_tokens):
    body = server.complete(["abc", "x"], echo=True, logprobs=1, max_tokens=max_tokens)[2]
    first, second = body["choices"]
    assert first["text"] == "abc" + "a" * max_tokens
    assert first["finish_reason"] == "length"
    tokens = ["a", "b", "c", "a"][: 3 + max_tokens]
    assert first["logprobs"] == {
        "tokens": tokens,
        "token_logprobs": [None, -0.5, -0.5, -0.5][: 3 + max_tokens],
        "top_logprobs": [None, *[{token: -0.5} for token in tokens[1:]]],
        "text_offset": [0, 1, 2, 3][: 3 + max_tokens],
    }
    assert second["logprobs"]["tokens"] == ["x"] * (1 + max_tokens)
    assert body["usage"]["completion_tokens"] == 2 * max_tokens


def test_an_echo_with_logprobs_comes_first_in_a_stream(server):
    chunks = events(server.complete("ab", echo=True, logprobs=0, max_tokens=1, stream=True)[2])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "aba"
    scores = [choice["logprobs"]["token_logprobs"] for choice in choices if choice["logprobs"]]
    assert scores == [[None, -0.5], [-0.5]]
