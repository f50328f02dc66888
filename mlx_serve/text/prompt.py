"""From messages, or a text, to the token ids that the model is given. Knows no HTTP and no jobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_serve.core import Prompt
from mlx_serve.text.tokenizer import Tokenizer

# For models without a chat template; the words are mlx_lm.server's, whose ``role_mapping`` may change them.
DEFAULT_ROLE_MAPPING = {
    "system": "ASSISTANT's RULE: ",
    "user": "USER: ",
    "assistant": "ASSISTANT: ",
    "stop": "\n",
}


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    role_mapping: Mapping[str, str] | None = None,
) -> Prompt:
    """The prompt for the assistant's next turn.

    ``messages`` have string content. ``options`` go to the chat template. Raises ApiError 400 when the template
    refuses them.
    """
    if not tokenizer.has_chat_template:
        text = plain_chat(messages, role_mapping or DEFAULT_ROLE_MAPPING)
        return Prompt(tuple(tokenizer.encode(text, special=True)))
    tokens = tokenizer.render_chat([_for_template(message) for message in messages], tools, options or {})
    return Prompt(tuple(tokens), in_reasoning=tokenizer.ends_in_reasoning(tokens))


def text_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """The prompt for a plain completion."""
    return Prompt(tuple(tokenizer.encode(text, special=True)))


def plain_chat(messages: Sequence[Mapping[str, Any]], role_mapping: Mapping[str, str]) -> str:
    """Messages as lines of text, for models without a chat template."""
    stop = role_mapping.get("stop", "")
    lines = [f"{role_mapping.get(m['role'], '')}{m.get('content') or ''}{stop}" for m in messages]
    return ("".join(lines) + role_mapping.get("assistant", "")).rstrip()


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: content always a string, a call's arguments an object."""
    out = {key: value for key, value in message.items() if value is not None}
    out.setdefault("content", "")
    if "tool_calls" in out:
        out["tool_calls"] = [_call_for_template(call) for call in out["tool_calls"]]
    return out


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    # A call that was cut off comes back as it was: then the template gets the text.
    with contextlib.suppress(ValueError):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
