"""The items of a conversation, as clients send them and get them back. Knows no chat template and no store.

What has no place in a prompt here is ``Other`` and is skipped: agents send back whatever they were once given, such as
a search that another server made. Reference: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag

from mlx_serve.api.fields import Model, Str, fault, omitted, refuse

# The names under which text comes in a part of a message.
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SEAL = "mlx-serve.1."
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "compaction": "cmp",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def new_id(kind: str) -> str:
    """An id for an item of a kind, or a response; nobody can guess it."""
    return f"{_PREFIXES.get(kind, 'resp' if kind == 'response' else 'item')}_{secrets.token_hex(24)}"


def seal(text: str) -> str:
    """Text as ``encrypted_content``: reasoning, of which some clients (older Codex) keep nothing else, and summaries.

    It is not encrypted, for the client may read what it holds; it only has to come back whole.
    """
    return _SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str:
    """The text of ``seal``; "" for what another server encrypted."""
    if not sealed.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _content(value: Any) -> Any:
    """Text parts join without anything between, as in chat."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("Must be a string or a list of content parts.")
    return "".join(_part_text(i, part) for i, part in enumerate(value))


def _part_text(i: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        refuse(f"Part {i} is of type {json.dumps(kind)[:80]}: this server's models read text (input_text) only.")
    text = part.get(name)
    if not isinstance(text, str):
        refuse(f"Part {i}, of type '{kind}', must have a string '{name}'.")
    return text


def _output(value: Any) -> Any:
    """A tool's output as text. A picture in it cannot be taken back by the client, so the model is told of it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("Must be a string or a list of parts.")
    return "".join(map(_output_part, value))


def _output_part(part: Any) -> str:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            return omitted(kind.removeprefix("input_"))
        case {"stdout": str(out), "stderr": str(err)}:
            return out + err + _outcome(part.get("outcome"))
        case _:
            raise fault("Its parts must be like {'type': 'input_text', 'text': ...}.")


def _outcome(value: Any) -> str:
    match value:
        case {"exit_code": int(code)} if code != 0:
            return f"\n(exit code {code})"
        case {"type": "timeout"}:
            return "\n(timed out)"
    return ""


def _thoughts(value: Any) -> Any:
    if not isinstance(value, list):
        refuse("Must be a list of parts.")
    return "\n\n".join(map(_thought, value))


def _thought(part: Any) -> str:
    match part:
        case {"type": "summary_text" | "reasoning_text" | "text", "text": str(text)}:
            return text
        case _:
            raise fault("Its parts must be like {'type': 'reasoning_text', 'text': ...}.")


Text = Annotated[Str, BeforeValidator(_content)]
Output = Annotated[Str, BeforeValidator(_output)]
Thoughts = Annotated[Str, BeforeValidator(_thoughts)]
Object = dict[str, Any]


class InputMessage(Model):
    """A turn, or a part of one; its type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class Reasoning(Model):
    """The model's reasoning. ``encrypted_content`` may be from another server, and is then unreadable."""

    summary: Thoughts = ""
    content: Thoughts = ""
    encrypted_content: Str = ""

    @property
    def text(self) -> str:
        """The most complete text of the reasoning."""
        return self.content or unseal(self.encrypted_content) or self.summary


class Compaction(Model):
    """A conversation's summary, of ``/responses/compact``; another server's cannot be read."""

    encrypted_content: Str

    @property
    def text(self) -> str:
        """The summary; "" for another server's."""
        return unseal(self.encrypted_content)


class Call(Model):
    """A function call."""

    call_id: Str
    name: Str
    arguments: Str
    namespace: Str | None = None


class CustomCall(Model):
    """A call of a tool that takes free text."""

    call_id: Str
    name: Str
    input: Str
    namespace: Str | None = None


class ShellCall(Model):
    """A call of one of the tools that OpenAI's models know without a definition."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: Str
    action: Object | None = None
    operation: Object | None = None

    @property
    def name(self) -> str:
        """The tool's."""
        return self.type.removesuffix("_call")

    @property
    def arguments(self) -> str:
        """As a function would have them."""
        return json.dumps(self.action or self.operation or {}, ensure_ascii=False)


class CallOutput(Model):
    """A tool's output."""

    call_id: Str
    output: Output = ""


class ShellOutput(Model):
    """The local shell's output. OpenAI's form names the call by ``id``."""

    call_id: Str = ""
    id: Str = ""
    output: Output = ""


class Reference(Model):
    """An item that the server keeps."""

    id: Str


class Other(Model):
    """An item without a place in a prompt."""

    type: Str


_TAGS = {
    "message": "Message",
    "reasoning": "Reasoning",
    "compaction": "Compaction",
    "function_call": "Call",
    "custom_tool_call": "CustomCall",
    "local_shell_call": "ShellCall",
    "shell_call": "ShellCall",
    "apply_patch_call": "ShellCall",
    "function_call_output": "CallOutput",
    "custom_tool_call_output": "CallOutput",
    "shell_call_output": "CallOutput",
    "apply_patch_call_output": "CallOutput",
    "local_shell_call_output": "ShellOutput",
    "item_reference": "Reference",
}


def _tag(value: Any) -> str:
    """Capitalized, so that an error's ``param`` leaves it out."""
    if not isinstance(value, dict):
        return "Message"
    kind = value.get("type")
    if kind is None:
        return "Reference" if "id" in value and "role" not in value else "Message"
    return _TAGS.get(kind, "Other") if isinstance(kind, str) else "Other"


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[Reasoning, Tag("Reasoning")]
    | Annotated[Compaction, Tag("Compaction")]
    | Annotated[Call, Tag("Call")]
    | Annotated[CustomCall, Tag("CustomCall")]
    | Annotated[ShellCall, Tag("ShellCall")]
    | Annotated[CallOutput, Tag("CallOutput")]
    | Annotated[ShellOutput, Tag("ShellOutput")]
    | Annotated[Reference, Tag("Reference")]
    | Annotated[Other, Tag("Other")],
    Discriminator(_tag),
]


def as_list(value: Any) -> Any:
    """A request's ``input``: a string is one user's message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    return value


def listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A client's item as it is kept and given back: with an id, a type and a status, its text in parts."""
    out: dict[str, Any] = {key: value for key, value in item.items() if value is not None}
    kind = out.get("type", "message")
    given = out.get("id")
    out = {**out, "id": given if given and isinstance(given, str) else new_id(kind), "type": kind}
    if kind == "reasoning":
        return {"summary": [], **out}
    if kind == "message":
        content = out["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        out["content"] = [_listed_part(out["role"], part) for part in parts]
    return {"status": "completed", **out}


def _listed_part(role: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a message under its newer name, with the keys that OpenAI always gives it."""
    if part["type"] not in ("text", "output_text"):
        return dict(part)
    if role == "assistant":
        return {"annotations": [], "logprobs": [], **part, "type": "output_text"}
    return {**part, "type": "input_text"}


# A request has at most so many items, those that ``previous_response_id`` brings in not counted.
MAX_ITEMS = 16_384
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS), FailFast(), BeforeValidator(as_list)]
