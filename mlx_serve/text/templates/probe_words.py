"""Conversations and tools of marker words, which ``probe`` renders. Knows no template."""

from __future__ import annotations

import re
from typing import Any

from mlx_serve.text.templates.call_forms import Arguments, Message

_WORD = re.compile("zq[a-z]+zq")


def n_lost(value: object, text: str) -> int:
    """The number of words in ``value`` that are missing from ``text``. Some templates write names in capitals."""
    lowered = text.lower()
    return sum(word not in lowered for word in set(_WORD.findall(str(value))))


def user(name: str) -> Message:
    """A user message."""
    return {"role": "user", "content": f"zqu{name}zq"}


def system(name: str) -> Message:
    """A system message."""
    return {"role": "system", "content": f"zqs{name}zq"}


def assistant(name: str = "", *calls: str, thoughts: str = "") -> Message:
    """An assistant message; without ``name`` it has no text."""
    made = [
        _call(call, Arguments(f'{{"zq{call}kzq": "zq{call}vzq"}}', {f"zq{call}kzq": f"zq{call}vzq"})) for call in calls
    ]
    fields = {"tool_calls": made} if made else {}
    reasoning = {"reasoning_content": thoughts} if thoughts else {}
    return {"role": "assistant", "content": f"zqa{name}zq" if name else "", **reasoning, **fields}


def cut_call(call: str) -> Message:
    """An assistant message with an incomplete call, as after a cut."""
    return {"role": "assistant", "content": "", "tool_calls": [_call(call, Arguments('{"place": "zqcutzq', None))]}


def result(call: str) -> Message:
    """The result of a call."""
    return {"role": "tool", "tool_call_id": _call_id(call), "content": f"zq{call}rzq"}


def tool(name: str) -> dict[str, Any]:
    """A tool with a description of every part."""
    parameter = {"type": "string", "description": f"zq{name}ezq"}
    parameters = {"type": "object", "properties": {f"zq{name}pzq": parameter}, "required": [f"zq{name}pzq"]}
    function = {"name": f"zq{name}nzq", "description": f"zq{name}dzq", "parameters": parameters}
    return {"type": "function", "function": function}


def nested_tools() -> dict[str, dict[str, Any]]:
    """For each JSON-schema keyword that restricts more than the type: a tool with a parameter that uses it."""
    inner = {"type": "object", "properties": {"zqizq": {"type": "string", "description": "zqjzq"}}}
    schemas: dict[str, dict[str, Any]] = {
        "enum": {"type": "string", "enum": ["zqkzq"]},
        "properties": inner,
        "items": {"type": "array", "items": inner},
        "anyOf": {"anyOf": [{"type": "string", "enum": ["zqlzq"]}, {"type": "null"}]},
        "$ref": {"$ref": "#/$defs/zqmzq"},
    }
    return {keyword: _nested_tool(schema, {"zqmzq": inner}) for keyword, schema in schemas.items()}


def _nested_tool(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    properties = {"zqpzq": {"description": "zqezq", **schema}}
    parameters = {"type": "object", "properties": properties, "required": ["zqpzq"]}
    parameters |= {"$defs": definitions} if "$ref" in schema else {}
    return {"type": "function", "function": {"name": "zqnzq", "description": "zqdzq", "parameters": parameters}}


def sparse_tools() -> list[dict[str, Any]]:
    """Tools with only the required fields."""
    parameters = {"type": "object", "properties": {"zqpzq": {"type": "string"}}}
    functions: list[dict[str, Any]] = [{"name": "zqsparsezq", "parameters": parameters}, {"name": "zqbarezq"}]
    return [{"type": "function", "function": function} for function in functions]


def _call(call: str, arguments: Arguments) -> dict[str, Any]:
    function = {"name": f"zq{call}nzq", "arguments": arguments}
    return {"id": _call_id(call), "type": "function", "function": function}


def _call_id(call: str) -> str:
    return f"call_{call}0123456789abcdef"
