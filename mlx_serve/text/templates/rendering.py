"""Renders a conversation with the model's chat template, in the mildest form that loses no content.

``probe`` finds the form that the template needs; ``forms`` applies it. Knows no tokens and no request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_serve.text.formats import Formats
from mlx_serve.text.formats import formats as formats_of
from mlx_serve.text.guard import Guard
from mlx_serve.text.templates import forms
from mlx_serve.text.templates.call_forms import Arguments, Message
from mlx_serve.text.templates.forms import Step
from mlx_serve.text.templates.kept import has_tools, missing_messages
from mlx_serve.text.templates.probe import STRICTER, TOOL_FORMS, ToolForm, plan
from mlx_serve.text.templates.tools_as_text import with_definitions
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError

_MAX_KEPT = 32


def rendered(
    formats: Formats, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], options: Mapping[str, Any]
) -> str:
    """Returns the template's text. Tools that the template does not show are described in a system message.

    Raises ApiError 400 if every form loses a part of the conversation or is refused.
    """
    tokenizer = formats.tokenizer
    chosen = plan(tokenizer, with_tools=bool(tools))
    if not chosen.shows_users:
        text = "The model's chat template leaves out what users write: this model is not made for chat."
        raise ApiError(400, text, param="messages")
    turns, options = _turns(formats, messages), _named(options, chosen.thinking_option)
    offered = guard_of(tokenizer, is_own=True).value(list(tools))
    if offered and chosen.tools != "described":
        # The template may refuse or leave out a tool of this kind. The tools are described in words then.
        with suppress(ApiError):
            told = forms.told(offered, chosen.untold)
            return _in_a_form_it_takes(_Way(formats, told, chosen.tools, options), chosen.steps, turns)
    return _in_a_form_it_takes(_Way(formats, offered, "described", options), chosen.steps, turns)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a conversation is rendered, apart from the steps: the tools, their form, and the options."""

    formats: Formats
    offered: Sequence[Any]
    form: ToolForm
    options: Mapping[str, Any]

    def messages(self, turns: Sequence[Message], steps: frozenset[Step]) -> list[Message]:
        """The messages that are passed to the template for ``turns``."""
        if self.offered and self.form == "described":
            turns = with_definitions(turns, self.offered, self.formats.calls)
        return forms.in_form(turns, steps)

    def text(self, messages: Sequence[Message]) -> str:
        """The template's output."""
        tools = None if self.form == "described" else TOOL_FORMS[self.form](list(self.offered))
        return self.formats.tokenizer.render_chat(messages, tools, self.options)

    def loss(self, turns: Sequence[Message], steps: frozenset[Step], text: str) -> ApiError | None:
        """The error that names a part of the conversation that is missing from ``text``. None if nothing is."""
        if not has_tools(self.offered, text):
            return ApiError(400, "The model's chat template leaves out tools.", param="tools")

        def again(marked: list[Message]) -> str | None:
            with suppress(ApiError):
                return self.text(self.messages(marked, steps))
            return None

        for i in missing_messages(turns, text, again):
            left_out = f"message {i + 1} of the conversation, whose role is {turns[i]['role']}"
            return ApiError(400, f"The model's chat template leaves out {left_out}.", param="messages")
        return None


def plain_turns(formats: Formats, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[Message]:
    """The messages for a model without a chat template: tools, calls and results become text."""
    turns = _turns(formats, messages)
    offered = guard_of(formats.tokenizer, is_own=True).value(list(tools))
    described = with_definitions(turns, offered, formats.calls) if offered else turns
    return forms.in_form(described, plan(formats.tokenizer, with_tools=bool(tools)).steps)


@lru_cache(maxsize=_MAX_KEPT)
def guard_of(tokenizer: Tokenizer, *, is_own: bool) -> Guard:
    """The guard that keeps texts from becoming control tokens. ``is_own``: for assistant and system messages.

    These may contain the markers of reasoning and calls: templates look for the markers of reasoning, and some clients
    explain those of calls.
    """
    formats = formats_of(tokenizer)
    if not is_own or formats.is_harmony:
        return Guard(formats.controls.values())
    special = tokenizer.special_ids - formats.in_markers.keys()
    return Guard(text for token, text in formats.controls.items() if token in special)


def _turns(formats: Formats, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as the steps expect them: without nulls, with a string as content, and with guarded texts."""
    turns = []
    for message in messages:
        guard = guard_of(formats.tokenizer, is_own=message["role"] in ("assistant", "system"))
        kept = {key: value for key, value in message.items() if value is not None and value != []}
        turns.append(guard.message({"content": "", **kept}))
        for call in turns[-1].get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"], guard, formats.calls.example)
    return turns


def _arguments(text: str, guard: Guard, example: str) -> Arguments:
    """Guards the arguments after parsing them: a JSON escape may stand for a character of a control token."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return Arguments(text, guard.value(value) if isinstance(value, dict) else None, example)


def _named(options: Mapping[str, Any], thinking_option: str) -> dict[str, Any]:
    """The options of a request, with the option for reasoning renamed as the template knows it."""
    return {thinking_option if name == "enable_thinking" else name: value for name, value in options.items()}


def _in_a_form_it_takes(way: _Way, steps: frozenset[Step], turns: Sequence[Message]) -> str:
    """Renders the messages after ``steps``, adding stricter steps until nothing is missing.

    Raises ApiError with the missing part, or else with the last refusal.
    """
    last: list[Message] | None = None
    loss: ApiError | None = None
    refusal: ApiError | None = None
    for more in ((), *STRICTER):
        steps = steps.union(more)
        messages = way.messages(turns, steps)
        if messages == last:
            continue
        last = messages
        try:
            text = way.text(messages)
        except ApiError as error:
            refusal = error
            continue
        loss = way.loss(turns, steps, text)
        if loss is None:
            return text
        if loss.param == "tools" and way.form != "described":
            break
    failure = loss or refusal
    assert failure is not None
    raise failure
