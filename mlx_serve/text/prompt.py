"""Turns messages, or a text, into the token ids of a prompt. Knows no HTTP and no jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_serve.text.formats import Formats, formats
from mlx_serve.text.templates.rendering import guard_of, plain_turns, rendered
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError, Check, Prompt, unchecked

# For models without a chat template; these are mlx_lm.server's words, and a request's ``role_mapping`` may change them.
DEFAULT_ROLE_MAPPING = {
    "system": "ASSISTANT's RULE: ",
    "user": "USER: ",
    "assistant": "ASSISTANT: ",
    "stop": "\n",
}


@dataclass(frozen=True, slots=True)
class ChatText:
    """A conversation as the model will read it, before tokenizing.

    ``special``: a plain text, which gets a start token, and ends with ``said``. Otherwise the beginning of the
    assistant's turn, ``thought`` and ``said``, is put behind the text.
    """

    formats: Formats
    text: str
    special: bool
    thought: str = ""
    said: str = ""

    def prompt(self, check: Check = unchecked) -> Prompt:
        """Its tokens. ``check`` is called with a lower bound of their number, before and during the work, and may
        raise.
        """
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

    ``messages`` have string content. ``options`` are passed to the chat template. ``begun`` is the beginning of that
    turn, a message that the model continues; with ``is_open`` false the prompt ends behind the last message, and no
    turn is opened. Raises ApiError 400 when the template refuses the messages in every form, and when the model's
    format does not allow a turn that has begun. If a text is certainly too long, ``check`` raises before the text is
    built.
    """
    thought, said = ((begun or {}).get(key) or "" for key in ("reasoning_content", "content"))
    found = formats(tokenizer)
    if tokenizer.has_chat_template:
        text = rendered(found, messages, tools or (), {**(options or {}), **_ENDINGS[is_open]})
        return ChatText(found, text, special=False, thought=thought, said=said)
    lines, mapping = plain_turns(found, messages, tools or ()), role_mapping or DEFAULT_ROLE_MAPPING
    # The role mapping is repeated for each message, so the text may be far longer than the request.
    check(n_plain_chars(lines, mapping) // tokenizer.max_token_chars)
    text = plain_chat(lines, mapping, is_open=is_open)
    text += f" {guard_of(tokenizer, is_own=False).text(said)}" if said else ""
    return ChatText(found, text, special=True, said=said)


_ENDINGS: Mapping[bool, Mapping[str, Any]] = {True: {}, False: {"add_generation_prompt": False}}


def can_continue(tokenizer: Tokenizer) -> bool:
    """Whether a model can continue the beginning of a turn: not if its format has a header before each
    part of a turn.
    """
    return not formats(tokenizer).is_harmony and tokenizer.initial_region in (None, "normal")


def _begun(found: Formats, tokens: Sequence[int], thought: str, said: str, check: Check) -> Prompt:
    """A prompt with the beginning of the answer behind it. If the answer has text, its reasoning has ended before."""
    if not can_continue(found.tokenizer):
        raise ApiError(400, "This model cannot go on from the beginning of an assistant's message.", param="messages")
    guard = guard_of(found.tokenizer, is_own=False)
    is_thinking = found.ends_in_reasoning(tokens)
    text = ""
    if thought and found.think is not None:
        text, is_thinking = ("" if is_thinking else f"{found.think[0]}\n") + guard.text(thought), True
    if said and is_thinking and found.think is not None:
        text, is_thinking = f"{text}\n{found.think[1]}\n\n".removeprefix("\n"), False
    ids = found.tokenizer.encode(text + guard.text(said), special=False, check=lambda n: check(len(tokens) + n))
    return Prompt((*tokens, *ids), is_thinking, continues=bool(said))


def text_prompt(tokenizer: Tokenizer, text: str, check: Check = unchecked, *, special: bool = True) -> Prompt:
    """The prompt for a plain completion; ``special``: with the tokens that the tokenizer puts around a text.

    ``check`` as in ``chat_prompt``.
    """
    return Prompt(tuple(tokenizer.encode(text, special=special, check=check)))


def plain_chat(messages: Sequence[Mapping[str, Any]], role_mapping: Mapping[str, str], *, is_open: bool = True) -> str:
    """Messages as lines of text, for models without a chat template. ``is_open``: followed by the
    assistant's prefix.
    """
    stop = role_mapping.get("stop", "")
    lines = [f"{role_mapping.get(m['role'], '')}{m.get('content') or ''}{stop}" for m in messages]
    return ("".join(lines) + role_mapping.get("assistant", "") * is_open).rstrip()


def n_plain_chars(messages: Sequence[Mapping[str, Any]], role_mapping: Mapping[str, str]) -> int:
    """The number of characters of ``plain_chat``'s lines, without building them."""
    n_stop = len(role_mapping.get("stop", ""))
    return sum(len(role_mapping.get(m["role"], "")) + len(m.get("content") or "") + n_stop for m in messages)
