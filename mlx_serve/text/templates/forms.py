"""Changes the form of a conversation and its tools, without losing content, for templates that need another form.

A step takes messages and returns messages. It changes only the messages that it concerns. ``probe`` finds the steps
that a template needs. This module knows no template and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from mlx_serve.text.templates import call_forms as calls
from mlx_serve.text.templates import turn_forms as turns
from mlx_serve.text.templates.call_forms import Message

Step: TypeAlias = Callable[[Sequence[Message]], list[Message]]


def in_form(messages: Sequence[Message], steps: Collection[Step]) -> list[Message]:
    """Applies ``steps`` in the order of ``PIPELINE``. The result can be passed to a template."""
    for step in PIPELINE:
        if step in steps:
            messages = step(messages)
    return [calls.with_plain_arguments(message) for message in messages]


def filled(tools: Sequence[Any]) -> list[Any]:
    """Adds the fields to tools that OpenAI makes optional and some templates require."""
    return [{**tool, "function": _described(_with_parameters(tool["function"]))} for tool in tools]


def flat(tools: Sequence[Any]) -> list[Any]:
    """Copies the fields of ``function`` into each tool itself, for templates that look for them there."""
    return [{**tool, **tool["function"]} for tool in filled(tools)]


def told(tools: Sequence[Any], keywords: Collection[str]) -> list[Any]:
    """Appends the schema of a parameter to its description, if the schema contains any of ``keywords``."""
    return [{**tool, "function": _with_told_parameters(tool["function"], keywords)} for tool in tools]


def _with_told_parameters(function: Mapping[str, Any], keywords: Collection[str]) -> Mapping[str, Any]:
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return function
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    named = {name: _told(schema, keywords, definitions) for name, schema in properties.items()}
    return {**function, "parameters": {**parameters, "properties": named}}


def _told(schema: Any, keywords: Collection[str], definitions: Mapping[str, Any]) -> Any:
    text = json.dumps(schema, ensure_ascii=False)
    if not isinstance(schema, Mapping) or not any(f'"{keyword}":' in text for keyword in keywords):
        return schema
    shown = {key: value for key, value in schema.items() if key != "description"}
    if '"$ref":' in text:
        shown |= definitions
    description = [schema.get("description"), f"JSON schema: {json.dumps(shown, ensure_ascii=False)}"]
    return {**schema, "description": "\n".join(filter(None, description))}


def _with_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
    if isinstance(parameters["properties"], Mapping):
        named = parameters["properties"].items()
        parameters["properties"] = {name: _described(v) if isinstance(v, Mapping) else v for name, v in named}
    return {**function, "parameters": parameters}


def _described(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, "description": value.get("description") or ""}


# turns_joined runs twice: before the steps for calls, and after these have made user messages of some.
PIPELINE: tuple[Step, ...] = (
    turns.thoughts_in_calls_only,
    turns.without_thoughts,
    turns.late_systems_as_user,
    turns.systems_joined,
    turns.system_first,
    turns.without_empty_turns,
    turns.turns_joined,
    calls.calls_as_text,
    calls.unpaired_as_text,
    calls.several_as_text,
    calls.spoken_as_text,
    calls.content_apart_once_answered,
    calls.content_apart,
    calls.content_in_thoughts,
    calls.one_call_each,
    calls.named_results,
    calls.ids_of_nine,
    calls.ids_with_names,
    turns.turns_joined,
    turns.text_in_results,
    turns.system_in_user_if_late,
    turns.system_in_user,
    turns.user_first,
    turns.user_last,
    turns.history_in_user,
    turns.thoughts_as_thinking,
    calls.no_content_in_calls,
    turns.content_in_parts,
    calls.arguments_as_text,
    calls.arguments_wrapped,
)
