"""Finds the messages of a conversation that are missing from the prompt that a chat template made of it.

First, a sample of each text is searched in the prompt. Templates strip, escape and shorten texts, so a missing sample
is only a suspicion. Rendering the conversation again with a marker word in place of each text settles it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from mlx_serve.text.templates.call_forms import Arguments, Message

# A sample comes from this many characters at the end of a text: templates cut reasoning off the beginning.
_N_TAIL = 48
# No template escapes these characters. A run of them in the prompt is rarely there by chance.
_PLAIN_RUN = re.compile(r"\w[\w ]{6,}\w")
_PLAIN = re.compile(r"\w[\w ]*")
# Each sample out of order costs a search through the whole prompt. More than this many count as missing.
_MAX_OUT_OF_ORDER = 32


def missing_messages(
    messages: Sequence[Message], text: str, render: Callable[[list[Message]], str | None]
) -> list[int]:
    """The indices of the messages whose content or calls are not in ``text``.

    ``render`` makes a prompt of other messages in the same form. It returns None if the template refuses them.
    """
    if _has_all(_samples(messages), text):
        return []
    marked, words = _marked(messages)
    marked_text = render(marked)
    if marked_text is None:
        return []
    lowered = marked_text.lower()
    return [i for i, own in enumerate(words) if any(word not in lowered for word in own)]


def has_tools(tools: Sequence[Any], text: str) -> bool:
    """Whether ``text`` contains the names of all tools. Some templates write names in capitals."""
    names = [tool["function"]["name"] for tool in tools]
    return _has_all(names, text) or _has_all(map(str.lower, names), text.lower())


def _samples(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if content := message["content"]:
            run = _PLAIN_RUN.search(content, len(content) - _N_TAIL)
            yield run[0] if run else _short_sample(content)
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]


def _short_sample(text: str) -> str:
    return max(_PLAIN.findall(text[-_N_TAIL:]), key=len, default=text.strip())


def _has_all(samples: Iterable[str], text: str) -> bool:
    """Whether ``text`` contains all samples, mostly in order, with equal samples at different places."""
    at, n_out_of_order = 0, 0
    # For each sample: where its last occurrence so far ends.
    ends: dict[str, int] = {}
    for sample in samples:
        end = ends.get(sample, 0)
        found = text.find(sample, at if at > end else end)
        if found < 0:
            n_out_of_order += 1
            found = -1 if n_out_of_order > _MAX_OUT_OF_ORDER else text.find(sample, end)
        if found < 0:
            return False
        at = ends[sample] = found + len(sample)
    return True


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[list[str]]]:
    """Replaces each text of the messages by a unique word. Returns the messages, and the words of each."""
    marked, words, numbers = [], [], count()

    def new() -> str:
        own.append(f"zq{next(numbers)}zq")
        return own[-1]

    for message in messages:
        own: list[str] = []
        out = {**message, "content": new() if message["content"].strip() else message["content"]}
        if "tool_calls" in message:
            out["tool_calls"] = [_marked_call(call, new()) for call in message["tool_calls"]]
        marked.append(out)
        words.append(own)
    return marked, words


def _marked_call(call: Message, word: str) -> Message:
    function = call["function"]
    value = None if function["arguments"].value is None else {"zq": word}
    arguments = Arguments(f'{{"zq": "{word}"}}', value, function["arguments"].example)
    return {**call, "function": {**function, "arguments": arguments}}
