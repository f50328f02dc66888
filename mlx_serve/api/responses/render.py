"""Converts deltas to a response and its events. An answer in one piece is the stream with its events discarded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_serve.api.responses.items import new_id
from mlx_serve.api.responses.outputs import (
    CustomCallItem,
    Event,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    Status,
)
from mlx_serve.api.responses.schema import ENCRYPTED, ResponseRequest
from mlx_serve.api.responses.tools import OfferedTool
from mlx_serve.api.serving import new_sampling
from mlx_serve.api.shapes import dumps
from mlx_serve.values import ApiError, Beat, Delta, Finish, Text, ToolCallArguments, ToolCallStart, Usage
from mlx_serve.wire import sse

# Codex gives up on a stream after five minutes without an event; comments do not count. While a long prompt is
# prefilled, one of so many keep-alives is an event.
_BEATS_PER_EVENT = 6


def new_response(
    body: ResponseRequest, raw: Mapping[str, Any], model: str, defaults: Mapping[str, Any], *, stored: bool
) -> dict[str, Any]:
    """A response that begins now, with the settings of its request. ``raw`` is the request as it came.

    All keys that the schemas of OpenAI and of Open Responses require, from the beginning on; None: not known, or not
    given. Raises ApiError 400 when the settings hold what JSON text cannot.
    """
    sampling = new_sampling(defaults, body.given_sampling, max_tokens=1)
    out = {
        "id": new_id("response"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": sampling.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": sampling.temperature,
        "text": _text_options(raw.get("text")),
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in raw.get("tools") or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "metadata": body.metadata,
        "usage": None,
    }
    # In OpenAI's schema this is a string or absent. Only the newest schema of Open Responses requires a null.
    return out if body.user is None else out | {"user": body.user}


def _text_options(given: Any) -> dict[str, Any]:
    asked = _without_null(given or {})
    form = _without_null(asked.get("format", {"type": "text"}))
    if form["type"] == "json_schema":
        form = {"name": "response", "description": None, "strict": False, **form}
    return {"verbosity": "medium", **asked, "format": form}


def _without_null(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = _without_null(tool)
    if given["type"] != "function":
        return given
    return {"description": None, "parameters": None, "strict": None, **given}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The options for writing an answer."""

    offers: Mapping[str, OfferedTool]
    reasoning_as_summary: bool = False
    sealed: bool = False
    # The custom tool whose input the text is.
    free_input: OfferedTool | None = None

    @classmethod
    def of(cls, body: ResponseRequest) -> AnswerForm:
        """As a request wants it."""
        offers = {offer.alias: offer for offer in body.offers()}
        return cls(offers, body.wants_summary, ENCRYPTED in body.include, body.free_input())


class ResponseWriter:
    """Writes one response. ``keep`` gets a response that ended well, before the client gets it."""

    def __init__(self, response: dict[str, Any], shape: AnswerForm, keep: Callable[[dict[str, Any]], None]) -> None:
        self._response = response
        self._shape = shape
        self._keep = keep
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._n_events = 0
        self._n_beats = 0

    def stream(self, deltas: Iterable[Delta]) -> Iterator[bytes]:
        """All events; the last has the whole response."""
        yield self._sse(self._state("created"))
        yield self._sse(self._state("in_progress"))
        for delta in deltas:
            if isinstance(delta, Beat):
                yield self._beat()
            else:
                yield from map(self._sse, self._take(delta))
        self._keep(self._response)
        yield self._sse(self._state(self._response["status"]))

    def whole(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """The response in one piece."""
        for delta in deltas:
            if not isinstance(delta, Beat):
                for _ in self._take(delta):
                    pass
        self._keep(self._response)
        return self._response

    def failure(self, error: ApiError) -> bytes:
        """``response.failed``, with the output so far."""
        if self._open is not None:
            self._open.status = "incomplete"
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = {"code": "rate_limit_exceeded" if error.status == 429 else code, "message": error.message}
        self._response |= {"status": "failed", "error": failed, "incomplete_details": None, "output": self._output()}
        return self._sse(self._state("failed"))

    def _take(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, Text):
            yield from self._switch(self._wanted(delta.region))
            assert self._open is not None
            yield from self._open.add(delta.text, delta.logprobs)
        elif isinstance(delta, ToolCallStart):
            yield from self._close("completed")
            yield from self._begin(self._new_call(delta.name))
        elif isinstance(delta, ToolCallArguments):
            assert self._open is not None
            yield from self._open.add(delta.text)
        elif isinstance(delta, Finish):
            yield from self._end(delta)

    def _wanted(self, region: str) -> type[OutputItem]:
        if region == "reasoning":
            return ReasoningItem
        return MessageItem if self._shape.free_input is None else CustomCallItem

    def _switch(self, kind: type[OutputItem]) -> Iterator[Event]:
        """Text goes to an item of this kind: the one that is open, or a new one."""
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            yield from self._begin(self._new(kind))

    def _new(self, kind: type[OutputItem]) -> OutputItem:
        index, shape = len(self._items), self._shape
        if kind is ReasoningItem:
            return ReasoningItem(index, as_summary=shape.reasoning_as_summary, sealed=shape.sealed)
        if kind is CustomCallItem and shape.free_input is not None:
            offer = shape.free_input
            return CustomCallItem(index, offer.tool.name, offer.namespace, is_bare=True)
        return MessageItem(index)

    def _new_call(self, name: str) -> OutputItem:
        index, offer = len(self._items), self._shape.offers.get(name)
        if offer is None:
            return FunctionCallItem(index, name, None)
        if offer.is_custom:
            return CustomCallItem(index, offer.tool.name, offer.namespace, is_bare=False)
        return FunctionCallItem(index, offer.tool.name, offer.namespace)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self._open = item
        self._items.append(item)
        yield from item.opening()

    def _close(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            item, self._open = self._open, None
            yield from item.closing(status)

    def _end(self, finish: Finish) -> Iterator[Event]:
        is_cut = finish.reason == "length"
        if not self._items and not is_cut:
            # Clients look for a message, so an empty answer has one too.
            yield from self._switch(self._wanted("content"))
        yield from self._close("incomplete" if is_cut else "completed")
        self._response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "output": self._output(),
            "usage": usage_object(finish.usage),
        }

    def _output(self) -> Sequence[dict[str, Any]]:
        return [item.item() for item in self._items]

    def _state(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self._response}

    def _beat(self) -> bytes:
        self._n_beats += 1
        if not self._items and self._n_beats % _BEATS_PER_EVENT == 0:
            return self._sse(self._state("in_progress"))
        return sse.comment("keep-alive")

    def _sse(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._n_events, **event}
        self._n_events += 1
        return sse.event(dumps(numbered), event["type"])
