"""Forms of tool calls and their results: several at once, one by one, or written out as text. None loses content.

Each function is a step of ``forms``: it takes messages and returns messages. Knows no template and no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

# The form of a call that is written out as text, for models without a format of their own. It is Hermes' form.
HERMES_CALL = '<tool_call>\n{"name": "FUNCTION", "arguments": {ARGUMENTS}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call's arguments: the text that the model wrote, and the object that it parses to, or None.

    ``example``: a call in the model's format. It is used if the call has to be written out as text.
    """

    text: str
    value: dict[str, Any] | None
    example: str = HERMES_CALL


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Writes calls and results out as text. Consecutive results become one user message."""
    out: list[Message] = []
    for message, results in _turns(messages):
        out += [_without_calls(message)] if message else []
        text = "\n".join(f"<tool_response>\n{result['content']}\n</tool_response>" for result in results)
        out += [{"role": "user", "content": text}] if results else []
    return out


def unpaired_as_text(messages: Sequence[Message]) -> list[Message]:
    """Writes out calls that do not have exactly one result each, with their results, and results without a call."""
    return _as_text_where(messages, lambda message, results: not _is_paired(message, results))


def several_as_text(messages: Sequence[Message]) -> list[Message]:
    """Writes out the calls of messages that have more than one."""
    return _as_text_where(messages, lambda message, _: len(message.get("tool_calls", ())) > 1)


def spoken_as_text(messages: Sequence[Message]) -> list[Message]:
    """Writes out calls of messages that also have text."""
    return _as_text_where(messages, lambda message, _: "tool_calls" in message and bool(message["content"]))


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Gives each call a message of its own, followed by its result."""
    out: list[Message] = []
    for message, results in _turns(messages):
        left = {id(result): result for result in results}
        of_call = {result.get("tool_call_id"): result for result in reversed(results)}
        for one in _single_calls(message):
            own = of_call.get(one["tool_calls"][0].get("id")) if "tool_calls" in one else None
            out += [one, *([left.pop(id(own))] if id(own) in left else [])]
        out += left.values()
    return out


def ids_of_nine(messages: Sequence[Message]) -> list[Message]:
    """Replaces the ids of calls by nine letters and digits, which Mistral's templates require."""

    def short(call_id: str, name: str, n: int) -> str:
        return call_id if re.fullmatch("[a-zA-Z0-9]{9}", call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]

    return _with_ids(messages, short)


def ids_with_names(messages: Sequence[Message]) -> list[Message]:
    """Replaces the ids of calls by Kimi's form, which has the name in it: Kimi's templates show only the id."""
    return _with_ids(messages, lambda call_id, name, n: f"functions.{name}:{n}")


def named_results(messages: Sequence[Message]) -> list[Message]:
    """Adds the name of the called function to each result."""
    names: dict[str | None, str] = {}
    out = []
    for message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id"), "tool")
        out.append({"name": name, **message} if message["role"] == "tool" else message)
    return out


def content_apart(messages: Sequence[Message]) -> list[Message]:
    """Puts the text before a call into a message of its own."""
    out: list[Message] = []
    for message in messages:
        if "tool_calls" in message and message["content"]:
            out += [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}]
        else:
            out.append(message)
    return out


def content_apart_once_answered(messages: Sequence[Message]) -> list[Message]:
    """``content_apart`` for calls before the last answer: gpt-oss's template drops the text before such calls."""
    is_answer = [message["role"] == "assistant" and "tool_calls" not in message for message in messages]
    n_answered = max((i for i, found in enumerate(is_answer) if found), default=0)
    return [*content_apart(messages[:n_answered]), *messages[n_answered:]]


def content_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Appends the text between the reasoning and a call to the reasoning."""

    def moved(message: Message) -> Message:
        texts = [message.get("reasoning_content"), message["content"]]
        if "tool_calls" not in message or not all(texts):
            return message
        return {**message, "content": "", "reasoning_content": "\n\n".join(filter(None, texts))}

    return [moved(message) for message in messages]


def _with_ids(messages: Sequence[Message], new_id: Callable[[str, str, int], str]) -> list[Message]:
    """Replaces ids by ``new_id(old id, function name, number of the call in the conversation)``."""
    ids: dict[str, str] = {}
    out = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            old = call.get("id", "")
            ids[old] = new_id(old, call["function"]["name"], len(ids))
            calls.append({**call, "id": ids[old]})
        result_id = message.get("tool_call_id")
        changed = {"tool_call_id": ids.get(result_id, result_id)} if result_id is not None else {}
        out.append(message | changed | ({"tool_calls": calls} if calls else {}))
    return out


def _turns(messages: Sequence[Message]) -> Iterator[tuple[Message | None, list[Message]]]:
    """Yields each message with the results that follow it."""
    current: Message | None = None
    results: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        if current or results:
            yield current, results
        current, results = message, []
    if current or results:
        yield current, results


def _as_text_where(
    messages: Sequence[Message], is_meant: Callable[[Message, Sequence[Message]], bool]
) -> list[Message]:
    out: list[Message] = []
    for message, results in _turns(messages):
        turn = [*([message] if message else []), *results]
        out += calls_as_text(turn) if is_meant(message or {}, results) else turn
    return out


def _is_paired(message: Message, results: Sequence[Message]) -> bool:
    calls = message.get("tool_calls", ())
    ids = {call.get("id") for call in calls}
    return len(calls) == len(results) and all(result.get("tool_call_id", None) in {None, *ids} for result in results)


def _single_calls(message: Message | None) -> list[Message]:
    """Makes one message for each call. The first message keeps all other fields."""
    if message is None:
        return []
    first, *rest = message.get("tool_calls") or [None]
    if not rest:
        return [message]
    more = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in rest]
    return [{**message, "tool_calls": [first]}, *more]


def _without_calls(message: Message) -> Message:
    out = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    return {**out, "content": "\n".join(filter(None, [out["content"], *calls]))} if calls else out


def _call_text(function: Message) -> str:
    """Writes a call in the form that ``with_definitions`` teaches. This is the model's own text if it kept to the form.

    Arguments that are not an object (the call was cut off) become a JSON string.
    """
    arguments = function["arguments"]
    value = json.dumps(arguments.text, ensure_ascii=False) if arguments.value is None else arguments.text or "{}"
    written = {"FUNCTION": function["name"], "{ARGUMENTS}": value}
    return re.sub("FUNCTION|{ARGUMENTS}", lambda match: written[match[0]], arguments.example)


# Steps that change how fields are written


def no_content_in_calls(messages: Sequence[Message]) -> list[Message]:
    """Sets the content of calls without text to null."""
    return [{**m, "content": None} if "tool_calls" in m and not m["content"] else m for m in messages]


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Writes the arguments of calls as JSON text."""
    return [_with_arguments(message, lambda arguments: arguments.text) for message in messages]


def arguments_wrapped(messages: Sequence[Message]) -> list[Message]:
    """Wraps arguments that are not an object, such as those of a call that was cut off, as text in an object."""

    def wrap(arguments: Arguments) -> Any:
        return {"arguments": arguments.text} if arguments.value is None else arguments

    return [_with_arguments(message, wrap) for message in messages]


def with_plain_arguments(message: Message) -> Message:
    """Writes arguments as most templates expect them: an object, or text if they do not parse to one."""
    return _with_arguments(message, lambda a: a.text if a.value is None else a.value)


def _with_arguments(message: Message, write: Callable[[Arguments], Any]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        written = write(arguments) if isinstance(arguments, Arguments) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": written}})
    return {**message, "tool_calls": calls}
