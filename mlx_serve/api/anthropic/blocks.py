"""Anthropic's messages and content blocks, and their conversion to chat messages for the template.

As at Anthropic, consecutive messages of one side are one turn. Each block is converted without regard to the others.
So the prompt of a longer conversation begins with that of the shorter one, and its KV cache is reused. Reference:
https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from mlx_serve.api.fields import Model, Object, Str, omitted, refuse
from mlx_serve.text.templates.turn_forms import reminder

MAX_BLOCKS = 16_384
# Claude Code's first system block is a line for Anthropic's billing. It differs between requests, so no two prompts
# would share a prefix. A model has no use for it.
_BILLING_HEADER = "x-anthropic-billing-header:"
# Results of tools that ran on Anthropic's side, in a conversation that began there.
_SERVER_TOOL_BLOCKS = ("server_tool_use", "mcp_tool_use")


class TextBlock(Model):
    """A block of text."""

    type: Literal["text"]
    text: Str


class ThinkingBlock(Model):
    """Reasoning that the client sends back. Its signature is for Anthropic's own models and is ignored."""

    type: Literal["thinking"]
    thinking: Str = ""


class ToolUseBlock(Model):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Str
    name: Str
    input: Object = Field(default_factory=dict)

    def as_call(self) -> dict[str, Any]:
        """OpenAI's object for it."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class SearchResultBlock(Model):
    """A search result: a text with its source."""

    type: Literal["search_result"]
    title: Str
    source: Str
    content: Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), FailFast()]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ToolReferenceBlock(Model):
    """A tool that a tool search found. The model knows it already, because all tools are offered."""

    type: Literal["tool_reference"]
    tool_name: Str

    @property
    def text(self) -> str:
        """Its name."""
        return self.tool_name


class SkippedBlock(Model):
    """A block that only Anthropic's own models can read; it is skipped."""

    type: str


class UnseenBlock(Model):
    """A picture or file in a tool's result. The client cannot change the result, so the model gets a note instead."""

    type: Literal["image", "document"]

    @property
    def text(self) -> str:
        """What the model reads in its place."""
        return omitted(self.type)


class RefusedBlock(Model):
    """Content that a text model cannot read. It is refused: dropping it silently would mislead the client."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        kind = _type_of(value)
        if not isinstance(kind, str):
            refuse("Must be an object with a 'type'.")
        if kind in ("image", "document"):
            refuse(f"This server takes no blocks of type '{kind}': its models read text.")
        refuse("This server does not know blocks of this type, or not in this place.")


def _as_blocks(value: Any) -> Any:
    """A string stands for one block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        refuse("Must be a string or a list of content blocks.")
    return value


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _kind(value: Any, known: Sequence[str]) -> str:
    kind = _type_of(value)
    return f"<{kind}>" if kind in known else "<refused>"


def _result_kind(value: Any) -> str:
    return (
        "<unseen>"
        if _type_of(value) in ("image", "document")
        else _kind(value, ("text", "search_result", "tool_reference"))
    )


def _block_kind(value: Any) -> str:
    kind = _type_of(value)
    is_servers = isinstance(kind, str) and (kind in _SERVER_TOOL_BLOCKS or kind.endswith("_tool_result"))
    if kind == "redacted_thinking" or is_servers:
        return "<skipped>"
    return _kind(value, ("text", "thinking", "tool_use", "tool_result", "search_result"))


# The tags are not valid field names, so an error's path leaves them out.
ResultBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[UnseenBlock, Tag("<unseen>")]
    | Annotated[RefusedBlock, Tag("<refused>")],
    Discriminator(_result_kind),
]
ResultContent = Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS), FailFast(), BeforeValidator(_as_blocks)]


class ToolResultBlock(Model):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Str
    content: ResultContent = Field(default_factory=list)
    is_error: bool = False

    def as_message(self) -> dict[str, Any]:
        """OpenAI's message for it."""
        text = "\n".join(block.text for block in self.content if not isinstance(block, RefusedBlock))
        # Chat templates have no field for ``is_error``, so the text says it.
        text = f"Error: {text}" if self.is_error and not text.lower().startswith("error") else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[SkippedBlock, Tag("<skipped>")]
    | Annotated[RefusedBlock, Tag("<refused>")],
    Discriminator(_block_kind),
]
Content = Annotated[list[Block], Field(max_length=MAX_BLOCKS), FailFast(), BeforeValidator(_as_blocks)]
SystemContent = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), FailFast(), BeforeValidator(_as_blocks)]


class MessageTurn(Model):
    """One turn. A ``system`` turn inside a conversation is from the agent program, not from its user."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _has_its_own_blocks(self) -> MessageTurn:
        if self.role != "assistant" and any(isinstance(block, ToolUseBlock) for block in self.content):
            refuse("Only an assistant's message may hold 'tool_use' blocks.")
        if self.role != "user" and any(isinstance(block, ToolResultBlock) for block in self.content):
            refuse("Only a user's message may hold 'tool_result' blocks.")
        return self

    @property
    def side(self) -> str:
        """Whose turn it is part of."""
        return "assistant" if self.role == "assistant" else "user"


def system_text(blocks: Iterable[TextBlock]) -> str:
    """The system prompt."""
    return "\n".join(filter(None, (_without_billing(block.text) for block in blocks)))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text


def as_chat(system: Iterable[TextBlock], messages: Sequence[MessageTurn]) -> list[dict[str, Any]]:
    """The conversation as chat messages in OpenAI's form."""
    leading = list(takewhile(lambda message: message.role == "system", messages))
    blocks = [block for message in leading for block in message.content if isinstance(block, TextBlock)]
    text = system_text([*system, *blocks])
    out: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    for side, found in groupby(messages[len(leading) :], key=lambda message: message.side):
        turn = list(found)
        out += [_assistant(turn)] if side == "assistant" else _user(turn)
    return out


def _assistant(turn: Sequence[MessageTurn]) -> dict[str, Any]:
    blocks = [block for message in turn for block in message.content]
    # The parts are one answer's text; the thinking and calls between them go to other fields.
    out: dict[str, Any] = {"role": "assistant", "content": "".join(b.text for b in blocks if isinstance(b, TextBlock))}
    if thinking := "".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock)):
        out["reasoning_content"] = thinking
    if calls := [b.as_call() for b in blocks if isinstance(b, ToolUseBlock)]:
        out["tool_calls"] = calls
    return out


def _user(turn: Sequence[MessageTurn]) -> list[dict[str, Any]]:
    """Tool results come first, because they answer the calls directly before them; then the text."""
    results = [b.as_message() for m in turn for b in m.content if isinstance(b, ToolResultBlock)]
    texts = [text for message in turn for text in _texts(message)]
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _texts(message: MessageTurn) -> Iterator[str]:
    for block in message.content:
        if isinstance(block, TextBlock | SearchResultBlock):
            # Chat templates take a system message at the beginning, if at all. Moving it there would change the
            # beginning of every prompt. The tag is Claude Code's own mark for text that is not the user's.
            yield reminder(block.text) if message.role == "system" else block.text
