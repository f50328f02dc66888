"""The Responses dialect over real sockets: shapes, events, fields, the store. The model's answers are scripted."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from mlx_serve.api.response_store import ResponseStore
from mlx_serve.api.responses.items import Item, Other, as_list
from mlx_serve.testing import FakeTokenizer
from mlx_serve.values import ApiError, ClientGone
from tests.sockets import requiredkeys
from tests.sockets.responsekit import COMPACTED, events_of, joined, kinds, plain, scripted
from tests.waiting import DEADLINE_S, until

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
CALL = '<tool_call>get_weather {"city": "Paris"}</tool_call>'
NAMESPACE = {"type": "namespace", "name": "mcp"}
USER = {"role": "user", "content": "Weather in Paris?"}


@pytest.fixture(scope="module")
def server():
    with scripted() as script:
        yield script


@pytest.fixture
def model(server):
    """With no answers left over from another test."""
    server.answers.clear()
    return server


def items(response, kind=None):
    return [item for item in response["output"] if kind in (None, item["type"])]


def text_of(response):
    return "".join(part["text"] for item in items(response, "message") for part in item["content"])


# Shapes


def test_a_response_has_openai_s_shape(model):
    response = model.whole("Hello.", input="hi", metadata={"a": "b"}, instructions="Be kind.")
    assert response["id"].startswith("resp_")
    (message,) = response["output"]
    assert message.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}
    assert message == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "fake")
    assert (response["error"], response["incomplete_details"]) == (None, None)
    assert (response["instructions"], response["metadata"]) == ("Be kind.", {"a": "b"})
    n = len(model.prompts[-1])
    assert response["usage"] == {
        "input_tokens": n,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n + 7,
    }


def test_the_settings_of_a_request_are_given_back(model):
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 100,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "truncation": "auto",
        "user": "u",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "tools": [WEATHER],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    }
    response = model.whole("Hello.", **asked, service_tier="flex", top_logprobs=2)
    expected = asked | {"text": {"format": {"type": "text"}, "verbosity": "low"}, "service_tier": "default"}
    assert {key: response[key] for key in expected} == expected


def test_what_a_response_does_not_know_is_null_from_the_beginning(model):
    whole, found = model.both("Hello.", presence_penalty=0.5, frequency_penalty=-1)
    begun = found[0]["response"]
    assert (begun["usage"], begun["previous_response_id"]) == (None, None)
    assert whole["usage"] is not None
    assert (whole["presence_penalty"], whole["frequency_penalty"]) == (0.5, -1)


def test_a_format_and_a_tool_are_given_back_with_all_their_keys(model):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "schema": {"type": "string"}}
    bare = {"type": "function", "name": "f"}
    response = model.whole('"a"', text={"format": form}, tools=[bare])
    assert response["text"]["format"] == {**form, "name": "response", "description": None, "strict": False}
    assert response["tools"] == [{**bare, "description": None, "parameters": None, "strict": None}]


def test_kept_items_have_all_their_keys(model):
    said = [{"type": "output_text", "text": "a"}]
    items = [{"role": "assistant", "content": said}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    listed = model.listed(model.whole("Hello.", input=items)["id"])["data"]
    assert listed[0]["content"] == [{**said[0], "annotations": [], "logprobs": []}]
    assert listed[1]["content"] == [{"type": "input_text", "text": "b"}]


def test_max_output_tokens_leaves_a_response_incomplete(model):
    response, found = model.both("Hello.", max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (text_of(response), response["output"][0]["status"]) == ("Hel", "incomplete")
    assert response["completed_at"] is None
    assert found[-1]["type"] == "response.incomplete"


def test_without_a_limit_an_answer_is_as_long_as_the_context_allows(model):
    assert text_of(model.whole("x" * 2000)) == "x" * 2000


def test_an_empty_answer_is_an_empty_message(model):
    response, _ = model.both("")
    assert text_of(response) == ""
    assert [item["type"] for item in response["output"]] == ["message"]


def test_logprobs_come_when_they_are_asked_for(model):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response, found = model.both("ab", **asked)
    entries = response["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == entries
    assert model.whole("ab", top_logprobs=1)["output"][0]["content"][0]["logprobs"] == []


# Streams


def test_a_stream_has_every_event_in_its_order(model):
    _, found = model.both("Héllo 🐉.")
    assert kinds(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert joined(found, "output_text") == "Héllo 🐉."
    assert found[0]["response"]["output"] == []
    assert found[0]["response"]["status"] == "in_progress"
    assert len({event["response"]["id"] for event in found if "response" in event}) == 1


def test_reasoning_is_an_item_with_its_text(model):
    response, found = model.both("<think>Hm.</think>Yes.")
    reasoning, _ = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (reasoning["summary"], "encrypted_content" in reasoning) == ([], False)
    assert text_of(response) == "Yes."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 3
    assert joined(found, "reasoning_text") == "Hm."
    assert kinds(found)[2:8] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_a_client_that_asks_for_a_summary_finds_the_reasoning_there(model):
    response, found = model.both("<think>Hm.</think>Yes.", reasoning={"summary": "auto"})
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in response["output"][0]
    assert joined(found, "reasoning_summary_text") == "Hm."
    assert kinds(found)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]


def test_a_function_call_streams_its_arguments(model):
    response, found = model.both(f"One moment.{CALL}", tools=[WEATHER])
    message, call = response["output"]
    assert message["content"][0]["text"] == "One moment."
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == (
        "get_weather",
        {"city": "Paris"},
        "completed",
    )
    assert kinds(found)[8:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added = next(e["item"] for e in found if e["type"].endswith("added") and e.get("item", {}).get("name"))
    assert (added["arguments"], added["status"]) == ("", "in_progress")
    assert joined(found, "function_call_arguments") == call["arguments"]


def test_two_calls_are_two_items_unless_only_one_is_allowed(model):
    assert len(items(model.both(CALL + CALL, tools=[WEATHER])[0], "function_call")) == 2
    one = model.both(CALL + CALL, tools=[WEATHER], parallel_tool_calls=False)[0]
    assert len(items(one, "function_call")) == 1


def test_a_custom_tool_gets_free_text(model):
    written = '*** Begin Patch\n+"é" \\d\n*** End Patch'
    call = f"<tool_call>apply_patch {json.dumps({'input': written})}</tool_call>"
    response, found = model.both(call, tools=[PATCH])
    (item,) = response["output"]
    assert item["id"].startswith("ctc_")
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", written)
    assert kinds(found)[2:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert joined(found, "custom_tool_call_input") == written


def test_the_tools_of_a_namespace_are_told_apart_by_it(model):
    tools = [{"type": "namespace", "name": "mcp__disk", "description": "", "tools": [WEATHER | {"name": "list"}]}]
    response = model.whole("<tool_call>mcp__disk__list {}</tool_call>", tools=tools)
    (call,) = response["output"]
    assert (call["namespace"], call["name"]) == ("mcp__disk", "list")
    assert "[tools mcp__disk__list]" in model.asked()
    back = [USER, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}]
    model.whole("One file.", input=back, tools=tools)
    assert "<tool_call>mcp__disk__list {}</tool_call>\n[tool]a.txt" in model.asked()


def test_a_call_of_an_unknown_tool_is_passed_on(model):
    assert model.whole("<tool_call>other {}</tool_call>", tools=[WEATHER])["output"][0]["name"] == "other"


def test_what_only_openai_can_run_is_skipped(model):
    hosted = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "local_shell"}]
    response = model.whole("Hello.", tools=[*hosted, WEATHER])
    assert "[tools get_weather]" in model.asked()
    assert [tool["type"] for tool in response["tools"]] == ["web_search", "mcp", "local_shell", "function"]


def test_the_model_is_told_of_the_chosen_tools_only(model):
    other = WEATHER | {"name": "other"}
    allowed = [{"type": "function", "name": "other"}, {"type": "web_search"}]
    choices = [
        ("none", "[user]"),
        ("auto", "[tools get_weather other]"),
        ({"type": "allowed_tools", "mode": "auto", "tools": allowed}, "[tools other]"),
        ({"type": "allowed_tools", "mode": "auto", "tools": allowed[1:]}, "[user]"),
    ]
    for choice, shown in choices:
        model.whole("Hello.", tools=[WEATHER, other], tool_choice=choice)
        assert model.asked().startswith(shown)


def test_a_silent_stream_is_kept_alive(monkeypatch):
    monkeypatch.setattr("mlx_serve.api.generation.BEAT_EVERY_S", 0.02)
    monkeypatch.setattr("mlx_serve.api.generation.ADMISSION_WAIT_S", 0.02)
    go = threading.Event()
    with scripted(on_step=lambda _: go.wait(DEADLINE_S)) as script:
        script.answers.append("Hello.")
        connection = script.server.connection()
        connection.request("POST", "/v1/responses", json.dumps({"input": "hi", "stream": True}))
        response = connection.getresponse()
        seen = b""
        while b": keep-alive\n\n" not in seen or seen.count(b"event: response.in_progress\n") < 2:
            seen += response.read1()
        go.set()
        found = events_of(seen.decode() + response.read().decode())
        assert joined(found, "output_text") == "Hello."
        connection.close()


def test_an_error_in_mid_stream_is_the_last_event():
    n_steps = iter(range(100))

    def fail(_jobs):
        if next(n_steps) == 3:
            raise RuntimeError("broken")

    with scripted(on_step=fail) as script:
        found = script.streamed("Hello, hello.")
        assert found[-1]["type"] == "response.failed"
        response = found[-1]["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert (text_of(response), response["output"][0]["status"]) == ("Hel", "incomplete")
        assert script.get(response["id"])[0] == 404


def test_an_error_before_a_stream_is_no_stream():
    with scripted(max_queue=1) as script:
        script.server.scheduler.stop()
        status, headers, body = script.post(input="hi", stream=True)
        assert (status, headers.get_content_type()) == (503, "application/json")
        assert body["error"]["type"] == "server_error"


# Input


def test_messages_of_every_role_and_form_reach_the_model(model):
    given = [
        {"role": "system", "content": "Be brief."},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": "d"},
    ]
    model.whole("Hello.", input=given, instructions="First.")
    turns = ["[system]First.", "[system]Be brief.", "[system]Be kind.", "[user]ab", "[assistant]c", "[assistant]No."]
    assert model.asked() == "\n".join([*turns, "[user]d", "[assistant]"])


def test_calls_and_outputs_of_every_kind_reach_the_model(model):
    given = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x\ny"},
        {"type": "local_shell_call", "id": "c3", "call_id": "c3", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "local_shell_call_output", "id": "c3", "output": "three"},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["pwd"]}},
        {
            "type": "shell_call_output",
            "call_id": "c4",
            "output": [{"stdout": "/", "stderr": "!", "outcome": {"type": "exit", "exit_code": 2}}],
        },
        {"type": "apply_patch_call", "call_id": "c5", "status": "completed", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "c5", "status": "completed"},
    ]
    model.whole("Done.", input=given)
    assert model.asked().split("\n[", 1)[1] == (
        'assistant]<think>Hm.</think><tool_call>f {"a": 1}</tool_call><tool_call>p {"input": "x\\ny"}</tool_call>'
        '<tool_call>local_shell {"command": ["ls"]}</tool_call>\n[tool]one\n[tool]two\n[tool]three\n'
        '[assistant]<tool_call>shell {"commands": ["pwd"]}</tool_call>\n[tool]/!\n(exit code 2)\n'
        '[assistant]<tool_call>apply_patch {"type": "delete_file"}</tool_call>\n[tool]\n[assistant]'
    )


def test_items_without_a_place_in_a_prompt_are_skipped(model):
    others = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "compaction", "encrypted_content": "abc"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB"},
    ]
    model.whole("Hello.", input=[*others, USER])
    assert model.asked() == "[user]Weather in Paris?\n[assistant]"


def test_a_picture_in_a_tool_s_output_is_told_to_the_model(model):
    given = [
        USER,
        {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}],
        },
    ]
    model.whole("Hello.", input=given)
    assert "[tool][image omitted: this model reads text only]" in model.asked()


# The prompts of a conversation


TURNS = [
    f"<think>I need the weather.</think>One moment.{CALL}",
    "<think>It rains.</think>Take an umbrella.",
    "You are welcome.",
]
OUTPUT = "rain"


def own_history(model, **asked):
    """A client that sends everything again."""
    history = [USER]
    for answer, said in zip(TURNS, (OUTPUT, "Thanks.", None), strict=True):
        response = model.whole(answer, input=history, **asked)
        history = [*history, *response["output"], next_input(response, said)]


def next_input(response, said):
    calls = items(response, "function_call")
    if calls:
        return {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": said}
    return {"role": "user", "content": said or "Bye."}


def kept_history(model, **asked):
    """A client that names the response before."""
    said, before = USER, {}
    for answer, answered in zip(TURNS, (OUTPUT, "Thanks.", None), strict=True):
        response = model.whole(answer, input=[said], **asked, **before)
        said, before = next_input(response, answered), {"previous_response_id": response["id"]}


@pytest.mark.parametrize("talk", [own_history, kept_history])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"reasoning": {"summary": "auto"}},
        {"include": ["reasoning.encrypted_content"]},
    ],
)
def test_each_prompt_begins_with_the_one_before_and_its_answer(model, talk, asked):
    model.prompts.clear()
    talk(model, tools=[WEATHER], **asked)
    first, second, third = model.prompts
    for before, answer, after in ((first, TURNS[0], second), (second, TURNS[1], third)):
        assert after[: len(before)] == before
        assert model.tokenizer.decode(after[len(before) :]).startswith(answer)


def test_an_empty_input_is_a_message_also_when_it_is_kept(model):
    first = model.whole("Hello.", input="")
    model.whole("Yes.", input="more", previous_response_id=first["id"])
    assert model.asked() == model.asked(-2) + "Hello.\n[user]more\n[assistant]"
    assert [item["content"][0]["text"] for item in model.listed(first["id"])["data"]] == [""]


def test_both_ways_of_going_on_give_the_same_prompts(model):
    model.prompts.clear()
    own_history(model, tools=[WEATHER])
    kept_history(model, tools=[WEATHER])
    assert model.prompts[:3] == model.prompts[3:]


def test_reasoning_comes_back_from_clients_that_keep_only_what_is_encrypted(model):
    response = model.whole(TURNS[0], tools=[WEATHER], include=["reasoning.encrypted_content"])
    reasoning, *rest = response["output"]
    kept = {key: reasoning[key] for key in ("type", "id", "encrypted_content")} | {"summary": []}
    model.whole("Yes.", input=[USER, kept, *rest, next_input(response, "rain")], tools=[WEATHER])
    assert "<think>I need the weather.</think>One moment." in model.asked()


# The store


def test_instructions_are_not_carried_over(model):
    first = model.whole("Hello.", input="hi", instructions="Rhyme.")
    model.whole("Yes.", input="more", previous_response_id=first["id"], instructions="Sing.")
    assert model.asked() == "[system]Sing.\n[user]hi\n[assistant]Hello.\n[user]more\n[assistant]"


def test_a_stored_response_is_given_back_as_it_was(model):
    response = model.whole("Hello.")
    assert model.get(response["id"])[2] == response
    last = model.streamed("<think>Hm.</think>Hello.")[-1]["response"]
    assert model.get(last["id"])[2] == last
    status, _, answer = model.server.request("DELETE", f"/v1/responses/{last['id']}")
    assert (status, answer) == (200, {"id": last["id"], "object": "response", "deleted": True})
    for method in ("GET", "DELETE"):
        status, _, answer = model.server.request(method, f"/v1/responses/{last['id']}")
        assert (status, answer["error"]["type"]) == (404, "invalid_request_error")


def test_a_response_that_is_not_stored_is_not_there(model):
    response = model.whole("Hello.", store=False)
    assert response["store"] is False
    assert model.get(response["id"])[0] == 404
    error = model.refused(previous_response_id=response["id"])
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


def test_input_items_come_in_pages(model):
    first = model.whole("Hello.", input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    second = model.whole(CALL, input="c", previous_response_id=first["id"], tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": second["output"][0]["call_id"], "output": "rain"}
    third = model.whole("It rains.", input=[output], previous_response_id=second["id"])
    every = model.listed(third["id"])
    kinds_of = [item["type"] for item in every["data"]]
    assert kinds_of == ["message"] * 4 + ["function_call", "function_call_output"]
    assert every["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert every["data"][2] == first["output"][0]
    assert (every["has_more"], every["first_id"]) == (False, every["data"][0]["id"])
    page = model.listed(third["id"], f"?limit=2&order=asc&after={every['data'][0]['id']}")
    assert (page["data"], page["has_more"]) == (every["data"][1:3], True)
    assert model.listed(third["id"], "")["data"] == every["data"][::-1]


def test_pages_come_to_an_end_also_where_a_client_gave_several_items_one_id(model):
    response = model.whole("Hello.", input=[USER | {"id": "msg_same"}] * 5)
    assert model.listed(response["id"], "?limit=2")["has_more"] is True
    assert model.listed(response["id"], "?limit=2&after=msg_same")["has_more"] is False


@pytest.mark.parametrize(("query", "param"), [("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")])
def test_a_bad_page_is_refused(model, query, param):
    response = model.whole("Hello.")
    status, _, body = model.get(f"{response['id']}/input_items?{query}")
    assert (status, body["error"]["param"]) == (400, param)


def test_an_item_may_be_named_by_its_id(model):
    response = model.whole(TURNS[0], tools=[WEATHER])
    references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    references[0] = {"id": references[0]["id"]}
    model.whole("Yes.", input=[USER, *references, next_input(response, "rain")], tools=[WEATHER])
    assert f"[assistant]{TURNS[0]}\n[tool]rain\n[assistant]" in model.asked()
    assert model.refused(input=[USER, {"type": "item_reference", "id": "msg_none"}])["param"] == "input[1].id"


def test_an_id_that_a_client_made_up_is_no_reference(model):
    model.whole("Hello.", input=[USER | {"type": "message", "id": "msg_mine"}])
    assert model.refused(input=[{"type": "item_reference", "id": "msg_mine"}])["param"] == "input[0].id"


def test_a_conversation_that_has_grown_too_large_is_refused(model, monkeypatch):
    monkeypatch.setattr("mlx_serve.api.responses.resolved_request.MAX_CONVERSATION_BYTES", 1000)
    first = model.whole("Hello.", input="x" * 500)
    second = model.whole("Hello.", input="x" * 500, previous_response_id=first["id"])
    assert model.refused(previous_response_id=second["id"])["param"] == "previous_response_id"


def test_what_the_server_does_not_know_is_not_kept():
    junk, store = [[]] * 1000, ResponseStore()
    others = [{"type": "x", "a": junk}, {"type": "web_search_call", "id": "ws_1", "action": junk}]
    with scripted(store=store) as script:
        response = script.whole("Hello.", input=[others[0], USER, others[1]], ignored=junk)
        assert [item["type"] for item in script.listed(response["id"])["data"]] == ["message"]
    assert store.n_bytes < 4000


def test_a_conversation_of_too_many_values_is_refused():
    """Each request that goes on from it would parse them all again."""
    with scripted(max_json_values=1500) as script:
        first = script.whole("Hello.", input=[USER | {"ignored": [0] * 1000}])
        second = script.whole("Hello.", previous_response_id=first["id"], input=[USER | {"ignored": [0] * 1000}])
        error = script.refused(previous_response_id=second["id"])
        assert (error["param"], error["code"]) == ("previous_response_id", "too_many_json_values")


def test_items_named_again_and_again_count_each_time(model, monkeypatch):
    monkeypatch.setattr("mlx_serve.api.responses.resolved_request.MAX_CONVERSATION_BYTES", 20_000)
    response = model.whole("x" * 1000)
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    model.whole("Yes.", input=[USER, *[reference] * 2])
    error = model.refused(input=[USER, *[reference] * 100])
    assert "20000 bytes" in error["message"]
    assert error["param"].startswith("input[")


def test_an_output_is_parsed_once_however_many_of_its_items_are_named(model, monkeypatch):
    response = model.whole(TURNS[0], tools=[WEATHER])
    references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    parsed = []
    loads = json.loads
    monkeypatch.setattr(
        "mlx_serve.api.responses.resolved_request.json.loads",
        lambda text, **more: parsed.append(text) or loads(text, **more),
    )
    model.whole("Yes.", input=[USER, *references * 5, next_input(response, "rain")], tools=[WEATHER])
    assert len([text for text in parsed if isinstance(text, bytes) and references[0]["id"].encode() in text]) == 1


def test_the_store_can_be_off():
    with scripted(store=ResponseStore(max_count=0)) as script:
        response = script.whole("Hello.")
        assert response["store"] is False
        assert script.get(response["id"])[0] == 404


def test_input_tokens_counts_a_prompt(model):
    body = {"input": [USER], "tools": [WEATHER], "instructions": "Be kind."}
    response = model.whole("Hello.", **body)
    status, _, answer = model.post("/input_tokens", **body)
    assert status == 200
    assert answer == {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}


# What is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": "a\ud800"}, "input[0].content"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"include": ["x", 1]}, "include[1]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [NAMESPACE | {"tools": [WEATHER] * 1025}]}, "tools[0].tools"),
        ({"tools": [NAMESPACE | {"tools": [WEATHER] * 600}] * 2}, "tools"),
        (
            {"tools": [PATCH | {"format": {"type": "grammar", "syntax": "bnf"}}]},
            "tools[0].format.syntax",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}, "tools": [WEATHER]}, "tool_choice"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "x" * 200_000}, "input"),
    ],
)
def test_bad_input_names_its_field(model, fields, param):
    error = model.refused(**fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_what_json_text_cannot_give_back_is_refused(model):
    for value in ('"a\\ud800"', "1e999"):
        raw = '{"input": "hi", "tools": [{"type": "web_search", "x": ' + value + "}]}"
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            status, _, body = model.server.request("POST", path, raw)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "asked",
    [
        '{"stream": true, "input": [{"role": "user", "content": "x"}, %s]}',
        '{"stream": true, "input": "x", "tools": [%s]}',
    ],
)
def test_what_is_nested_too_deeply_is_refused_before_there_is_an_answer(model, asked):
    """At one depth or another it could be read and not written, as an event or to be kept."""
    for depth in range(850, 1000):
        nested = '{"type": "other", "x": ' + "[" * depth + "]" * depth + "}"
        model.answers[:] = ["Hello."]
        status, _, answer = model.server.request("POST", "/v1/responses", asked % nested)
        assert status == 400 or "event: response.completed" in answer


def test_a_prompt_that_does_not_fit_says_so(model):
    error = model.refused(input="x" * 5000)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 200_000}]}
    assert model.refused(input=[USER, thought, USER])["code"] == "context_length_exceeded"


def test_the_oldest_turns_are_left_out_when_the_client_says_so(model):
    talk = [{"role": "system", "content": "Be kind."}]
    for i in range(20):
        talk += [{"role": "user", "content": f"q{i} " + "x" * 400}, {"role": "assistant", "content": f"a{i}"}]
    talk.append({"role": "user", "content": "last"})
    assert model.refused(input=talk)["code"] == "context_length_exceeded"
    model.whole("Hello.", input=talk, truncation="auto", max_output_tokens=100)
    left = model.asked()
    assert left.startswith("[system]Be kind.\n[user]q1")
    assert left.endswith("a19\n[user]last\n[assistant]")
    # One turn more would not have left room for the answer.
    assert 4096 - 100 - 430 < len(left) <= 4096 - 100
    assert model.refused(input="x" * 5000, truncation="auto")["code"] == "context_length_exceeded"
    assert model.refused(input="x" * 200_000, truncation="auto")["code"] == "context_length_exceeded"
    huge = [{"role": "user", "content": "x" * 200_000}, {"role": "assistant", "content": "a"}, talk[-1]]
    model.whole("Hello.", input=huge, truncation="auto")
    assert model.asked() == "[user]last\n[assistant]"


def test_a_long_conversation_is_tokenized_once_to_be_cut(model, monkeypatch):
    encoded = []
    encode = FakeTokenizer.encode
    monkeypatch.setattr(
        FakeTokenizer, "encode", lambda self, text, **more: encoded.append(len(text)) or encode(self, text, **more)
    )
    talk = []
    for i in range(140):
        talk += [
            {"role": "user", "content": f"q{i}" + "x" * 200},
            {"role": "assistant", "content": f"a{i}" + "y" * 200},
        ]
    model.whole("Hello.", input=[*talk, USER], truncation="auto", max_output_tokens=100)
    assert 3500 < len(model.asked()) <= 4096 - 100
    # The prompt, and a quarter of it to see how long its tokens are.
    assert sum(encoded) < 1.3 * 4096


def test_a_client_that_leaves_ends_the_tokenizing(model, monkeypatch):
    begun, gone = threading.Event(), threading.Event()

    def encode(self, text, *, special, check=None):
        begun.set()
        try:
            while True:
                check(0)
        except ClientGone:
            gone.set()
            raise

    monkeypatch.setattr(FakeTokenizer, "encode", encode)
    connection = model.server.connection()
    connection.request("POST", "/v1/responses", json.dumps({"input": "hi"}), {"Content-Type": "application/json"})
    assert begun.wait(DEADLINE_S)
    connection.close()
    assert gone.wait(DEADLINE_S)


def compacted(model, answer: str, **body) -> dict:
    model.answers.append(answer)
    status, _, body = model.post("/compact", **body)
    assert status == 200, body
    COMPACTED.validate_python(body, strict=True)
    requiredkeys.check_usage(body["usage"])
    [item] = body["output"]
    requiredkeys.check_item(item)
    return item


def test_a_conversation_is_compacted_into_one_item_that_later_requests_take(model):
    talk = [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Hello, Ada."}]
    item = compacted(model, "<think>hm</think>Her name is Ada.", input=talk, instructions="Be kind.")
    begun = "[system]Be kind.\n[user]My name is Ada.\n[assistant]Hello, Ada.\n[user]Write a summary"
    assert model.asked().startswith(begun)
    model.whole("Ada.", input=[item, {"role": "user", "content": "Who am I?"}], instructions="Be kind.")
    summary = "What was said before, in short:\n\n<summary>\nHer name is Ada.\n</summary>"
    assert model.asked() == f"[system]Be kind.\n[user]{summary}\n[user]Who am I?\n[assistant]"
    # And it can be compacted again.
    again = compacted(model, "Still Ada.", input=[item])
    assert "Her name is Ada." in model.asked()
    assert again["id"] != item["id"]


def test_a_kept_conversation_is_compacted_by_its_id(model):
    response = model.whole("Hello.", input="hi there")
    compacted(model, "They said hi.", previous_response_id=response["id"])
    assert "[user]hi there\n[assistant]Hello.\n[user]Write a summary" in model.asked()


def test_a_compaction_of_another_server_is_left_out(model):
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA"}
    model.whole("Hello.", input=[item, {"role": "user", "content": "hi"}])
    assert model.asked() == "[user]hi\n[assistant]"


def test_what_does_not_fit_into_the_context_is_compacted_without_its_oldest_turns(model):
    talk = [{"role": role, "content": f"{i}{'x' * 500}"} for i in range(10) for role in ("user", "assistant")]
    compacted(model, "Much.", input=talk, max_output_tokens=100)
    assert "[user]0x" not in model.asked()
    assert "[user]9x" in model.asked()


def test_a_model_that_writes_no_summary_is_an_error(model):
    model.answers.append("<think>hm</think>")
    status, _, body = model.post("/compact", input="hi")
    assert (status, body["error"]["type"]) == (500, "server_error")


def test_only_what_runs_in_the_background_can_be_cancelled(model):
    response = model.whole("Hello.")
    assert model.post(f"/{response['id']}/cancel")[0] == 400
    assert model.post("/resp_none/cancel")[0] == 404


def test_an_ended_response_is_not_streamed_again(model):
    response = model.whole("Hello.")
    status, _, body = model.get(f"{response['id']}?stream=true")
    assert (status, body["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses", 405),
        ("PUT", "/v1/responses", 405),
        ("GET", "/v1/responses/a/b", 404),
        ("GET", "/v1/responses/", 405),
    ],
)
def test_other_routes_are_not_there(model, method, path, status):
    assert model.server.request(method, path)[0] == status


def test_a_client_that_leaves_frees_its_place():
    with scripted(on_step=lambda _: threading.Event().wait(0.01)) as script:
        script.answers.append("x" * 4000)
        connection = script.server.connection()
        connection.request("POST", "/v1/responses", json.dumps({"input": "hi", "stream": True}))
        connection.getresponse().read1()
        connection.close()
        until(lambda: script.server.scheduler.health().running == 0, "a free place")


def test_two_responses_differ_in_their_ids_alone(model):
    assert plain(model.whole("Hello.")) == plain(model.whole("Hello."))


def test_a_mid_stream_error_of_the_engine_is_told_in_openai_s_words(model, monkeypatch):
    def refuse(self):
        yield from ()
        raise ApiError(429, "Too much.", type="rate_limit_error")

    monkeypatch.setattr("mlx_serve.api.generation.Generation._deltas", refuse)
    found = model.streamed("Hello.")
    assert found[-1]["response"]["error"] == {"code": "rate_limit_exceeded", "message": "Too much."}
    model.answers.clear()


# Whatever comes

EVERYTHING = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "x"}],
            "encrypted_content": "q",
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "f", "input": "x"},
        {"type": "shell_call", "call_id": "e", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "a", "stderr": "b", "outcome": {}}]},
        {"type": "web_search_call", "id": "ws_1"},
    ],
    "tools": [
        WEATHER,
        PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
        {"type": "namespace", "name": "n", "description": "", "tools": [WEATHER]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "max_output_tokens": 9,
}
JUNK = [None, True, -1, 1.5, 10**30, "", "x", "\ud800", "required", [], {}, [None], [[]], {"type": None}, {"type": ""}]
JUNK += [{"type": "x"}, {"type": []}, {"type": "message"}, {"type": "function"}, {"a": {"b": [1]}}]


def places(value, path=()):
    """The paths of all values in a JSON value."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in steps:
        yield (*path, key)
        yield from places(item, (*path, key))


@given(st.sampled_from(list(places(EVERYTHING))), st.sampled_from(JUNK), st.booleans())
def test_no_request_is_a_fault_of_ours(server, path, junk, stream):
    body = json.loads(json.dumps(EVERYTHING)) | {"stream": stream}
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = junk
    server.answers[:] = ["<think>t</think>Hello."]
    status, _, answer = server.server.request("POST", "/v1/responses", body)
    assert status in (200, 400), answer
    if status == 400:
        assert answer["error"]["message"]
        return
    # Not against the package's types: what a client makes up comes back as it was.
    response = json.loads(answer.split("data: ")[-1])["response"] if stream else answer
    # Without its limit the answer comes to its end.
    assert response["status"] in ("incomplete", "completed")
    assert server.get(response["id"])[2] == response
    status, _, listed = server.get(f"{response['id']}/input_items?order=asc")
    given = [TypeAdapter(Item).validate_python(item) for item in as_list(body["input"])]
    assert (status, len(listed["data"])) == (200, sum(not isinstance(item, Other) for item in given))
