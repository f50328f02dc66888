"""Finds out, once for each chat template, which form of a conversation it renders without losing content.

The probe renders conversations of marker words, and chooses the mildest form in which all words come out. Errors alone
do not tell: many templates silently drop a system message, a tool or a call. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any, Literal, TypeAlias

from mlx_serve.text.templates import call_forms as calls
from mlx_serve.text.templates import forms
from mlx_serve.text.templates import turn_forms as turns
from mlx_serve.text.templates.call_forms import Message
from mlx_serve.text.templates.forms import Step
from mlx_serve.text.templates.probe_words import (
    assistant,
    cut_call,
    n_lost,
    nested_tools,
    result,
    sparse_tools,
    system,
    tool,
    user,
)
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError

Steps: TypeAlias = frozenset[Step]
Tools: TypeAlias = list[dict[str, Any]]
ToolForm: TypeAlias = Literal["own", "filled", "flat", "described"]

_MAX_KEPT = 32
# The names that templates use for the option that switches reasoning on.
_THINKING_OPTIONS = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class Plan:
    """The form of conversation that a template needs.

    ``shows_users``: whether the prompt contains the user's text. Templates of speech and ranking models leave it out.
    ``tools``: "own" as the client wrote them, "filled" with the fields that OpenAI makes optional, "flat" with the
    function's fields also in the tool itself, or "described" in a system message.
    ``untold``: keywords of JSON schemas that the template leaves out of the parameters of tools.
    ``thinking_option``: the template's name for the option that switches reasoning on.
    """

    steps: Steps
    tools: ToolForm
    thinking_option: str
    shows_users: bool = True
    untold: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Matter:
    """Conversations with one property in common, and the steps that they may need, the mildest first."""

    conversations: tuple[list[Message], ...]
    choices: tuple[tuple[Step, ...], ...]


_S, _S2, _S3 = system("a"), system("b"), system("c")
_U, _U2, _U3 = user("a"), user("b"), user("c")
_A, _A2 = assistant("a"), assistant("b")
_CALL, _R, _R2 = assistant("", "caa"), result("caa"), result("cbb")
_CALL2, _TWO_CALLS = assistant("", "cbb"), assistant("", "caa", "cbb")
_SPOKEN, _THINKING = assistant("a", "caa"), assistant("a", thoughts="Hm.")
_CALL_FIELDS: tuple[Step, ...] = (
    *(calls.ids_with_names, calls.ids_of_nine, calls.no_content_in_calls, calls.named_results),
    calls.arguments_as_text,
)
_AS_TEXT: tuple[tuple[Step, ...], ...] = ((calls.calls_as_text,), (calls.calls_as_text, turns.turns_joined))

# Each matter is probed with the steps that the matters before it need.
_MATTERS = (
    _Matter(
        ([_U], [_U, _A, _U2], [_U, _A, _U2, _A2, _U3]),
        (
            (turns.content_in_parts,),
            (turns.system_first,),
            (turns.turns_joined, calls.calls_as_text, turns.history_in_user),
        ),
    ),
    # One system message, several, and late ones.
    _Matter(([_S, _U], [_S, _U, _A, _U2]), ((turns.system_in_user,),)),
    _Matter(([_S, _U, _A],), ((turns.system_in_user_if_late,),)),
    _Matter(([_S, _S2, _U],), ((turns.systems_joined,),)),
    _Matter(
        (
            *([_S, _U, _S2], [_S, _U, _A, _S2, _U2], [_U, _A, _S, _U2], [_S, _U, _A, _U2, _S2]),
            [_S, _U, _S2, _A, _U2, _S3, _U3],
        ),
        ((turns.late_systems_as_user,), (turns.late_systems_as_user, turns.turns_joined)),
    ),
    # Turns in an unusual order.
    _Matter(([_U, _U2], [_S, _U, _A, _U2, _U3]), ((turns.turns_joined,),)),
    _Matter(
        ([_U, _THINKING, _U2], [_U, _THINKING, _U2, _A2]), ((turns.thoughts_in_calls_only,), (turns.without_thoughts,))
    ),
    _Matter(([_U, _A2, _A, _U2], [_U, _A2, _THINKING, _U2]), ((turns.turns_joined,),)),
    _Matter(
        ([_U, assistant(), _U2], [_U, _A, _U2, assistant(), _U3]),
        ((turns.without_empty_turns,), (turns.without_empty_turns, turns.turns_joined)),
    ),
    _Matter(([_A, _U], [_S, _A, _U], [_S]), ((turns.user_first,),)),
    _Matter(([_U, _A], [_A]), ((turns.user_last,),)),
    # Calls and results: one, several, and with text or reasoning beside them.
    _Matter(
        ([_U, _CALL, _R], [_U, _CALL, _R, _A, _U2], [_S, _U, _CALL, _R, _A, _U2, _CALL2, _R2]),
        tuple(some for n in (1, 2, 3) for some in combinations(_CALL_FIELDS, n)) + _AS_TEXT,
    ),
    _Matter(([_U, _CALL, _R, _CALL2, _R2, _A2],), _AS_TEXT),
    _Matter(
        ([_U, _TWO_CALLS, _R, _R2], [_U, _TWO_CALLS, _R, _R2, _A, _U2]),
        ((calls.one_call_each,), (calls.several_as_text,), (calls.several_as_text, turns.turns_joined)),
    ),
    _Matter(
        (
            [_U, _SPOKEN, _R],
            [_U, _SPOKEN, _R, _A2, _U2],
            [_U, _CALL2, _R2, _SPOKEN, _R],
            [_U, _CALL2, _R2, _SPOKEN, _R, _A2],
        ),
        (
            (calls.content_apart_once_answered,),
            (calls.content_apart,),
            (calls.spoken_as_text,),
            (calls.spoken_as_text, turns.turns_joined),
        ),
    ),
    _Matter(
        ([_U, assistant("a", "caa", thoughts="zqhzq"), _R],),
        (
            (turns.thoughts_as_thinking,),
            (calls.content_in_thoughts,),
            (calls.content_in_thoughts, turns.thoughts_as_thinking),
        ),
    ),
    _Matter(([_U, cut_call("caa"), _R, _A, _U2],), ((calls.arguments_wrapped,),)),
    _Matter(([_U, _CALL, _R, _U2], [_U, _TWO_CALLS, _R, _R2, _U2, _A, _U3]), ((turns.text_in_results,),)),
    _Matter(([_S, _CALL, _R], [_CALL, _R, _A, _U]), ((turns.user_first,),)),
    _Matter(
        (
            *([_U, _R, _U2], [_U, _A, _R, _U2], [_U, _A, _R], [_R, _U], [_U, _CALL]),
            *([_U, _CALL, _U2], [_U, _TWO_CALLS, _R, _U2], [_U, _CALL, _R, _R2, _A, _U2]),
        ),
        ((calls.unpaired_as_text,), (calls.unpaired_as_text, turns.turns_joined)),
    ),
)
# If a template still refuses or shortens a conversation, these steps are added, one row after the other.
STRICTER: tuple[tuple[Step, ...], ...] = (
    (turns.late_systems_as_user, turns.systems_joined),
    (turns.turns_joined, turns.without_empty_turns),
    (turns.user_first,),
    (calls.unpaired_as_text, calls.arguments_wrapped),
    (turns.text_in_results,),
    (calls.calls_as_text,),
    (turns.system_in_user,),
    (turns.without_thoughts,),
    (turns.history_in_user,),
)
TOOL_FORMS: Mapping[ToolForm, Callable[[Tools], Tools]] = {"own": list, "filled": forms.filled, "flat": forms.flat}
_WITHOUT_TEMPLATE = Plan(frozenset({calls.calls_as_text}), "described", _THINKING_OPTIONS[0])
_TOOLS = [tool("taa"), tool("tbb")]


@lru_cache(maxsize=_MAX_KEPT)
def plan(tokenizer: Tokenizer, *, with_tools: bool) -> Plan:
    """The form that the tokenizer's template needs, for requests with or without tools."""
    if not tokenizer.has_chat_template:
        return _WITHOUT_TEMPLATE
    form, steps = _tool_form(tokenizer) if with_tools else ("own", frozenset())
    tools = TOOL_FORMS[form](_TOOLS) if with_tools and form != "described" else None
    untold = _untold(tokenizer, form, steps) if tools else frozenset()
    for matter in _MATTERS:
        steps = _choose(tokenizer, matter, steps, tools)
    alone = _text(tokenizer, forms.in_form([_U], steps), tools)
    shows_users = alone is None or not n_lost(_U, alone)
    return Plan(steps, form, _thinking_option(tokenizer), shows_users, untold)


def _choose(tokenizer: Tokenizer, matter: _Matter, steps: Steps, tools: Tools | None) -> Steps:
    """``steps`` and the first choice that loses no word, or else the choice that loses the fewest."""
    lost: dict[Steps, int] = {}
    for choice in ((), *matter.choices):
        form = steps.union(choice)
        lost[form] = sum(_n_lost(tokenizer, messages, form, tools) for messages in matter.conversations)
        if not lost[form]:
            return form
    return min(lost, key=lost.__getitem__)


def _n_lost(tokenizer: Tokenizer, messages: Sequence[Message], steps: Steps, tools: Tools | None) -> int:
    return n_lost([messages, tools], _text(tokenizer, forms.in_form(messages, steps), tools) or "")


def _tool_form(tokenizer: Tokenizer) -> tuple[ToolForm, Steps]:
    """The mildest form in which the template shows every tool in full, with and without a system message."""
    everything = [*_TOOLS, *sparse_tools()]
    ways = [(form, tools) for tools in (everything, _TOOLS) for form in TOOL_FORMS]
    choices: tuple[Steps, ...] = (frozenset(), frozenset({turns.system_first}), frozenset({turns.system_in_user}))
    for (form, given), steps in product(ways, choices):
        tools = TOOL_FORMS[form](given)
        texts = [_text(tokenizer, forms.in_form(messages, steps), tools) for messages in ([_S, _U], [_U])]
        if not any(n_lost(tools, text or "") for text in texts):
            return form, steps
    return "described", frozenset()


def _untold(tokenizer: Tokenizer, form: ToolForm, steps: Steps) -> frozenset[str]:
    messages, found = forms.in_form([_U], steps), set()
    for keyword, tool_of_it in nested_tools().items():
        text = _text(tokenizer, messages, TOOL_FORMS[form]([tool_of_it]))
        # A tool that the template refuses is described in a system message anyway.
        if text is not None and n_lost(tool_of_it, text):
            found.add(keyword)
    return frozenset(found)


def _thinking_option(tokenizer: Tokenizer) -> str:
    """The option's name that changes the template's output."""
    for name in _THINKING_OPTIONS:
        if len({_text(tokenizer, [_U], None, {name: value}) for value in (True, False)}) > 1:
            return name
    return _THINKING_OPTIONS[0]


def _text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None,
    options: Mapping[str, Any] | None = None,
) -> str | None:
    """The template's output, or None if the template refuses the messages."""
    try:
        return tokenizer.render_chat(messages, tools, options or {})
    except ApiError:
        return None
