"""The chunks of one stream to an answer, or to the reason why there is none. Reads no socket and no clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlx_serve.client.errors import Failure

# Fields of a delta that hold generated text beside its content.
_OTHER_TEXTS = ("reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, timed from the moment before its connection was opened or its request sent.

    ``ttft_s``: to the first text, None when there was none; ``e2e_s``: to the finish_reason; ``gaps_s``: between pieces
    of text. Token counts are the server's own; ``cached_tokens`` is None where it does not tell.
    """

    ttft_s: float | None
    e2e_s: float
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    finish: str
    text: str


class Reading:
    """The chunks of one stream, taken in as they come; ``heard`` is told when each text came."""

    def __init__(self, start: float, heard: Callable[[float], None] = lambda now: None) -> None:
        self.done = False
        self._start = start
        self._heard = heard
        self._times: list[float] = []
        self._texts: list[str] = []
        self._finished_at: float | None = None
        self._finish = ""
        self._usage: Mapping[str, Any] | None = None

    def take(self, data: bytes, now: float) -> None:
        """One event's data, which came at ``now``. Raises Failure."""
        if self.done:
            raise Failure("malformed stream", "an event after [DONE]")
        if data == b"[DONE]":
            self.done = True
            return
        chunk = parse_object(data)
        if chunk.get("error") is not None:
            raise Failure("error in the stream", error_message(chunk))
        try:
            self._take_chunk(chunk, now)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise Failure("malformed stream", f"{error} in {data[:200]!r}") from error

    def _take_chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            text = _generated(choice)
            if text is not None:
                self._times.append(now)
                self._texts.append(text)
                self._heard(now)
            if choice.get("finish_reason"):
                self._finish, self._finished_at = choice["finish_reason"], now

    def answer(self) -> Answer:
        """The whole of it. Raises Failure when something is missing."""
        if self._finished_at is None:
            raise Failure("malformed stream", "the stream has no finish_reason")
        if self._usage is None:
            raise Failure("no usage", "the stream has no usage, which stream_options.include_usage asked for")
        times = self._times
        return Answer(
            ttft_s=times[0] - self._start if times else None,
            e2e_s=self._finished_at - self._start,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
            prompt_tokens=_count(self._usage, "prompt_tokens"),
            cached_tokens=_cached(self._usage),
            output_tokens=_count(self._usage, "completion_tokens"),
            finish=self._finish,
            text="".join(self._texts),
        )


def _generated(choice: Mapping[str, Any]) -> str | None:
    """The answer's text in a choice; "" for reasoning and calls, generated like it; None without either."""
    if "delta" not in choice:
        return str(choice["text"]) if choice["text"] else None
    delta = choice["delta"] or {}
    if content := delta.get("content"):
        return str(content)
    return "" if any(delta.get(name) for name in _OTHER_TEXTS) else None


def _count(usage: Mapping[str, Any], name: str) -> int:
    n = usage.get(name)
    if not isinstance(n, int) or n < 0:
        raise Failure("no usage", f"usage.{name} is {n!r}")
    return n


def _cached(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    n = details.get("cached_tokens") if isinstance(details, dict) else None
    return n if isinstance(n, int) else None


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises Failure."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Failure("malformed stream", f"no JSON: {error}: {data[:200]!r}") from error
    if not isinstance(value, dict):
        raise Failure("malformed stream", f"no JSON object: {data[:200]!r}")
    return value


def error_message(body: Mapping[str, Any]) -> str:
    """What an error object says."""
    error = body.get("error")
    found = error.get("message") if isinstance(error, dict) else error
    return str(found or body.get("message") or body)[:500]
