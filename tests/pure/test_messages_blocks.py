"""Anthropic's messages as chat messages, and that a longer conversation's prompt begins with the shorter one's."""

import json
from itertools import pairwise

import pytest

from mlx_serve.api.anthropic.schema import CountRequest
from mlx_serve.api.body import parse
from mlx_serve.text.prompt import chat_prompt
from mlx_serve.values import ApiError
from tests.pure.formatkit import model

BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.123; cc_entrypoint=cli; cch=0aaa9;"}
TOOLS = [{"name": "Bash", "description": "Run it.", "input_schema": {"type": "object", "properties": {}}}]


def text(words: str, **fields) -> dict:
    return {"type": "text", "text": words, **fields}


def use(number: int, **arguments) -> dict:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "Bash", "input": arguments}


def result(number: int, content, **fields) -> dict:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": content, **fields}


def user(*blocks) -> dict:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def request(*messages, **fields) -> CountRequest:
    return parse(CountRequest, json.dumps({"messages": list(messages), **fields}).encode())


def chat(*messages, **fields) -> list[dict]:
    return request(*messages, **fields).chat_messages


def test_a_string_is_one_block():
    assert chat({"role": "user", "content": "hi"}) == chat(user(text("hi"))) == [{"role": "user", "content": "hi"}]


def test_results_come_before_the_text_and_calls_keep_their_ids():
    messages = chat(
        user(text("go")),
        assistant({"type": "thinking", "thinking": "hm", "signature": "x"}, text("Look."), use(1, a="ü"), use(2)),
        user(result(1, "ok"), text("also"), result(2, [text("no"), text("way")], is_error=True)),
    )
    calls = [("toolu_1", '{"a": "ü"}'), ("toolu_2", "{}")]
    assert messages[1] == {
        "role": "assistant",
        "content": "Look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": "Bash", "arguments": arguments}}
            for call_id, arguments in calls
        ],
    }
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "ok"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no\nway"},
        {"role": "user", "content": "also"},
    ]


def test_a_result_may_be_without_content():
    found = chat(user(text("go")), assistant(use(1)), user({"type": "tool_result", "tool_use_id": "toolu_1"}))
    assert found[-1] == {"role": "tool", "tool_call_id": "toolu_1", "content": ""}


def test_found_text_and_found_tools_are_text():
    hit = {"type": "search_result", "title": "T", "source": "http://a", "content": [text("b"), text("c")]}
    reference = {"type": "tool_reference", "tool_name": "Bash"}
    found = chat(user(hit), assistant(use(1)), user(result(1, [reference, hit])))
    assert found[0]["content"] == "T\nhttp://a\nb\nc"
    assert found[-1]["content"] == "Bash\nT\nhttp://a\nb\nc"


def test_a_picture_in_a_result_is_told_of():
    # Its client cannot take it back: refusing it would be the end of the session.
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    found = chat(user(text("go")), assistant(use(1)), user(result(1, [text("here"), picture])))
    assert found[-1]["content"] == "here\n[image omitted: this model reads text only]"


def test_what_anthropic_s_own_tools_did_is_left_out():
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "redacted_thinking", "data": "x"},
    ]
    assert chat(user(text("a")), assistant(*blocks, text("b")))[1] == {"role": "assistant", "content": "b"}


def test_turns_of_one_side_are_one_turn():
    found = chat(user(text("a")), user(text("b")), assistant(text("c")), assistant(text("d")), user())
    assert [(m["role"], m["content"]) for m in found] == [("user", "a\nb"), ("assistant", "cd"), ("user", "")]


@pytest.mark.parametrize("system", [
    "Be brief.",
    [text("Be brief.", cache_control={"type": "ephemeral"})],
    [BILLING, text("Be brief.")],
    BILLING["text"] + "\nBe brief.",
])  # fmt: skip
def test_the_billing_header_is_no_part_of_the_system_prompt(system):
    assert chat(user(text("a")), system=system)[0] == {"role": "system", "content": "Be brief."}


def test_a_system_prompt_of_nothing_is_none():
    assert chat(user(text("a")), system=[BILLING]) == chat(user(text("a")), system="") == chat(user(text("a")))


def test_system_messages_in_front_belong_to_the_system_prompt():
    said = {"role": "system", "content": "And kind."}
    assert chat(said, user(text("a")), system="Be brief.")[0]["content"] == "Be brief.\nAnd kind."


def test_the_model_is_told_of_all_tools_but_those_that_run_elsewhere():
    tools = [
        *TOOLS,
        TOOLS[0] | {"name": "Read", "type": "custom"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    one = {"type": "tool", "name": "Read"}
    for choice in ({"type": "auto"}, one):
        offered = request(user(text("a")), tools=tools, tool_choice=choice).offered_tools
        assert [tool["function"]["name"] for tool in offered] == ["Bash", "Read"]
    assert request(user(text("a")), tools=tools, tool_choice={"type": "none"}).offered_tools == []


# A conversation as Claude Code has it: each turn sends everything again, with a new billing header and with the cache
# marks moved on; reminders come as text beside results, and as system messages.
CONVERSATION = [
    user(
        text("<system-reminder>\nToday.\n</system-reminder>\n"), text("List it.", cache_control={"type": "ephemeral"})
    ),
    {"role": "system", "content": "Agents: none."},
    assistant({"type": "thinking", "thinking": "hm", "signature": "x"}, text("Let me."), use(1, command="ls")),
    user(result(1, "a.txt"), text("<system-reminder>\nMind.\n</system-reminder>")),
    assistant(use(2, command="cat a.txt"), use(3, command="pwd")),
    user(result(2, "hi", is_error=False), result(3, [text("/x")])),
    {"role": "system", "content": "The file has changed."},
    assistant(text("It says hi.")),
    user(text("Thanks.")),
    assistant(text("Welcome.")),
    user(text("Bye.")),
]
ENDS = [2, 4, 7, 9, 11]


def chatml(messages, tools, options) -> str:
    lines = [json.dumps(tools)] if tools else []
    lines += [f"[{m['role']}]{json.dumps({k: v for k, v in m.items() if k != 'role'})}" for m in messages]
    return "\n".join([*lines, "[assistant]"])


def alternating(messages, tools, options) -> str:
    """As Mistral's: no system message but the first, and users and assistants in turn."""
    sides = [m["role"] for m in messages if m["role"] in ("user", "assistant") and not m.get("tool_calls")]
    if any(a == b for a, b in pairwise(sides)):
        raise ApiError(400, "Conversation roles must alternate", param="messages")
    return chatml(messages, tools, options)


def without_system(messages, tools, options) -> str:
    """As Gemma's first ones."""
    if any(m["role"] == "system" for m in messages):
        raise ApiError(400, "System role not supported", param="messages")
    return alternating(messages, tools, options)


@pytest.mark.parametrize("template", [chatml, alternating, without_system])
@pytest.mark.parametrize("source", ["{{ tools }} {{ tool_calls }}", "{{ messages }}"])
def test_a_longer_conversation_s_prompt_begins_with_the_shorter_one_s(template, source):
    tokenizer = model(render=template, template=source)
    before: tuple[int, ...] = ()
    for i, end in enumerate(ENDS):
        billing = text(BILLING["text"].replace("0aaa9", f"{i:05x}"))
        body = request(*CONVERSATION[:end], system=[billing, text("You are an agent.")], tools=TOOLS)
        tokens = chat_prompt(tokenizer, body.chat_messages, tools=body.offered_tools).tokens
        assert tokens[: len(before)] == before
        assert len(tokens) > len(before)
        before = tokens
