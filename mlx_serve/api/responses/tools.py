"""The tools of a request, as the model is told of them, and which of them it may or must call.

A custom tool takes free text: the model knows it as a function with one string, ``input``. The tools of a namespace
are known by both names. Tools that only OpenAI itself can run (web_search, ...) are skipped, for agents always send
them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag

from mlx_serve.api.body import MAX_TOOLS
from mlx_serve.api.fields import Model, Str, fault
from mlx_serve.text.grammar import Function, Rule
from mlx_serve.values import ApiError

log = logging.getLogger(__name__)

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
INPUT = "input"


class FunctionTool(Model):
    """A function that the client runs."""

    type: Literal["function"]
    name: Name
    description: Str | None = None
    parameters: dict[str, Any] | None = None
    # Taken, and not enforced where the model is free to call or not: its own format of calls is not constrained.
    strict: bool | None = None


class InputFormat(Model):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] = "lark"
    definition: Str = ""


class CustomTool(Model):
    """A tool that takes free text."""

    type: Literal["custom"]
    name: Name
    description: Str | None = None
    format: InputFormat = InputFormat(type="text")


class Namespace(Model):
    """Tools under a common name, as agents have those of one MCP server."""

    type: Literal["namespace"]
    name: Name
    description: Str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()]


class Skipped(Model):
    """A tool that this server cannot run."""

    type: Str


def _tag(value: Any) -> str:
    """Capitalized, so that an error's ``param`` leaves it out."""
    kind = value.get("type") if isinstance(value, dict) else None
    known = {"function": "Function", "custom": "Custom", "namespace": "Namespace"}
    return known.get(kind, "Skipped") if isinstance(kind, str) else "Skipped"


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[Namespace, Tag("Namespace")]
    | Annotated[Skipped, Tag("Skipped")],
    Discriminator(_tag),
]
Namespace.model_rebuild()


def alias(namespace: str | None, name: str) -> str:
    """The name that the model knows a tool by."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that can be called, and where in the request it stands."""

    tool: FunctionTool | CustomTool
    namespace: str | None
    param: str

    @property
    def alias(self) -> str:
        """The name that the model knows it by."""
        return alias(self.namespace, self.tool.name)

    @property
    def is_custom(self) -> bool:
        """Whether it takes free text."""
        return isinstance(self.tool, CustomTool)

    def definition(self) -> dict[str, Any]:
        """In chat's form, for the chat template."""
        function: dict[str, Any] = {"name": self.alias}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}

    @property
    def description(self) -> str:
        """The description. For free text it names the input field and the grammar, which the schema cannot express."""
        text = self.tool.description or ""
        if isinstance(self.tool, FunctionTool):
            return text
        form = self.tool.format
        rule = f" It must match this {form.syntax} grammar:\n{form.definition}" if form.type == "grammar" else ""
        return f'{text}\n\nIts free text is the value of "{INPUT}".{rule}'.strip()

    @property
    def parameters(self) -> dict[str, Any] | None:
        """As JSON schema."""
        if isinstance(self.tool, FunctionTool):
            return self.tool.parameters
        return {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}

    def function(self) -> Function:
        """For the grammar of a call that has to be made."""
        parameters, param = self.parameters, f"{self.param}.parameters"
        if isinstance(self.tool, CustomTool) and self.tool.format.type == "grammar":
            param = f"{self.param}.format.definition"
            if self.tool.format.syntax == "regex":
                text = {"type": "string", "pattern": f"^(?:{self.tool.format.definition})$"}
                parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        strict = self.tool.strict is True if isinstance(self.tool, FunctionTool) else True
        return Function(self.alias, parameters, param, strict)

    def rule(self) -> Rule | None:
        """What its input has to match, if it is a custom tool with a grammar."""
        if isinstance(self.tool, FunctionTool) or self.tool.format.type == "text":
            return None
        kind: Literal["grammar", "regex"] = "grammar" if self.tool.format.syntax == "lark" else "regex"
        return Rule(kind, self.tool.format.definition, f"{self.param}.format.definition")


def offers(tools: Sequence[Tool]) -> list[OfferedTool]:
    """What of a request's tools can be called here."""
    return list(_offers(tools, None, "tools"))


def _offers(tools: Sequence[Tool], namespace: str | None, param: str) -> Iterator[OfferedTool]:
    for i, tool in enumerate(tools):
        if isinstance(tool, Namespace):
            yield from _offers(tool.tools, tool.name, f"{param}[{i}].tools")
        elif isinstance(tool, Skipped):
            log.debug("a tool is skipped: %s", ascii(tool.type[:80]))
        else:
            yield OfferedTool(tool, namespace, f"{param}[{i}]")


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """``names``: the tools that may be called; None: all."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None

    def allows(self, offer: OfferedTool) -> bool:
        """Whether a tool may be called."""
        return self.mode != "none" and (self.names is None or not {offer.tool.name, offer.alias}.isdisjoint(self.names))


AUTO = AllowedTools("auto")


def _tool_choice(value: Any) -> AllowedTools:
    match value:
        case "none" | "auto" | "required":
            return AllowedTools(value)
        case {"type": "function" | "custom", "name": str(name)}:
            return AllowedTools("required", frozenset([name]))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            return AllowedTools(mode, frozenset(filter(None, map(_allowed_name, tools))))
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise fault(f"This server has no tool of its own of type {kind[:80]!r}.")
    raise fault(
        "Must be 'none', 'auto', 'required', {'type': 'function' or 'custom', 'name': ...} or "
        "{'type': 'allowed_tools', 'mode': ..., 'tools': [...]}."
    )


def _allowed_name(tool: Any) -> str | None:
    """None: one that is skipped."""
    match tool:
        case {"type": "function" | "custom", "name": str(name)}:
            return name
        case {"type": str(kind)} if kind not in ("function", "custom"):
            return None
        case _:
            raise fault("Its tools must be like {'type': 'function', 'name': ...}.")


AllowedToolsField = Annotated[AllowedTools, BeforeValidator(_tool_choice)]


def chosen(choice: AllowedTools, tools: Sequence[Tool]) -> list[OfferedTool]:
    """The tools that may be called: the model is told of no others.

    Raises ApiError 400 when the choice asks for what is not there.
    """
    every = offers(tools)
    if len(every) > MAX_TOOLS:
        raise ApiError(
            400, f"Invalid value for 'tools': At most {MAX_TOOLS} tools, those of namespaces counted.", param="tools"
        )
    known = {name for offer in every for name in (offer.tool.name, offer.alias)}
    unknown = set(choice.names or ()) - known
    if unknown:
        raise ApiError(400, f"'tool_choice' names '{min(unknown)[:80]}', which is not in 'tools'.", param="tool_choice")
    found = [offer for offer in every if choice.allows(offer)]
    if choice.mode == "required" and not found:
        text = "'tool_choice' asks for a call, but there are no 'tools' that can be called here."
        raise ApiError(400, text, param="tool_choice")
    return found
