"""Structured output through the whole server: a tiny random model at temperature 1, whose text yet conforms."""

import json
import re
import sys
import threading
from functools import partial

import jsonschema
import pytest

from mlx_serve import serve
from mlx_serve.api import grammar_child
from mlx_serve.api.serving import Services
from mlx_serve.engine.catalog import Catalog, read_entry
from mlx_serve.engine.generate import constraints
from mlx_serve.wire.server_options import ServerOptions
from tests.sockets import messageskit
from tests.sockets.apikit import Running, events, serving
from tests.waiting import DEADLINE_S

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "n"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 5}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
PARAMETERS = {"get_weather": WEATHER["function"]["parameters"], "get_time": {"maxProperties": 0, "type": "object"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server on a tiny random model, as the command line puts it together."""
    from mlx_serve.engine.generate.batch import BatchOptions
    from mlx_serve.engine.models.store import ModelStore
    from tests.engine.tinymodel import write_model

    # Tools are described in words, which are a token for each byte.
    path = write_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    entry = read_entry("tiny", path)
    catalog = Catalog(entry, ["tiny"])
    models = ModelStore(
        catalog,
        tokenizer_config={},
        batch=BatchOptions(),
        prompt_cache_size=4,
        prompt_cache_bytes=None,
    )
    with serve.running(
        catalog,
        models,
        ServerOptions(address=("127.0.0.1", 0)),
        services=partial(Services, fingerprint="fp_test"),
        grammar_limits=grammar_child.GrammarLimits(cpu_s=1),
        first_model="tiny",
    ) as server:
        yield Running(server)


def ok(answer):
    status, _, body = answer
    assert status == 200, body
    return body


def contents(body):
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    return [choice["message"]["content"] for choice in body["choices"]]


def wanted(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_response_format_holds(server, strict):
    body = ok(server.chat(temperature=1, seed=1, n=4, response_format=wanted(SCHEMA, strict=strict)))
    texts = contents(body)
    for text in texts:
        value = json.loads(text)
        jsonschema.validate(value, SCHEMA)
        # Order and spaces are fixed: there is one way to write each value.
        assert list(value) == ["name", "size", "n"]
        assert json.dumps(value, ensure_ascii=False) == text or "\\u" in text or "\\/" in text
    assert len(set(texts)) > 1


def test_a_stream_holds_the_same_text(server):
    fields = {"temperature": 1, "seed": 5, "response_format": wanted(SCHEMA)}
    whole = contents(ok(server.chat(**fields)))[0]
    chunks = events(server.chat(stream=True, **fields)[2])
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_json": SCHEMA}, lambda text: json.loads(text)["size"] in ("small", "large")),
        ({"guided_regex": "[ab]{3}"}, lambda text: set(text) <= {"a", "b"} and len(text) == 3),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_grammar": 'root ::= "x" | "yy"'}, lambda text: text in ("x", "yy")),
        ({"structured_outputs": {"choice": ["ü", "😀"]}}, lambda text: text in ("ü", "😀")),
        ({"grammar": "root ::= [0-9] [0-9]"}, lambda text: text.isdigit() and len(text) == 2),
        ({"json_schema": {"const": {"a": [1, None]}}}, lambda text: text == '{"a": [1, null]}'),
        ({"regex": "z{2}"}, lambda text: text == "zz"),
    ],
)
def test_the_fields_of_other_servers_hold_on_both_routes(server, fields, fits):
    assert all(map(fits, contents(ok(server.chat(temperature=1, n=2, max_tokens=400, **fields)))))
    body = ok(server.complete("hi", temperature=1, n=2, **fields))
    assert all(fits(choice["text"]) for choice in body["choices"])


def test_any_json_object_is_an_object_or_the_beginning_of_one(server):
    body = ok(server.chat(temperature=1, n=6, seed=3, max_tokens=80, response_format={"type": "json_object"}))
    for choice in body["choices"]:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def calls_of(body):
    found = []
    for choice in body["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        found += [call["function"] for call in choice["message"]["tool_calls"]]
    return found


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            },
            {"get_weather"},
        ),
    ],
)
def test_a_call_that_is_asked_for_is_made(server, choice, names):
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "temperature": 1, "seed": 2}
    found = calls_of(ok(server.chat(n=6, **fields)))
    assert len(found) == 6
    assert {call["name"] for call in found} <= names
    for call in found:
        jsonschema.validate(json.loads(call["arguments"]), PARAMETERS[call["name"]])
    assert calls_of(ok(server.chat(response_format=wanted(SCHEMA), **fields)))


def test_a_call_that_is_asked_for_streams(server):
    text = server.chat(stream=True, tools=[WEATHER], tool_choice="required", temperature=1)[2]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(text)]
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert [function["name"] for function in functions if "name" in function] == ["get_weather"]
    arguments = json.loads("".join(function.get("arguments", "") for function in functions))
    jsonschema.validate(arguments, PARAMETERS["get_weather"])


def test_the_length_of_an_answer_can_be_fixed(server):
    body = ok(server.chat(ignore_eos=True, max_tokens=20, logit_bias={"257": 100}))
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (20, "length")
    body = ok(server.chat(min_tokens=7, max_tokens=20, logit_bias={"257": 100}))
    assert body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": wanted({"properties": {"a": {"type": "x"}}})}, "response_format", "#/properties/a"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "compiled"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "Only one"),
        ({"tools": [TIME], "tool_choice": "required", "regex": "a"}, "regex", "exclude each other"),
        (
            {
                "tools": [
                    TIME,
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}},
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
            "not",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(server, fields, param, said):
    status, _, body = server.chat(**fields)
    assert (status, body["error"]["param"], body["error"]["type"]) == (400, param, "invalid_request_error")
    assert said in body["error"]["message"]
    assert ok(server.chat(max_tokens=1))


def test_a_grammar_that_fails_on_the_way_fails_its_request_and_no_other(server, monkeypatch):
    monkeypatch.setattr(constraints, "_BUDGET_S", -1.0)
    for stream in (False, True):
        status, _, body = server.chat(regex="x{5}", stream=stream)
        error = body["error"] if status == 400 else json.loads(body.split("data: ")[-1])["error"]
        assert (status, error["type"]) == (200 if stream else 400, "invalid_request_error")
        assert "takes too long" in error["message"]
    assert server.scheduler.health().running == 0
    assert ok(server.chat(max_tokens=2))


@pytest.fixture(scope="module")
def fake():
    with serving() as running:
        yield running


def test_a_grammar_that_the_model_cannot_serve_is_refused(fake):
    status, _, body = fake.chat(guided_grammar="start: <|no_such_token|>")
    assert (status, body["error"]["param"]) == (400, "guided_grammar")
    assert "no_such_token" in body["error"]["message"]


def test_without_the_extra_everything_else_works(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a"},
        {"tools": [TIME], "tool_choice": "required"},
    ):
        status, _, body = fake.chat(**fields)
        assert status == 400
        assert "pip install 'mlx-serve-http[structured]'" in body["error"]["message"]
    ok(fake.chat(tools=[TIME], response_format={"type": "text"}))


# What ended the server, or took a core and its memory for good, when grammars were compiled in its process.

HUGE = "((a{1000}){1000}){10}"
DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000)) + '\nr3000: "a"'
ENDLESS = {"type": "integer", "multipleOf": 99999989}


def tool(schema):
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": schema}, "required": ["a"]}},
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"guided_regex": HUGE}, None),
        ({"response_format": wanted({"type": "string", "pattern": HUGE})}, None),
        ({"tools": [tool({"type": "string", "pattern": HUGE})], "tool_choice": "required"}, None),
        ({"guided_regex": "a?" * 39800}, "longer than 16384 characters"),
        ({"guided_grammar": DEEP}, "lead too deeply"),
        ({"grammar": DEEP}, "lead too deeply"),
        ({"json_schema": ENDLESS}, "more than 1 s of CPU time"),
        ({"tools": [tool(ENDLESS)], "tool_choice": "required"}, "more than 1 s of CPU time"),
    ],
)
def test_no_grammar_ends_the_server(server, fields, said):
    stop = threading.Event()
    others = []

    def stream():
        while not stop.is_set():
            others.append(server.chat(max_tokens=2)[0])

    beside = threading.Thread(target=stream)
    beside.start()
    try:
        status, _, body = server.chat(max_tokens=8, **fields)
    finally:
        stop.set()
        beside.join()
    assert status == (400 if said else 200)
    assert said is None or said in body["error"]["message"]
    assert set(others) == {200}
    assert contents(ok(server.chat(guided_choice=["yes"]))) == ["yes"]


def test_a_grammar_is_compiled_no_longer_than_its_client_waits():
    # There is one place, for as long as the first client waits.
    limits = grammar_child.GrammarLimits(cpu_s=600, memory_bytes=2**40, at_once=1)
    with serving(grammar_limits=limits) as running:
        leaving = running.connection()
        body = {"messages": [{"role": "user", "content": "hi"}], "json_schema": ENDLESS}
        leaving.request("POST", "/v1/chat/completions", json.dumps(body))
        answers = []
        staying = threading.Thread(target=lambda: answers.append(running.chat(guided_choice=["a"])[0]))
        staying.start()
        leaving.close()
        staying.join(DEADLINE_S)
        assert answers == [200]


# Anthropic's dialect

READ = {"name": "get_time", "input_schema": {"type": "object", "maxProperties": 0}}
ASK = {"name": "get_weather", "input_schema": PARAMETERS["get_weather"]}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_message_s_forced_call_conforms(server, choice):
    fields = {"tools": [READ, ASK], "tool_choice": choice, "temperature": 1, "max_tokens": 200}
    names = set()
    for _ in range(4):
        message = messageskit.whole(server, model="tiny", **fields)
        (call,) = message["content"]
        assert (call["type"], message["stop_reason"]) == ("tool_use", "tool_use")
        jsonschema.validate(call["input"], PARAMETERS[call["name"]])
        names.add(call["name"])
    assert choice["type"] == "any" or names == {"get_weather"}
    streamed = messageskit.joined(messageskit.stream(server, model="tiny", **fields))
    (call,) = streamed["content"]
    jsonschema.validate(json.loads(call["input"]), PARAMETERS[call["name"]])


@pytest.mark.parametrize("field", [{"output_config": {"format": ...}}, {"output_format": ...}])
def test_a_message_s_format_holds(server, field):
    wanted_format = {"type": "json_schema", "schema": SCHEMA}
    fields = json.loads(json.dumps(field, default=lambda _: wanted_format))
    message = messageskit.whole(server, model="tiny", temperature=1, **fields)
    (block,) = message["content"]
    jsonschema.validate(json.loads(block["text"]), SCHEMA)


def test_a_message_s_schema_that_cannot_be_compiled_names_its_field(server):
    fields = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}
    status, _, body = messageskit.ask(server, model="tiny", **fields)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "output_config.format.schema" in body["error"]["message"]


# The Responses dialect

FLAT_WEATHER = {"type": "function"} | WEATHER["function"]
TIME_FLAT = {"type": "function"} | TIME["function"]
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " WORD " ***"\nWORD: /[a-z]{3}/'}
CODE = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}"}


def custom(name, form):
    return {"type": "custom", "name": name, "format": form}


def respond(server, **fields):
    return server.request(
        "POST", "/v1/responses", {"input": "hi", "temperature": 1, "max_output_tokens": 400, **fields}
    )


def outputs(answer):
    body = ok(answer)
    assert body["status"] == "completed", body
    return body["output"]


def test_the_format_of_a_response_holds(server):
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    for seed in range(3):
        (message,) = outputs(respond(server, text={"format": form}, seed=seed))
        jsonschema.validate(json.loads(message["content"][0]["text"]), SCHEMA)


def test_a_response_s_call_that_is_asked_for_is_made(server):
    tools = [FLAT_WEATHER, {"type": "web_search"}]
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        (call,) = outputs(respond(server, tools=tools, tool_choice=choice))
        assert (call["type"], call["name"]) == ("function_call", "get_weather")
        jsonschema.validate(json.loads(call["arguments"]), PARAMETERS["get_weather"])


@pytest.mark.parametrize(("form", "pattern"), [(PATCH, r"\*\*\* [a-z]{3} \*\*\*"), (CODE, "[0-9]{4}")])
def test_the_grammar_of_a_custom_tool_that_is_asked_for_holds(server, form, pattern):
    tools = [custom("edit", form), FLAT_WEATHER]
    (call,) = outputs(respond(server, tools=tools, tool_choice={"type": "custom", "name": "edit"}))
    assert (call["type"], call["name"]) == ("custom_tool_call", "edit")
    assert re.fullmatch(pattern, call["input"]), call["input"]
    text = respond(server, tools=tools[:1], tool_choice="required", stream=True)[2]
    done = [json.loads(line[6:]) for line in text.splitlines() if line.startswith('data: {"type":"response.completed"')]
    assert re.fullmatch(pattern, done[0]["response"]["output"][0]["input"])


def test_a_regex_holds_beside_other_tools_too(server):
    for seed in range(4):
        (call,) = outputs(respond(server, tools=[custom("edit", CODE), TIME_FLAT], tool_choice="required", seed=seed))
        assert call["name"] in ("edit", "get_time")
        if call["name"] == "edit":
            assert re.fullmatch("[0-9]{4}", call["input"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format"),
        (
            {"tools": [custom("edit", CODE | {"definition": "("})], "tool_choice": "required"},
            "tools[0].format.definition",
        ),
        (
            {"tools": [custom("edit", CODE | {"definition": "("}), TIME_FLAT], "tool_choice": "required"},
            "tools[0].format.definition",
        ),
        (
            {
                "tools": [TIME_FLAT, {"type": "function", "name": "f", "parameters": {"not": {}}, "strict": True}],
                "tool_choice": "required",
            },
            "tools[1].parameters",
        ),
        ({"tools": [TIME_FLAT], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_a_response_cannot_be_held_to_is_refused(server, fields, param):
    status, _, body = respond(server, **fields)
    assert (status, body["error"]["param"]) == (400, param), body


def test_a_format_gives_way_to_a_call_in_a_response(server):
    fields = {"tools": [TIME_FLAT], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
    assert outputs(respond(server, **fields))[0]["type"] == "function_call"


def test_the_next_turn_of_a_conversation_needs_no_new_prefill_of_the_one_before(server):
    first = ok(respond(server, input="Say something at some length.", max_output_tokens=8, text={}))
    usage = ok(respond(server, input="More.", max_output_tokens=4, previous_response_id=first["id"]))["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
    assert usage["input_tokens"] > first["usage"]["total_tokens"] - 1
