"""Limits on the work that a request causes before its jobs are admitted, checked before that work or during it.

Knows no dialect: callers pass the names of fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from mlx_serve.api.errors import ContextLengthError
from mlx_serve.values import ApiError, Check, ClientGone, RawRequest

# The flag's default.
MAX_JSON_VALUES = 2**20
# The most tokens of a prompt that the server truncates (vLLM's ``truncate_prompt_tokens``), whatever the context.
MAX_CUT_TOKENS = 2**20
# The most log-probabilities, alternatives included, of an answer in one piece: each takes some 500 bytes until it is
# sent. The second limit is a stream's: its log-probabilities wait only when the client reads slowly.
MAX_LOGPROBS = 2**18
MAX_STREAMED_LOGPROBS = 2**22
# Bodies with more values than this are parsed one at a time, so that their objects are not in memory together.
_MANY_VALUES = 2**16
_MANY_LOCK = Lock()
# Each of these characters begins or ends a value in JSON text. A key costs more than most values.
_VALUE_MARKS = (b"[", b"{", b",", b":")


def n_values(raw: bytes) -> int:
    """An upper bound of the values in JSON text, without parsing it. Such characters in strings count too.

    A parsed value takes up to a hundred times the memory of its text, and parsing blocks every other thread.
    """
    return sum(map(raw.count, _VALUE_MARKS))


def check_values(raw: bytes, most: int) -> None:
    """Raises ApiError 400 when JSON text has more than ``most`` values."""
    found = n_values(raw)
    if found > most:
        text = f"The request body has {found} brackets, commas and colons, more than {most} (--max-json-values)."
        raise ApiError(400, text, code="too_many_json_values")


def parsing(raw: bytes) -> AbstractContextManager[Any]:
    """The lock to hold while JSON text is parsed and converted to a request."""
    return _MANY_LOCK if n_values(raw) > _MANY_VALUES else nullcontext()


def tokens_with_logprobs(n_answers: int, n_alternatives: int, *, streamed: bool) -> int:
    """The most tokens of each answer, if each token comes with its log-probability and ``n_alternatives`` others."""
    most = MAX_STREAMED_LOGPROBS if streamed else MAX_LOGPROBS
    return most // (n_answers * (n_alternatives + 1))


def check_prompt_logprobs(n_tokens: int, n_alternatives: int) -> None:
    """Raises ApiError 400 when echoed prompts of so many tokens have too many log-probabilities."""
    if n_tokens * (n_alternatives + 1) > MAX_LOGPROBS:
        text = f"The prompts have more than {MAX_LOGPROBS} log-probabilities, alternatives counted: ask for fewer."
        raise ApiError(400, text, param="echo", code="too_many_logprobs")


def length_check(request: RawRequest, most: int | None, param: str, what: str = "messages") -> Check:
    """A check that ends tokenizing when the text exceeds ``most`` tokens or the client has left.

    It raises ContextLengthError, which names ``param``, or ClientGone.
    """

    def check(n_tokens: int) -> None:
        if most is not None and n_tokens > most:
            raise ContextLengthError(most, n_tokens, param, what)
        if not request.alive():
            raise ClientGone

    return check


def n_content_chars(messages: Iterable[Mapping[str, Any]]) -> int:
    """The characters of the messages' texts. Every template renders these; the rest is counted after rendering."""
    return sum(len(message["content"] or "") for message in messages)
