"""From messages, or a text, to the token ids that the model is given. Knows no HTTP and no jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, takewhile
from typing import Any

from mlx_serve.core import ApiError, Check, Prompt, unchecked
from mlx_serve.text import harmony
from mlx_serve.text.formats import Formats, formats
from mlx_serve.text.guard import Guard
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.text.toolprompt import as_text, with_definitions

Message = dict[str, Any]

_MAX_KEPT = 32
# For models without a chat template; the words are mlx_lm.server's, whose ``role_mapping`` may change them.
DEFAULT_ROLE_MAPPING = {
    "system": "ASSISTANT's RULE: ",
    "user": "USER: ",
    "assistant": "ASSISTANT: ",
    "stop": "\n",
}


@dataclass(frozen=True, slots=True)
class ChatText:
    """A conversation as the model will read it, not yet tokenized.

    ``special``: a plain text, which gets a start token, and ends with what was ``said``. Otherwise what the assistant's
    turn begins with, ``thought`` and ``said``, comes behind the text.
    """

    formats: Formats
    text: str
    special: bool
    thought: str = ""
    said: str = ""

    def prompt(self, check: Check = unchecked) -> Prompt:
        """Its tokens. ``check`` is told how many there are at least, before and while they are made, and may raise."""
        tokens = self.formats.tokenizer.encode(self.text, special=self.special, check=check)
        if self.special:
            return Prompt(tuple(tokens), continues=bool(self.said))
        if self.thought or self.said:
            return _begun(self.formats, tokens, self.thought, self.said, check)
        return Prompt(tuple(tokens), in_reasoning=self.formats.ends_in_reasoning(tokens))


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    role_mapping: Mapping[str, str] | None = None,
    begun: Mapping[str, Any] | None = None,
    is_open: bool = True,
    check: Check = unchecked,
) -> Prompt:
    """The prompt for the assistant's next turn: ``chat_text``, tokenized under ``check``."""
    return chat_text(
        tokenizer,
        messages,
        tools=tools,
        options=options,
        role_mapping=role_mapping,
        begun=begun,
        is_open=is_open,
        check=check,
    ).prompt(check)


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    role_mapping: Mapping[str, str] | None = None,
    begun: Mapping[str, Any] | None = None,
    is_open: bool = True,
    check: Check = unchecked,
) -> ChatText:
    """The text for the assistant's next turn.

    ``messages`` have string content. ``options`` go to the chat template. ``begun`` is the beginning of that turn, a
    message for the model to go on from; with ``is_open`` false the prompt ends behind the last message, and no turn is
    opened. Raises ApiError 400 when the template refuses them, also after they were brought into a form that more
    templates take, and when the model's format has no place for a turn that has begun. What ``check`` raises at a text
    that is certainly too long ends the work before the text is built.
    """
    thought, said = ((begun or {}).get(key) or "" for key in ("reasoning_content", "content"))
    found = formats(tokenizer)
    guarded = _guarded(found, messages)
    offered = _guard(tokenizer, is_own=True).value(list(tools or ()))
    if not found.template_has_calls:
        guarded = as_text(guarded)
    if offered and not found.template_has_tools:
        guarded, offered = with_definitions(guarded, offered, found.calls), []
    if not tokenizer.has_chat_template:
        mapping = role_mapping or DEFAULT_ROLE_MAPPING
        # A client's mapping is repeated for each message: the text may be far longer than the request.
        check(n_plain_chars(guarded, mapping) // tokenizer.max_token_chars)
        text = plain_chat(guarded, mapping, is_open=is_open)
        text += f" {_guard(tokenizer, is_own=False).text(said)}" if said else ""
        return ChatText(found, text, special=True, said=said)
    text = _render(tokenizer, _in_its_words(found, guarded), offered, {**(options or {}), **_ENDINGS[is_open]})
    return ChatText(found, text, special=False, thought=thought, said=said)


_ENDINGS: Mapping[bool, Mapping[str, Any]] = {True: {}, False: {"add_generation_prompt": False}}


def can_continue(tokenizer: Tokenizer) -> bool:
    """Whether a model can go on from the beginning of a turn: not where a header stands before each part of it."""
    return not formats(tokenizer).is_harmony and tokenizer.initial_region in (None, "normal")


def _begun(found: Formats, tokens: Sequence[int], thought: str, said: str, check: Check) -> Prompt:
    """A prompt with the beginning of the answer behind it. Whoever has said something has ended the thoughts before."""
    if not can_continue(found.tokenizer):
        raise ApiError(400, "This model cannot go on from the beginning of an assistant's message.", param="messages")
    guard = _guard(found.tokenizer, is_own=False)
    is_thinking = found.ends_in_reasoning(tokens)
    text = ""
    if thought and found.think is not None:
        text, is_thinking = ("" if is_thinking else f"{found.think[0]}\n") + guard.text(thought), True
    if said and is_thinking and found.think is not None:
        text, is_thinking = f"{text}\n{found.think[1]}\n\n".removeprefix("\n"), False
    ids = found.tokenizer.encode(text + guard.text(said), special=False, check=lambda n: check(len(tokens) + n))
    return Prompt((*tokens, *ids), is_thinking, continues=bool(said))


def text_prompt(tokenizer: Tokenizer, text: str, check: Check = unchecked, *, special: bool = True) -> Prompt:
    """The prompt for a plain completion; ``special``: with what the tokenizer puts around a text.

    ``check`` as in ``chat_prompt``.
    """
    return Prompt(tuple(tokenizer.encode(text, special=special, check=check)))


def plain_chat(messages: Sequence[Mapping[str, Any]], role_mapping: Mapping[str, str], *, is_open: bool = True) -> str:
    """Messages as lines of text, for models without a chat template. ``is_open``: with the assistant's next one."""
    stop = role_mapping.get("stop", "")
    lines = [f"{role_mapping.get(m['role'], '')}{m.get('content') or ''}{stop}" for m in messages]
    return ("".join(lines) + role_mapping.get("assistant", "") * is_open).rstrip()


def n_plain_chars(messages: Sequence[Mapping[str, Any]], role_mapping: Mapping[str, str]) -> int:
    """The characters of ``plain_chat``'s lines, without building them."""
    n_stop = len(role_mapping.get("stop", ""))
    return sum(len(role_mapping.get(m["role"], "")) + len(m.get("content") or "") + n_stop for m in messages)


@lru_cache(maxsize=_MAX_KEPT)
def _guard(tokenizer: Tokenizer, *, is_own: bool) -> Guard:
    """What may be no control token in a text. ``is_own``: an assistant's earlier turns, and a client's instructions.

    Those may hold the markers of reasoning and calls: templates look for the former, and some clients explain the
    latter.
    """
    found = formats(tokenizer)
    if not is_own or found.is_harmony:
        return Guard(found.controls.values())
    special = tokenizer.special_ids - found.in_markers.keys()
    return Guard(text for token, text in found.controls.items() if token in special)


def _guarded(found: Formats, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as templates expect them: no null, content always a string, nothing that becomes a control token."""
    out = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None and value != []}
        guard = _guard(found.tokenizer, is_own=message["role"] in ("assistant", "system"))
        out.append(guard.message({"content": "", **kept}))
    return out


def _in_its_words(found: Formats, messages: Sequence[Message]) -> list[Message]:
    """Messages with the fields that the model's own template reads."""
    if found.is_harmony:
        # Its template passes over every system message but one in front.
        return harmony.history(system_in_front(messages))
    template = found.tokenizer.template or "reasoning_content"
    out = _with_call_ids(found, messages)
    if "reasoning_content" in template or "thinking" not in template:
        return out
    return [m | {"thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in out]


def _with_call_ids(found: Formats, messages: Sequence[Message]) -> list[Message]:
    """Ids in the form that the template wants, the same for a call and its result."""
    ids: dict[str, str] = {}
    out = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            call_id = call.get("id", "")
            ids[call_id] = found.calls.call_id(call_id, call["function"]["name"], len(ids))
            calls.append({**call, "id": ids[call_id]})
        result_id = message.get("tool_call_id")
        changed = {"tool_call_id": ids.get(result_id, result_id)} if result_id is not None else {}
        out.append(message | changed | ({"tool_calls": calls} if calls else {}))
    return out


def _render(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The first rendering that the template takes. Clients read what it says of the messages as they are."""
    refusal: ApiError | None = None
    tried: list[Any] = []
    for offered, rendering in product((list(tools), _filled(tools)), _renderings(messages)):
        if (offered, rendering) in tried:
            continue
        tried.append((offered, rendering))
        try:
            return tokenizer.render_chat(rendering, offered or None, options)
        except ApiError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _filled(tools: Sequence[Any]) -> list[Any]:
    """Tools with what OpenAI lets a client leave out: gpt-oss's template, for one, fails without a description."""
    out = []
    for tool in tools:
        function = {"description": "", **tool["function"]}
        function["parameters"] = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        out.append({**tool, "function": function})
    return out


def _renderings(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages, and then in forms that more templates take: a call's arguments as text or wrapped, turns joined."""
    in_front, merged = system_in_front(messages), merge_turns(messages)
    folded = _with_text_in_results(merged)
    for form in (list(messages), in_front, merged, _without_system(merged), folded, _without_system(folded)):
        for way in ("object", "text", "wrapped"):
            yield [_with_arguments(message, way) for message in form]


def _with_arguments(message: Message, way: str) -> Message:
    """A message with its calls' arguments as most templates want them (an object), or in another way."""
    if "tool_calls" not in message or way == "text":
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        value = _json_object(function["arguments"])
        # A call that was cut off comes back as it was: then the template gets the text, if it can take it.
        if value is not None or way == "wrapped":
            function["arguments"] = value if value is not None else {"arguments": function["arguments"]}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def reminder(text: str) -> str:
    """What the system says in mid-conversation, as part of a user's turn; the words are Claude Code's."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def system_in_front(messages: Sequence[Message]) -> list[Message]:
    """One system message, in front. What comes later stays in its place as a user's, or prompts would begin anew."""
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    text = "\n\n".join(filter(None, (message["content"] for message in leading)))
    out: list[Message] = [{"role": "system", "content": text}] if text else []
    for message in messages[len(leading) :]:
        if message["role"] != "system":
            out.append(message)
        elif message["content"]:
            out.append({"role": "user", "content": reminder(message["content"])})
    return out


def merge_turns(messages: Sequence[Message]) -> list[Message]:
    """One system message, in front, and turns of one side that follow each other as one."""
    turns: list[list[Message]] = []
    for message in system_in_front(messages):
        if turns and _may_join(turns[-1][-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _joined(turn: Sequence[Message]) -> Message:
    """Messages of one side as one, with the fields of the first that the others do not have."""
    if len(turn) == 1:
        return turn[0]
    return {**turn[0], "content": "\n\n".join(filter(None, (message["content"] for message in turn)))}


def _may_join(first: Message, second: Message) -> bool:
    same = first["role"] == second["role"] and first["role"] in ("user", "assistant")
    return same and not (first.keys() | second.keys()) & {"tool_calls", "reasoning_content", "thinking"}


def _with_text_in_results(messages: Sequence[Message]) -> list[Message]:
    """For templates that want an answer right behind a tool's result: what a user adds to it goes into it."""
    out: list[Message] = []
    for message in messages:
        if out and (out[-1]["role"], message["role"]) == ("tool", "user"):
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append(message)
    return out


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """For templates that know no system message: it goes before the first user's."""
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return list(messages)
    text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return [{**messages[1], "content": text}, *messages[2:]]
