"""Anthropic's Messages over real sockets, on the fake backend: it answers a prompt with the prompt itself."""

import json
import re
import threading
from contextlib import closing

import pytest

from mlx_serve.api.anthropic import render
from mlx_serve.api.anthropic.errors import as_anthropic_object
from mlx_serve.testing import EOS, FakeBackend, FakeTokenizer, render_lines, tokens_of
from mlx_serve.values import ApiError, Finish, Text, ToolCallArguments, ToolCallStart, Usage
from mlx_serve.wire.framing import FramingLimits
from tests.pure.formatkit import deepseek, gpt_oss, qwen3
from tests.sockets.apikit import read, serving
from tests.sockets.messageskit import as_message, ask, check_order, joined, parse, stream, whole
from tests.sockets.replaykit import replaying
from tests.sockets.test_formats import CASES
from tests.waiting import DEADLINE_S, until

ANSWER = "user: hi\n"
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>get_weather {"city": "Zürich"}</tool_call>'


def answering(text, **kwargs):
    """A backend whose model answers ``text``, in which control tokens are written out."""
    return lambda _: FakeBackend(answer=lambda _: [*tokens_of(text), EOS], **kwargs)


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def said(message: dict) -> str:
    return "".join(block["text"] for block in message["content"])


# Whole messages


def test_a_message_has_anthropic_s_shape(server):
    message = whole(server)
    assert re.fullmatch(r"msg_[0-9a-f]{24}", message.pop("id"))
    n = len(ANSWER)
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": ANSWER, "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "diagnostics": None,
        "usage": {
            "cache_creation": None,
            "inference_geo": None,
            "server_tool_use": None,
            "service_tier": None,
            "input_tokens": n,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": n + 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


def test_the_reply_has_its_id_by_anthropic_s_name(server):
    headers = ask(server)[1]
    assert headers["request-id"] == headers["x-request-id"]


def test_paths_work_without_v1_and_with_a_query(server):
    for path in ("/messages", "/v1/messages?beta=true"):
        assert ask(server, path=path)[0] == 200


def test_max_tokens_ends_a_message(server):
    message = whole(server, max_tokens=4)
    assert (said(message), message["stop_reason"], message["usage"]["output_tokens"]) == ("user", "max_tokens", 4)


def test_a_stop_sequence_is_named_and_not_in_the_text(server):
    message = whole(server, "one two three", stop_sequences=["nine", "two", "three"])
    assert said(message) == "user: one "
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")


def test_tokens_from_the_cache_are_counted_apart():
    with serving(lambda _: FakeBackend(cached_tokens=4)) as server:
        want = {"input_tokens": len(ANSWER) - 4, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0}
        assert whole(server)["usage"].items() >= want.items()
        events = stream(server)
    assert events[0]["message"]["usage"].items() >= want.items()
    assert events[-2]["usage"].items() >= want.items()


def test_an_answer_without_text_has_no_block():
    for text in ("", " \n"):
        with serving(answering(text)) as server:
            assert whole(server)["content"] == []
            assert joined(stream(server))["content"] == []


def test_reasoning_text_and_calls_are_blocks_in_order():
    with serving(answering(f"<think>hm</think>\n\nLook. {CALL}\n{CALL}")) as server:
        message = whole(server, tools=[WEATHER])
    thinking, text, *calls = message["content"]
    assert thinking.pop("signature")
    assert thinking == {"type": "thinking", "thinking": "hm"}
    assert text == {"type": "text", "text": "\n\nLook.", "citations": None}
    ids = [call.pop("id") for call in calls]
    assert all(re.fullmatch(r"toolu_[0-9a-f]{24}", call_id) for call_id in ids)
    assert len(set(ids)) == 2
    assert calls == [{"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich"}}] * 2
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_disable_parallel_tool_use_leaves_one_call():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    with serving(answering(f"{CALL}\n{CALL}")) as server:
        message = whole(server, tools=[WEATHER], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_arguments_that_are_no_json_object_are_kept_as_text(arguments):
    with serving(answering(f"<tool_call>get_weather {arguments}</tool_call>")) as server:
        (block,) = whole(server, tools=[WEATHER])["content"]
    assert block["input"] == {"arguments": arguments}


# Streams


def test_a_stream_is_the_message(server):
    events = stream(server)
    types = list(dict.fromkeys(event["type"] for event in events))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert types == ["message_start", *block, "message_delta", "message_stop"]
    message, other = joined(events), whole(server)
    assert message["id"] != other["id"]
    assert message | {"id": ""} == other | {"id": ""}


@pytest.mark.parametrize("name", CASES)
def test_every_format_comes_through_streamed_and_whole(name):
    make, written, want = CASES[name]
    want.finish = "tool_calls"
    tools = [WEATHER, ADD]
    with replaying(make()) as replay:
        replay.write_bytes(written)
        streamed = as_message(joined(stream(replay.server, tools=tools)))
        assert streamed == want
        got = as_message(whole(replay.server, tools=tools))
    assert got.calls == [(name, json.loads(arguments)) for name, arguments in want.calls]
    assert (got.content, got.reasoning, got.finish) == (want.content, want.reasoning, want.finish)


def test_cut_off_anywhere_a_stream_is_in_order_and_the_message_the_same():
    make, written, _ = CASES["qwen3"]
    with replaying(make()) as replay:
        replay.write_bytes(written)
        for n in range(1, len(replay.tokens) + 1):
            streamed = as_message(joined(stream(replay.server, tools=[WEATHER, ADD], max_tokens=n)))
            got = as_message(whole(replay.server, tools=[WEATHER, ADD], max_tokens=n))
            assert streamed.finish == got.finish == "length"
            assert (streamed.content, streamed.reasoning) == (got.content, got.reasoning)
            assert [name for name, _ in streamed.calls] == [name for name, _ in got.calls]


def test_a_stream_that_is_silent_for_long_pings(monkeypatch):
    monkeypatch.setattr("mlx_serve.api.generation.BEAT_EVERY_S", 0.05)
    monkeypatch.setattr("mlx_serve.api.generation.ADMISSION_WAIT_S", 0.05)
    go = threading.Event()
    with serving(lambda _: FakeBackend(on_step=lambda _: go.wait(DEADLINE_S))) as server:
        connection = server.connection()
        body = {"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        connection.request("POST", "/v1/messages", json.dumps(body))
        response = connection.getresponse()
        seen = b""
        while b'event: ping\ndata: {"type":"ping"}\n\n' not in seen:
            seen += response.read1()
        go.set()
        assert said(joined(parse(seen.decode() + response.read().decode()))) == ANSWER
        connection.close()


def test_a_fault_in_mid_stream_is_the_last_event():
    def on_step(_jobs):
        if next(steps) == 3:
            raise RuntimeError("secret of the inside")

    steps = iter(range(1000))
    with serving(lambda _: FakeBackend(on_step=on_step)) as server:
        status, headers, text = ask(server, stream=True)
        events = parse(text)
        assert status == 200
        assert events[-1].pop("request_id") == headers["request-id"]
        assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")
        assert "secret" not in text
        assert said(whole(server)) == ANSWER


def test_a_client_that_leaves_frees_its_place():
    with serving(lambda _: FakeBackend(answer=lambda _: iter(lambda: ord("x"), None))) as server:
        connection = server.connection()
        body = {"max_tokens": 10**6, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        connection.request("POST", "/v1/messages", json.dumps(body))
        connection.getresponse().read(100)
        until(lambda: server.scheduler.health().running == 1, "a running request")
        connection.close()
        until(lambda: server.scheduler.health().running == 0, "a free place")


# Prompts


def prompt_of(server, **fields) -> str:
    """The prompt, which the model answers with."""
    return said(whole(server, **fields))


def test_system_and_turns_become_the_template_s_messages(server):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00001;"}
    system = [billing, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "d"}]},
        {"role": "system", "content": "Mind the time."},
    ]
    want = (
        "system: Be brief.\nuser: a\nb\nc\nassistant: d\nuser: <system-reminder>\nMind the time.\n</system-reminder>\n"
    )
    assert prompt_of(server, system=system, messages=turns) == want
    assert prompt_of(server, system="Be brief.", messages=turns) == want


def test_an_assistant_s_last_turn_is_gone_on_from(server):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The <eos> is"}]
    assert prompt_of(server, messages=turns) == "user: hi\nThe <eos> is"


def test_reasoning_that_the_template_opened_is_ended_before_a_prefill():
    tokenizer = qwen3()
    tokenizer._render = lambda messages, tools, options: f"{messages[-1]['content']}<think>\n"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    with replaying(tokenizer) as replay:
        replay.write_bytes("it is.")
        message = whole(replay.server, messages=turns)
        count = ask(replay.server, messages=turns, path="/v1/messages/count_tokens", max_tokens=...)[2]["input_tokens"]
    assert as_message(message).content == "it is."
    assert count == len(tokenizer.encode("hi<think>\n</think>\n\nSo", special=False))


def test_a_format_without_a_place_for_a_prefill_refuses_it():
    with replaying(gpt_oss()) as replay:
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
        status, _, body = ask(replay.server, messages=turns)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_thinking_is_an_option_of_the_template():
    tokenizer = deepseek()
    tokenizer._render = lambda messages, tools, options: render_lines(messages, tools, {}) + json.dumps(options)
    with replaying(tokenizer) as replay:
        replay.write_bytes("ok")

        def n_tokens(**fields) -> int:
            return ask(replay.server, path="/v1/messages/count_tokens", **fields)[2]["input_tokens"]

        n_plain = n_tokens() - len("{}")
        for kind, value in (("enabled", "true"), ("adaptive", "true"), ("disabled", "false")):
            assert n_tokens(thinking={"type": kind, "budget_tokens": 1024}) == n_plain + len(
                f'{{"enable_thinking": {value}}}'
            )


def test_count_tokens_is_what_the_message_costs(server):
    fields = {"system": "Be brief.", "tools": [WEATHER]}
    usage = whole(server, **fields)["usage"]
    status, _, body = ask(server, path="/v1/messages/count_tokens", max_tokens=..., **fields)
    assert (status, body) == (200, {"input_tokens": usage["input_tokens"]})


# Refusals


def refused(server, **fields):
    status, headers, body = ask(server, **fields)
    assert body["type"] == "error"
    assert body["request_id"] == headers["request-id"]
    assert set(body) == {"type", "error", "request_id"}
    return status, body["error"]["type"], body["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def turn(*blocks, role="user"):
    return [{"role": role, "content": list(blocks)}]


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}


@pytest.mark.parametrize(("fields", "named"), [
    ({"max_tokens": ...}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": ...}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": turn({"type": "text", "text": "a"}, {"type": "text"})}, "messages[0].content[1].text"),
    ({"messages": turn({"type": "text", "text": "\ud800"})}, "messages[0].content[0].text"),
    ({"messages": turn(IMAGE)}, "messages[0].content[0]"),
    ({"messages": turn({"type": "document", "source": {}})}, "messages[0].content[0]"),
    ({"messages": turn({"type": "hologram"})}, "messages[0].content[0]"),
    ({"messages": turn({"text": "a"})}, "messages[0].content[0]"),
    ({"messages": turn("a")}, "messages[0].content[0]"),
    ({"messages": turn({"type": "tool_result"})}, "messages[0].content[0].tool_use_id"),
    ({"messages": turn(USE)}, "messages[0]"),
    ({"messages": turn(RESULT, role="assistant")}, "messages[0]"),
    ({"messages": turn(USE | {"input": "{}"}, role="assistant")}, "messages[0].content[0].input"),
    ({"messages": turn(USE | {"input": {"a": ["\ud800"]}}, role="assistant")}, "messages[0].content[0].input"),
    ({"messages": turn(USE, role="assistant")}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [ADD], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"stream": "yes"}, "stream"),
])  # fmt: skip
def test_a_bad_field_is_named(server, fields, named):
    status, kind, message = refused(server, **fields)
    assert (status, kind) == (400, "invalid_request_error")
    assert f"'{named}'" in message or named == "messages"


def test_a_body_that_is_no_json_is_refused(server):
    for raw in ("", "{", "[]", '{"max_tokens": NaN}'):
        status, _, body = server.request("POST", "/v1/messages", raw)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_nesting_is_an_answer_and_not_a_fault(server, depth):
    raw = json.dumps({"max_tokens": 5, "messages": turn(USE, role="assistant") + turn(RESULT), "tools": ["DEEP"]})
    deep = json.dumps(ADD)[:-1] + ', "input_schema": ' + '{"a": ' * depth + "1" + "}" * depth + "}"
    assert server.request("POST", "/v1/messages", raw.replace('"DEEP"', deep))[0] in (200, 400)


def test_an_unknown_model_is_not_found(server):
    assert refused(server, model="claude-x")[:2] == (404, "not_found_error")


def test_a_prompt_that_is_too_long_is_told_in_claude_code_s_words(server):
    for n in (4096, 10**6):
        status, kind, message = refused(server, content="x" * n)
        assert (status, kind) == (400, "invalid_request_error")
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 4096 maximum", message)


def test_tools_and_thinking_count_as_they_are_rendered():
    long = "x" * 200_000
    tokenizer = FakeTokenizer(render=lambda messages, tools, options: json.dumps([messages, tools]))
    turns = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": long}]},
        {"role": "user", "content": "a"},
    ]
    with serving(tokenizer=tokenizer) as server:
        for fields in ({"tools": [{"name": "f", "description": long, "input_schema": {}}]}, {"messages": turns}):
            assert refused(server, **fields)[2].startswith("prompt is too long: 125")


def test_what_is_ignored_changes_nothing(server):
    ignored = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "container": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
        "output_config": {"effort": "high"},
        "cache_control": {"type": "ephemeral"},
        "stop_sequences": None,
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
    }
    assert prompt_of(server, **ignored) == ANSWER


def test_errors_that_come_before_the_route_have_anthropic_s_shape():
    limits = FramingLimits(max_body_bytes=1000)
    with serving(limits=limits) as server:
        assert refused(server, content="x" * 2000)[:2] == (413, "request_too_large")
        assert refused(server, path="/v1/messages/batches")[:2] == (404, "not_found_error")
        status, headers, body = server.request("GET", "/v1/messages")
        assert (status, headers["Allow"], body["error"]["type"]) == (405, "OPTIONS, POST", "invalid_request_error")
        with closing(server.connection()) as connection:
            connection.putrequest("POST", "/v1/messages")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders(b"zz\r\n")
            status, _, body = read(connection.getresponse())
        assert (status, body["type"]) == (400, "error")
        # Elsewhere it is OpenAI's.
        assert server.request("GET", "/v1/nothing")[2]["error"].keys() == {"message", "type", "param", "code"}


def test_a_full_queue_is_a_rate_limit():
    go = threading.Event()
    body = json.dumps({"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]})
    with (
        serving(lambda _: FakeBackend(capacity=1, on_step=lambda _: go.wait(DEADLINE_S)), max_queue=1) as server,
        closing(server.connection()) as first,
        closing(server.connection()) as second,
    ):
        first.request("POST", "/v1/messages", body)
        until(lambda: server.scheduler.health().running == 1, "a running request")
        second.request("POST", "/v1/messages", body)
        until(lambda: server.scheduler.health().waiting == 1, "a waiting request")
        assert refused(server)[:2] == (429, "rate_limit_error")
        assert ask(server)[1]["Retry-After"]
        go.set()
        assert [read(connection.getresponse())[0] for connection in (first, second)] == [200, 200]


def test_an_engine_that_stops_is_overloaded():
    with serving() as server:
        server.scheduler.stop()
        assert refused(server)[:2] == (503, "overloaded_error")


def test_a_failure_before_the_first_token_has_its_own_status():
    def on_step(_jobs):
        raise RuntimeError("secret of the inside")

    with serving(lambda _: FakeBackend(on_step=on_step)) as server:
        status, kind, message = refused(server)
    assert (status, kind) == (500, "api_error")
    assert "secret" not in message


def test_an_error_of_any_status_has_a_type():
    def kind(status: int) -> str:
        return as_anthropic_object(ApiError(status, "x"), "")["error"]["type"]

    assert [kind(status) for status in (401, 403, 404, 408, 415)] == [
        "authentication_error", "permission_error", "not_found_error", "invalid_request_error", "invalid_request_error",
    ]  # fmt: skip
    assert [kind(status) for status in (413, 429, 500, 501, 503, 529)] == [
        "request_too_large", "rate_limit_error", "api_error", "api_error", "overloaded_error", "overloaded_error",
    ]  # fmt: skip


def test_head_of_the_root_is_answered(server):
    assert server.request("HEAD", "/")[0] == 200
    assert server.request("GET", "/")[2] == {"name": "mlx-serve"}


def test_the_order_check_sees_what_is_out_of_order(server):
    events = stream(server)
    with pytest.raises(AssertionError):
        check_order([event for event in events if event["type"] != "content_block_stop"])


def test_a_server_that_shuts_down_is_overloaded():
    with serving() as server:
        assert server.server.drain(0)
        assert refused(server)[:2] == (503, "overloaded_error")


def test_long_pieces_are_split_into_short_lines():
    long = "é" * 20_000
    deltas = [Text(0, "content", long), ToolCallStart(0, 0, "add"), ToolCallArguments(0, 0, f'{{"a": "{long}"}}')]
    found = list(render.events("fake", 1, 0, [*deltas, Finish(0, "tool_calls", Usage(1, 1))]))
    check_order(found)
    assert max(len(json.dumps(event)) for event in found) < 65_536
    text, call = render.fold(found)["content"]
    assert (text["text"], call["input"]) == (long, {"a": long})
