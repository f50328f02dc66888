"""The check that all other tests here lean on finds what is wrong."""

import json

import pytest
from jsonschema import ValidationError

from tests.clients.clientserver import MODEL, schema

pytestmark = pytest.mark.real

HEAD = {"id": "chatcmpl-1", "created": 1, "model": MODEL, "system_fingerprint": "fp_1"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
MESSAGE = {"role": "assistant", "content": "hi", "refusal": None}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def answer(message: dict, **fields) -> str:
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return json.dumps(HEAD | {"object": "chat.completion", "choices": [choice], "usage": USAGE} | fields)


def event(delta: dict, finish_reason: str | None = None, **fields) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk = HEAD | {"object": "chat.completion.chunk", "choices": [choice]} | fields
    return f"data: {json.dumps(chunk)}\n\n".encode()


ROLE = event({"role": "assistant", "content": ""})
TEXT = event({"content": "hi"})
STOP = event({}, "stop")
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes) -> None:
    check = schema.StreamCheck(schema.CHUNK, include_usage=False)
    for piece in pieces:
        check.take(piece)
    check.finish()


def test_good_answers_pass():
    schema.check(schema.CHAT, answer(MESSAGE))
    schema.check(schema.CHAT, answer(MESSAGE | {"content": None, "tool_calls": [CALL]}))
    read(ROLE, b": keep-alive\n\n", TEXT, STOP, DONE)


@pytest.mark.parametrize(
    "text",
    [
        answer(MESSAGE | {"content": None}),
        answer(MESSAGE | {"tool_calls": []}),
        answer(MESSAGE | {"thoughts": "hm"}),
        answer(MESSAGE | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}),
        answer({"role": "assistant", "content": "hi"}),
        answer(MESSAGE, usage=None),
        answer(MESSAGE, object="chat.completion.chunk"),
    ],
)
def test_a_bad_answer_is_found(text):
    with pytest.raises(ValidationError):
        schema.check(schema.CHAT, text)


@pytest.mark.parametrize(
    "pieces",
    [
        (TEXT, STOP, DONE),
        (ROLE, ROLE, STOP, DONE),
        (ROLE, TEXT, DONE),
        (ROLE, STOP, TEXT, DONE),
        (ROLE, STOP, STOP, DONE),
        (ROLE, STOP),
        (ROLE, STOP, DONE, DONE),
        (ROLE, event({"content": "hi"}, id="chatcmpl-2"), STOP, DONE),
        (ROLE, STOP, event({}, choices=[]), DONE),
        (ROLE, event({"content": ""}), STOP, DONE),
    ],
)
def test_a_bad_stream_is_found(pieces):
    with pytest.raises(AssertionError):
        read(*pieces)


def test_nan_is_no_json():
    with pytest.raises(ValueError, match="NaN"):
        schema.check(schema.CHAT, answer(MESSAGE, created=float("nan")))
