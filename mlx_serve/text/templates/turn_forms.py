"""Forms of a conversation's turns: their roles, their order, and how their fields are written. None loses content.

Each function is a step of ``forms``: it takes messages and returns messages. Knows no template and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile

from mlx_serve.text.templates.call_forms import Message

# System messages


def reminder(text: str) -> str:
    """Wraps a late system message for use in a user turn. The tag is Claude Code's."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def systems_joined(messages: Sequence[Message]) -> list[Message]:
    """Joins the leading system messages."""
    leading = _leading_systems(messages)
    text = "\n\n".join(filter(None, (message["content"] for message in leading)))
    return [*([{"role": "system", "content": text}] if text else []), *messages[len(leading) :]]


def late_systems_as_user(messages: Sequence[Message]) -> list[Message]:
    """Turns late system messages into user messages at the same place. Moving them would invalidate cached prompts."""
    n_leading = len(_leading_systems(messages))
    out = list(messages[:n_leading])
    for message in messages[n_leading:]:
        if message["role"] != "system":
            out.append(message)
        elif message["content"]:
            out.append({"role": "user", "content": reminder(message["content"])})
    return out


def system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Moves the leading system messages to the beginning of the first user message."""
    leading = _leading_systems(messages)
    rest = list(messages[len(leading) :])
    texts = [message["content"] for message in leading if message["content"]]
    if not texts:
        return rest
    if rest and rest[0]["role"] == "user":
        texts.append(rest.pop(0)["content"])
    return [{"role": "user", "content": "\n\n".join(filter(None, texts))}, *rest]


def system_in_user_if_late(messages: Sequence[Message]) -> list[Message]:
    """``system_in_user`` if the last message is not the user's: some templates show the system message only then."""
    return list(messages) if messages and messages[-1]["role"] == "user" else system_in_user(messages)


def system_first(messages: Sequence[Message]) -> list[Message]:
    """Adds an empty system message if there is none, for templates that put tools into it."""
    return [*([] if _leading_systems(messages) else [{"role": "system", "content": ""}]), *messages]


def _leading_systems(messages: Sequence[Message]) -> list[Message]:
    return list(takewhile(lambda message: message["role"] == "system", messages))


# The order of turns


def without_empty_turns(messages: Sequence[Message]) -> list[Message]:
    """Drops empty assistant messages."""
    kept = ("content", "tool_calls", "reasoning_content")
    return [m for m in messages if m["role"] != "assistant" or any(m.get(key) for key in kept)]


def turns_joined(messages: Sequence[Message]) -> list[Message]:
    """Joins consecutive messages of the same role (user or assistant)."""
    out: list[Message] = []
    for role, found in groupby(messages, key=lambda message: message["role"]):
        turn = list(found)
        out += [_joined(turn)] if role in ("user", "assistant") else turn
    return out


def text_in_results(messages: Sequence[Message]) -> list[Message]:
    """Appends user text after a tool result to the result: some templates want an answer right after a result."""
    out: list[Message] = []
    for role, found in groupby(messages, key=lambda message: message["role"]):
        turn = list(found)
        if role == "user" and out and out[-1]["role"] == "tool":
            out[-1] = {**out[-1], "content": "\n\n".join(message["content"] for message in (out[-1], *turn))}
        else:
            out += turn
    return out


def user_first(messages: Sequence[Message]) -> list[Message]:
    """Adds an empty user message if the conversation begins with another role."""
    n_leading = len(_leading_systems(messages))
    if n_leading < len(messages) and messages[n_leading]["role"] == "user":
        return list(messages)
    return [*messages[:n_leading], {"role": "user", "content": ""}, *messages[n_leading:]]


def user_last(messages: Sequence[Message]) -> list[Message]:
    """Adds an empty user message if the conversation ends with the assistant's."""
    ends_in_answer = bool(messages) and messages[-1]["role"] == "assistant"
    return [*messages, *([{"role": "user", "content": ""}] if ends_in_answer else [])]


def history_in_user(messages: Sequence[Message]) -> list[Message]:
    """Puts all earlier messages into the user's last message, for templates that read only that one."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    n_leading = len(_leading_systems(messages))
    earlier = messages[n_leading:last]
    if not earlier:
        return list(messages)
    lines = [f"{message['role']}: {message['content']}" for message in earlier]
    text = "\n\n".join([*lines, messages[last]["content"]])
    return [*messages[:n_leading], {**messages[last], "content": text}, *messages[last + 1 :]]


def thoughts_in_calls_only(messages: Sequence[Message]) -> list[Message]:
    """Drops reasoning from messages without a call."""
    out = []
    for message in messages:
        out += [message] if "tool_calls" in message else without_thoughts([message])
    return out


def without_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Drops reasoning. Most templates leave it out of earlier turns themselves."""
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


def _joined(turn: Sequence[Message]) -> Message:
    """Joins messages of one role."""
    if len(turn) == 1:
        return turn[0]
    out = {key: value for message in turn for key, value in message.items()}
    for key in out.keys() & {"content", "reasoning_content"}:
        out[key] = "\n\n".join(message[key] for message in turn if message.get(key))
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    return {**out, "tool_calls": calls} if calls else out


# Steps that change how fields are written


def thoughts_as_thinking(messages: Sequence[Message]) -> list[Message]:
    """Adds the reasoning under its other name, "thinking"."""
    return [m | {"thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in messages]


def content_in_parts(messages: Sequence[Message]) -> list[Message]:
    """Writes content as a list of parts."""
    parts = [[{"type": "text", "text": message["content"] or ""}] for message in messages]
    return [{**message, "content": content} for message, content in zip(messages, parts, strict=True)]
