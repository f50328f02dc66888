"""Tools for models whose chat template has no place for them: definitions, calls and results as text.

Nothing of a conversation is dropped in silence; the words are Hermes', which most small models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from mlx_serve.text.toolcalls import CallFormat

Message = dict[str, Any]


def with_definitions(messages: Sequence[Message], tools: Sequence[Any], form: CallFormat) -> list[Message]:
    """The messages with the tools' definitions in the system message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You can call functions. They are, one a line, as JSON with the schema of their parameters:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, answer with its name and arguments in exactly this form, and with nothing behind it:\n"
        f"{form.example}"
    )
    out = [dict(message) for message in messages]
    if out and out[0]["role"] == "system":
        out[0]["content"] = f"{out[0]['content']}\n\n{text}" if out[0]["content"] else text
        return out
    return [{"role": "system", "content": text}, *out]


def as_text(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with calls and results written out. Results that follow each other are one user's message."""
    out: list[Message] = []
    for is_result, found in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            out.append({"role": "user", "content": "\n".join(map(_result_text, found))})
        else:
            out += map(_without_calls, found)
    return out


def _result_text(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _without_calls(message: Mapping[str, Any]) -> Message:
    out = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
    if calls:
        out["content"] = "\n".join([*([out["content"]] if out.get("content") else []), *calls])
    return out


def _call_text(function: Mapping[str, Any]) -> str:
    """A call as ``with_definitions`` asks for it, character for character what the model wrote if it kept to that.

    Arguments that are no JSON (a call that was cut off) stay a string.
    """
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    if not _is_json_object(arguments):
        arguments = json.dumps(arguments, ensure_ascii=False) if arguments else "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
