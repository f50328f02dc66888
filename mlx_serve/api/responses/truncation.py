"""``truncation`` auto: the prompt of as many of the last turns as fit. Knows no store and no engine.

Tokenizing is expensive, so the length of a candidate is estimated before it is rendered and tokenized. The estimate
takes the tokens per character from the last part of the conversation. A message counts with the characters of its texts
and a share of the characters that the template adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_serve.api.responses import history
from mlx_serve.text.prompt import ChatText
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError, Check, Prompt

Messages = Sequence[dict[str, Any]]
# An estimate that was too low is raised by at least this factor.
_STEP = 1.02


def truncated(
    messages: Messages, render: Callable[[Messages], ChatText], tokenizer: Tokenizer, check: Check, most: int
) -> Prompt:
    """The prompt of the messages without their oldest turns, of at most ``most`` tokens unless the last turn has more.

    ``check`` ends the tokenizing of a text, and has the last word on its length. Raises what it raises.
    """
    n_droppable = history.n_turns(messages) - 1
    text = render(messages)
    if n_droppable < 1:
        return text.prompt(check)
    n_chars = _Lengths(messages, len(text.text))
    ratio = _tokens_per_char(tokenizer, text.text, check, most)
    n_dropped = 0
    while (n_dropped := _first_that_fits(n_chars, ratio, most, n_dropped, n_droppable)) < n_droppable:
        if n_dropped:
            text = render(history.without_oldest(messages, n_dropped))
        prompt = _prompt(text, check, most)
        if prompt is not None:
            return prompt
        ratio = max(ratio, most / len(text.text)) * _STEP
        n_dropped += 1
    return render(history.without_oldest(messages, n_droppable)).prompt(check)


class _Lengths:
    """Estimates the characters of a rendered conversation, by the turns that are left out of it."""

    def __init__(self, messages: Messages, n_rendered: int) -> None:
        self._messages = messages
        self._around = (n_rendered - sum(map(_n_own_chars, messages))) / len(messages)

    def without(self, n_dropped: int) -> float:
        kept = history.without_oldest(self._messages, n_dropped)
        return sum(map(_n_own_chars, kept)) + self._around * len(kept)


def _n_own_chars(message: Mapping[str, Any]) -> int:
    calls = sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    return len(message["content"] or "") + len(message.get("reasoning_content", "")) + calls


def _tokens_per_char(tokenizer: Tokenizer, text: str, check: Check, most: int) -> float:
    # A character is at most four tokens, one for each of its bytes: the sample is within the context.
    sample = text[-max(most // 4, 1) :]
    return len(tokenizer.encode(sample, special=False, check=check)) / len(sample)


def _first_that_fits(n_chars: _Lengths, ratio: float, most: int, low: int, high: int) -> int:
    """The fewest turns to leave out, from ``low`` on, with which the estimate is within ``most`` tokens."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if n_chars.without(middle) * ratio <= most else (middle + 1, high)
    return low


def _prompt(text: ChatText, check: Check, most: int) -> Prompt | None:
    """The prompt; None when it has more than ``most`` tokens."""

    def check_both(n_tokens: int) -> None:
        check(n_tokens)
        if n_tokens > most:
            raise _TooLongError

    try:
        return text.prompt(check_both)
    except _TooLongError:
        return None
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return None


class _TooLongError(Exception):
    """A candidate has too many tokens."""
