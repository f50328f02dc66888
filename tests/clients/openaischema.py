"""What OpenAI's API reference says of the objects that clients read, as JSON schema, and of a stream as a whole.

Closed: a field that is not here is a field that nobody decided on. Reasoning is the one extension; a model's object is
open, as servers commonly tell the context length there.
Reference: https://platform.openai.com/docs/api-reference (chat, chat streaming, completions, models, errors).
"""

import json

from jsonschema import Draft202012Validator


def _object(required: dict, optional: dict | None = None, *, closed: bool = True) -> dict:
    properties = required | (optional or {})
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": not closed,
    }


def _list_of(item: dict, **bounds: int) -> dict:
    return {"type": "array", "items": item, **bounds}


def _or_null(schema: dict) -> dict:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT = {"type": "string"}
FILLED = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
LOGPROB = {"type": "number", "maximum": 0, "minimum": -9999}
NULL = {"type": "null"}
FINISH_REASON = {"enum": ["stop", "length", "tool_calls", "content_filter"]}

_PROMPT_DETAILS = _object({"cached_tokens": COUNT}, {"audio_tokens": COUNT})
_COMPLETION_DETAILS = _object(
    {"reasoning_tokens": COUNT},
    {"audio_tokens": COUNT, "accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT},
)
USAGE = _object(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {"prompt_tokens_details": _PROMPT_DETAILS, "completion_tokens_details": _COMPLETION_DETAILS},
)

EMBEDDINGS = _object(
    {
        "object": {"const": "list"},
        "data": _list_of(
            _object(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT,
                    "embedding": {"anyOf": [_list_of({"type": "number"}, minItems=1), FILLED]},
                }
            ),
            minItems=1,
        ),
        "model": FILLED,
        "usage": _object({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }
)

_TOKEN = {"token": TEXT, "logprob": LOGPROB, "bytes": _or_null(_list_of({"type": "integer", "maximum": 255}))}
_LOGPROBS = _object(
    {
        "content": _or_null(_list_of(_object(_TOKEN | {"top_logprobs": _list_of(_object(_TOKEN), maxItems=20)}))),
        "refusal": _or_null(_list_of(_object(_TOKEN))),
    }
)
_TEXT_LOGPROBS = _object(
    {
        "tokens": _list_of(TEXT),
        "token_logprobs": _list_of(_or_null(LOGPROB)),
        "top_logprobs": _list_of(_or_null({"type": "object", "additionalProperties": LOGPROB})),
        "text_offset": _list_of(COUNT),
    }
)

_CALL = _object({"id": FILLED, "type": {"const": "function"}, "function": _object({"name": FILLED, "arguments": TEXT})})
_REASONING = {"reasoning_content": FILLED, "reasoning": FILLED}
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _or_null(TEXT), "refusal": _or_null(TEXT)},
    {"tool_calls": _list_of(_CALL, minItems=1), "annotations": _list_of({"type": "object"})} | _REASONING,
) | {"anyOf": [{"properties": {"content": TEXT}}, {"required": ["tool_calls"]}]}

# A call's first piece has its id and name, the later ones a part of the arguments.
_CALL_BEGINS = _object({"index": COUNT, **_CALL["properties"]})
_CALL_GOES_ON = _object({"index": COUNT, "function": _object({"arguments": FILLED})})
_DELTA = _object(
    {},
    {
        "role": {"const": "assistant"},
        "content": _or_null(TEXT),
        "refusal": _or_null(TEXT),
        "tool_calls": _list_of({"anyOf": [_CALL_BEGINS, _CALL_GOES_ON]}, minItems=1),
    }
    | _REASONING,
)

_FINGERPRINT = {"system_fingerprint": {"type": "string", "pattern": "^fp_"}}


def _answer(kind: str, id_prefix: str, choices: dict, required: dict, optional: dict | None = None) -> dict:
    head = {
        "id": {"type": "string", "pattern": f"^{id_prefix}-"},
        "object": {"const": kind},
        "created": COUNT,
        "model": FILLED,
        "choices": choices,
    }
    return _object(head | required, _FINGERPRINT | (optional or {}))


_CHOICE = _object(
    {"index": COUNT, "message": _MESSAGE, "logprobs": _or_null(_LOGPROBS), "finish_reason": FINISH_REASON}
)
_CHUNK_CHOICE = _object(
    {"index": COUNT, "delta": _DELTA, "finish_reason": _or_null(FINISH_REASON)}, {"logprobs": _or_null(_LOGPROBS)}
)
_TEXT_CHOICE = {"index": COUNT, "text": TEXT, "logprobs": _or_null(_TEXT_LOGPROBS)}
_TEXT_FINISH = {"enum": ["stop", "length", "content_filter"]}
_MODEL = _object({"id": FILLED, "object": {"const": "model"}, "created": COUNT, "owned_by": FILLED}, closed=False)

CHAT = _answer("chat.completion", "chatcmpl", _list_of(_CHOICE, minItems=1), {"usage": USAGE})
CHUNK = _answer("chat.completion.chunk", "chatcmpl", _list_of(_CHUNK_CHOICE), {}, {"usage": _or_null(USAGE)})
COMPLETION = _answer(
    "text_completion",
    "cmpl",
    _list_of(_object(_TEXT_CHOICE | {"finish_reason": _TEXT_FINISH}), minItems=1),
    {"usage": USAGE},
)
COMPLETION_CHUNK = _answer(
    "text_completion",
    "cmpl",
    _list_of(_object(_TEXT_CHOICE | {"finish_reason": _or_null(_TEXT_FINISH)})),
    {},
    {"usage": _or_null(USAGE)},
)
MODEL = _MODEL
# With the places of a page, which are Anthropic's.
MODELS = _object({"object": {"const": "list"}, "data": _list_of(_MODEL)}, closed=False)
ERROR = _object(
    {"error": _object({"message": FILLED, "type": FILLED, "param": _or_null(FILLED), "code": _or_null(FILLED)})}
)


def _strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check(schema: dict, text: str) -> dict:
    """The object, when the text is JSON and fits the schema."""
    value = _strict(text)
    Draft202012Validator(schema).validate(value)
    usage = value.get("usage")
    if usage:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage.get("completion_tokens", 0)
    return value


class StreamCheck:
    """A stream, event by event: each fits the schema, and they come in the order that clients rely on."""

    def __init__(self, schema: dict, *, include_usage: bool) -> None:
        self._schema = schema
        self._include_usage = include_usage
        self._head: tuple | None = None
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._n_usages = 0
        self._failed = False
        self._done = False

    def take(self, piece: bytes) -> None:
        for event in piece.decode().removesuffix("\n\n").split("\n\n"):
            assert not self._done, "something after the end"
            if not event.startswith(":"):
                assert event.startswith("data: "), event
                assert "\n" not in event
                self._take(event.removeprefix("data: "))

    def finish(self) -> None:
        """The stream was read to its end."""
        assert self._done or self._failed
        if not self._failed:
            assert self._ended == self._seen
            assert self._n_usages == self._include_usage

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self._done = True
        elif '"error":' in data and "choices" not in _strict(data):
            check(ERROR, data)
            self._failed = True
        else:
            self._take_chunk(check(self._schema, data))

    def _take_chunk(self, chunk: dict) -> None:
        assert not self._failed
        head = tuple(chunk[key] for key in ("id", "created", "model"))
        assert self._head in (None, head)
        self._head = head
        assert ("usage" in chunk) == self._include_usage
        if chunk.get("usage"):
            assert chunk["choices"] == []
            self._n_usages += 1
        else:
            assert chunk["choices"]
        for choice in chunk["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict) -> None:
        index, delta = choice["index"], choice.get("delta")
        assert index not in self._ended
        if delta is not None:
            # The role comes once, and first: clients join all that they get.
            assert ("role" in delta) == (index not in self._seen)
            assert "role" in delta or choice["finish_reason"] or any(delta.values())
        self._seen.add(index)
        if choice["finish_reason"]:
            self._ended.add(index)
