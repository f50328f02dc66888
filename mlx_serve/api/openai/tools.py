"""The tools of a request, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_serve.api.fields import Model, Object, Str, fault
from mlx_serve.text.grammar import Function
from mlx_serve.values import ApiError


class _Function(Model):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Str | None = None
    parameters: Object | None = None
    # Accepted, but enforced only for required calls: a call that the model makes freely is not constrained.
    strict: bool | None = None


class ChatTool(Model):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function


@dataclass(frozen=True, slots=True)
class ChatToolChoice:
    """``names``: the functions that may be called; None: all."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None


AUTO = ChatToolChoice("auto")


def _tool_choice(value: Any) -> ChatToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ChatToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ChatToolChoice("required", frozenset([name]))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            return ChatToolChoice(mode, frozenset(map(_allowed_name, tools)))
    raise fault(
        "Must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}."
    )


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise fault("Its tools must be like {'type': 'function', 'function': {'name': ...}}.")


ChatToolChoiceField = Annotated[ChatToolChoice, BeforeValidator(_tool_choice)]


def check_choice(choice: ChatToolChoice, tools: Sequence[ChatTool]) -> None:
    """Raises ApiError 400 when it asks for what is not there."""
    if choice.mode == "required" and not tools:
        raise ApiError(400, "'tool_choice' asks for a call, but there are no 'tools'.", param="tool_choice")
    unknown = set(choice.names or ()) - {tool.function.name for tool in tools}
    if unknown:
        raise ApiError(400, f"'tool_choice' names '{min(unknown)[:80]}', which is not in 'tools'.", param="tool_choice")


def offered(choice: ChatToolChoice, tools: Sequence[ChatTool]) -> list[tuple[int, ChatTool]]:
    """The tools that may be called, with their places in the request. The model is told of no others."""
    if choice.mode == "none":
        return []
    return [(i, tool) for i, tool in enumerate(tools) if choice.names is None or tool.function.name in choice.names]


def as_function(place: int, tool: ChatTool) -> Function:
    """For the grammar of a call that the model has to make."""
    function = tool.function
    return Function(function.name, function.parameters, f"tools[{place}].function.parameters", function.strict is True)
