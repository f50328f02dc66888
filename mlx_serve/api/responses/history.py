"""Converts items to chat messages. The same items give the same messages, whether the client sent them again or the
server kept them. So each prompt begins with the one before it, and its KV cache is reused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_serve.api.responses.items import (
    Call,
    CallOutput,
    Compaction,
    CustomCall,
    InputMessage,
    Item,
    Other,
    Reasoning,
    ShellCall,
    ShellOutput,
)
from mlx_serve.api.responses.tools import INPUT, alias

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Turn:
    """An assistant's message: its reasoning, text and calls until another role speaks."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, item: Item) -> bool:
        """Whether an item continues this message. It does not if it is reasoning after text or a call, or text after
        text without a call between."""
        if isinstance(item, Reasoning):
            return not self.content and not self.calls
        return not isinstance(item, InputMessage) or not self.content or bool(self.calls)

    def message(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            out["reasoning_content"] = "\n\n".join(self.reasoning)
        return out | ({"tool_calls": self.calls} if self.calls else {})


def as_messages(items: Iterable[Item], instructions: str | None = None) -> list[dict[str, Any]]:
    """Messages for the chat template. Items that have no place in it are left out."""
    out: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    turn: _Turn | None = None
    for item in items:
        if isinstance(item, Other):
            log.debug("an item is skipped: %s", ascii(item.type[:80]))
        elif isinstance(item, Reasoning | Compaction) and not item.text:
            log.debug("an item is skipped that another server encrypted")
        elif _is_assistant(item):
            if turn is not None and not turn.takes(item):
                out.append(turn.message())
                turn = None
            turn = turn or _Turn()
            _add(turn, item)
        else:
            out += [turn.message()] if turn is not None else []
            turn = None
            out.append(_other_message(item))
    return [*out, turn.message()] if turn is not None else out


def n_turns(messages: Sequence[dict[str, Any]]) -> int:
    """The number of turns that a user began."""
    return len(_starts(messages))


def without_oldest(messages: Sequence[dict[str, Any]], n_dropped: int) -> list[dict[str, Any]]:
    """Messages without the first turns. System messages stay. A call and its result are removed together."""
    starts = _starts(messages)
    first = starts[n_dropped] if n_dropped else 0
    return [message for i, message in enumerate(messages) if i >= first or message["role"] == "system"]


def _starts(messages: Sequence[dict[str, Any]]) -> list[int]:
    return [
        i
        for i, message in enumerate(messages)
        if message["role"] == "user" and (i == 0 or messages[i - 1]["role"] != "user")
    ]


def _is_assistant(item: Item) -> bool:
    is_message = isinstance(item, InputMessage) and item.role == "assistant"
    return is_message or isinstance(item, Reasoning | Call | CustomCall | ShellCall)


def _add(turn: _Turn, item: Item) -> None:
    if isinstance(item, Reasoning):
        turn.reasoning.append(item.text)
    elif isinstance(item, InputMessage):
        turn.content.append(item.content)
    elif isinstance(item, Call):
        turn.calls.append(_call(item.call_id, alias(item.namespace, item.name), item.arguments))
    elif isinstance(item, CustomCall):
        arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
        turn.calls.append(_call(item.call_id, alias(item.namespace, item.name), arguments))
    elif isinstance(item, ShellCall):
        turn.calls.append(_call(item.call_id, item.name, item.arguments))


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _other_message(item: Item) -> dict[str, Any]:
    if isinstance(item, CallOutput):
        return {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
    if isinstance(item, ShellOutput):
        return {"role": "tool", "content": item.output, "tool_call_id": item.call_id or item.id}
    if isinstance(item, Compaction):
        text = f"What was said before, in short:\n\n<summary>\n{item.text}\n</summary>"
        return {"role": "user", "content": text}
    assert isinstance(item, InputMessage)
    # ``developer`` is the newer name of ``system``.
    return {"role": "user" if item.role == "user" else "system", "content": item.content}
