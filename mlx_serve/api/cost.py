"""What a request may cost before a job of it is admitted: bounds that are checked before the work, or while it runs.

Knows no dialect: the names of fields are the callers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from mlx_serve.api.errors import ContextLengthError
from mlx_serve.values import ApiError, Check, ClientGone, RawRequest

# As the flag's default has it.
MAX_JSON_VALUES = 2**20
# Tokens of a prompt that is to be cut (vLLM's ``truncate_prompt_tokens``), whatever the context.
MAX_CUT_TOKENS = 2**20
# Log-probabilities, alternatives counted, that a whole answer may collect (each takes some 500 bytes until it is sent),
# and those of a stream, which wait only for a client that reads slowly.
MAX_LOGPROBS = 2**18
MAX_STREAMED_LOGPROBS = 2**22
# Bodies with more values are parsed one at a time, so that the objects of many never lie in memory together.
_MANY_VALUES = 2**16
_MANY_LOCK = Lock()
# The characters that each begin, or end, another value of JSON text. A key costs more than most values.
_VALUE_MARKS = (b"[", b"{", b",", b":")


def n_values(raw: bytes) -> int:
    """At least as many values as JSON text has, without parsing it. Such characters in strings count too.

    A value costs up to a hundred times the memory of its text, and parsing holds up every other thread.
    """
    return sum(map(raw.count, _VALUE_MARKS))


def check_values(raw: bytes, most: int) -> None:
    """Raises ApiError 400 when JSON text has more than ``most`` values."""
    found = n_values(raw)
    if found > most:
        text = f"The request body has {found} brackets, commas and colons, more than {most} (--max-json-values)."
        raise ApiError(400, text, code="too_many_json_values")


def parsing(raw: bytes) -> AbstractContextManager[Any]:
    """To be held while JSON text is parsed and becomes a request."""
    return _MANY_LOCK if n_values(raw) > _MANY_VALUES else nullcontext()


def tokens_with_logprobs(n_answers: int, n_alternatives: int, *, streamed: bool) -> int:
    """How many tokens each answer may have, if each comes with its log-probability and ``n_alternatives`` others."""
    most = MAX_STREAMED_LOGPROBS if streamed else MAX_LOGPROBS
    return most // (n_answers * (n_alternatives + 1))


def check_prompt_logprobs(n_tokens: int, n_alternatives: int) -> None:
    """Raises ApiError 400 when echoed prompts of so many tokens have too many log-probabilities."""
    if n_tokens * (n_alternatives + 1) > MAX_LOGPROBS:
        text = f"The prompts have more than {MAX_LOGPROBS} log-probabilities, alternatives counted: ask for fewer."
        raise ApiError(400, text, param="echo", code="too_many_logprobs")


def length_check(request: RawRequest, most: int | None, param: str, what: str = "messages") -> Check:
    """Ends the tokenizing of a text that is over the context of ``most`` tokens, or that nobody waits for any more.

    It raises ContextLengthError, which names ``param``, or ClientGone.
    """

    def check(n_tokens: int) -> None:
        if most is not None and n_tokens > most:
            raise ContextLengthError(most, n_tokens, param, what)
        if not request.alive():
            raise ClientGone

    return check


def n_content_chars(messages: Iterable[Mapping[str, Any]]) -> int:
    """The characters of the messages' texts, which every template shows; what else it shows is counted later."""
    return sum(len(message["content"] or "") for message in messages)
