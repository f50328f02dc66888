"""A limit on the reasoning, in three dialects: the answer follows, streamed or not; wrong values are refused."""

import json

import pytest

from mlx_serve.testing import EOS, FakeBackend, tokens_of
from tests.pure.formatkit import gpt_oss
from tests.sockets import apikit, messageskit
from tests.sockets.replaykit import Message, replaying

THOUGHT = "Let me think about it for a while."
WRITTEN = f"<think>{THOUGHT}</think>Four."
NAMES = (
    "reasoning_max_tokens",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
    "thinking_budget",
)
FIELDS = [
    *({name: 6} for name in NAMES),
    {"reasoning": {"max_tokens": 6}},
    {"chat_template_kwargs": {"thinking_budget": 6}},
    {"reasoning_max_tokens": 6, "chat_template_kwargs": {"thinking_budget": 30}},
]


@pytest.fixture(scope="module")
def server():
    backend = FakeBackend(answer=lambda _: [*tokens_of(WRITTEN), EOS])
    with apikit.serving(lambda _: backend) as running:
        yield running


def chat(server, **fields):
    status, _, body = server.chat(**fields)
    assert status == 200, body
    return body


@pytest.mark.parametrize("fields", FIELDS, ids=json.dumps)
def test_a_chat_by_each_name(server, fields):
    body = chat(server, **fields)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me", "Four.")
    # The token that closes the reasoning counts as reasoning, as it does without a limit.
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 1 + 7 + len("Four.") + 1


def test_a_chat_s_stream_and_each_of_several_answers(server):
    found = apikit.events(chat(server, reasoning_max_tokens=6, n=3, seed=1, stream=True))
    for i in range(3):
        deltas = [choice["delta"] for event in found for choice in event["choices"] if choice["index"] == i]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Four."


def test_no_limit_and_one_that_is_not_reached_change_nothing(server):
    for fields in ({}, {"reasoning_max_tokens": 500}, {"chat_template_kwargs": {"thinking_budget": -1}}):
        message = chat(server, **fields)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Four.")


def test_a_budget_of_0_closes_the_reasoning_at_once(server):
    message = chat(server, reasoning_max_tokens=0)["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == ("", "Four.")


def test_the_effort_of_a_chat_may_come_with_the_limit(server):
    message = chat(server, reasoning={"max_tokens": 6, "effort": "high"})["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me"


def test_responses(server):
    body = {"input": "hi", "reasoning": {"max_tokens": 6}}
    status, _, whole = server.request("POST", "/v1/responses", body)
    assert status == 200
    thought, said = whole["output"]
    assert (thought["content"][0]["text"], said["content"][0]["text"]) == ("Let me", "Four.")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 7
    body |= {"stream": True}
    text = server.request("POST", "/v1/responses", body)[2]
    assert '"text":"Let me"' in text.replace('": "', '":"')
    option = {"input": "hi", "chat_template_kwargs": {"thinking_budget": 3}}
    assert server.request("POST", "/v1/responses", option)[2]["output"][0]["content"][0]["text"] == "Let"


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_messages(server, kind):
    asked = {"thinking": {"type": kind, "budget_tokens": 6}, "max_tokens": 100}
    thought, said = messageskit.whole(server, **asked)["content"]
    assert (thought["thinking"], said["text"]) == ("Let me", "Four.")
    assert messageskit.joined(messageskit.stream(server, **asked))["content"][0]["thinking"] == "Let me"


@pytest.mark.parametrize("value", [-1, 1.5, "6", True, [6]])
def test_wrong_values_are_refused_by_name(server, value):
    refused = [
        *(("/v1/chat/completions", {name: value}, name) for name in NAMES),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": value}}, "reasoning.max_tokens"),
        ("/v1/responses", {"reasoning": {"max_tokens": value}}, "reasoning.max_tokens"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": value}}, "thinking.budget_tokens"),
    ]
    option = -2 if value == -1 else value
    for path in ("/v1/chat/completions", "/v1/responses"):
        fields = {"chat_template_kwargs": {"thinking_budget": option}}
        refused.append((path, fields, "chat_template_kwargs.thinking_budget"))
    for path, fields, param in refused:
        messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
        body = ({"input": "hi"} if "responses" in path else messages) | fields
        status, _, answer = server.request("POST", path, body)
        assert status == 400, (path, fields)
        assert param in answer["error"]["message"]
        assert answer["error"].get("param", param) == param


def test_gpt_oss_goes_on_with_its_final_message():
    written = "<|channel|>analysis<|message|>We need it.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    with replaying(gpt_oss(), end="<|return|>") as replay:
        replay.write_bytes(written)
        assert replay.both(tools=[], reasoning_max_tokens=2) == Message("Hi.", "We", [], "stop")
        assert replay.both(reasoning_max_tokens=2).reasoning == "We"
