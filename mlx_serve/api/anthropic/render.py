"""Deltas to Anthropic's message: as named events, or folded into one object. Knows no engine and no sockets.

    message_start
      content_block_start, content_block_delta..., content_block_stop      for each block, one after the other
    message_delta                                                          why it ended, what it cost
    message_stop

The whole message is made by folding the events, as Anthropic's clients do, so both always agree. Reference for the
shapes: https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from mlx_serve.api.shapes import MAX_DELTA_CHARS
from mlx_serve.values import Beat, Delta, Finish, Text, ToolCallArguments, ToolCallStart, Usage

Event = dict[str, Any]

# Anthropic's clients require a signature and send it back with the thinking. This server does not check it.
SIGNATURE = "mlx-serve"
# Keys that Anthropic's schema requires, whose values only its own service has.
_NO_DETAILS = {"container": None, "stop_details": None}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def events(model: str, prompt_tokens: int, cached_tokens: int, deltas: Iterable[Delta]) -> Iterator[Event]:
    """The events of one answer. ``cached_tokens``: as far as it is known when the answer begins."""
    start = message_object(model, [], None, usage_object(Usage(prompt_tokens, 0, cached_tokens)))
    yield {"type": "message_start", "message": start}
    blocks = _Blocks()
    for delta in deltas:
        if isinstance(delta, Beat):
            yield {"type": "ping"}
        elif isinstance(delta, Finish):
            yield from blocks.end()
            yield {"type": "message_delta", "delta": _ending(delta), "usage": usage_object(delta.usage)}
            yield {"type": "message_stop"}
        else:
            yield from blocks.take(delta)


def fold(found: Iterable[Event]) -> dict[str, Any]:
    """The whole message that some events add up to."""
    message: dict[str, Any] = {}
    parts: list[str] = []
    for event in found:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
                parts = []
            case "content_block_delta":
                parts.append(_part(message["content"][-1], event["delta"]))
            case "content_block_stop":
                _fill(message["content"][-1], "".join(parts))
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def message_object(model: str, content: list[Any], stop_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
    """A message with a new id and all keys that Anthropic's schema requires. None: no value."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "diagnostics": None,
        "usage": usage,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage object. Unlike OpenAI's count, ``input_tokens`` excludes cached tokens."""
    return {
        "cache_creation": None,
        "inference_geo": None,
        "server_tool_use": None,
        "service_tier": None,
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class _Blocks:
    """Puts deltas into blocks. One block is open at a time."""

    def __init__(self) -> None:
        self._n_begun = 0
        # The type of the open block; None: none is.
        self._open: str | None = None
        # White space at the start of a block is held until text follows: clients drop or refuse blocks without text.
        self._blank = ("", "")

    def take(self, delta: Text | ToolCallStart | ToolCallArguments) -> Iterator[Event]:
        """The events of a delta."""
        if isinstance(delta, ToolCallStart):
            yield from self._begin({"type": "tool_use", "id": _tool_id(), "name": delta.name, "input": {}})
        elif isinstance(delta, ToolCallArguments):
            yield from self._deltas("input_json_delta", "partial_json", delta.text)
        elif delta.region == "reasoning":
            yield from self._text("thinking", delta.text, {"thinking": "", "signature": ""})
        else:
            yield from self._text("text", delta.text, {"text": "", "citations": None})

    def end(self) -> Iterator[Event]:
        """What closes the open block."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        yield self._event("content_block_stop")
        self._open = None

    def _text(self, kind: str, text: str, empty: dict[str, Any]) -> Iterator[Event]:
        if self._open != kind:
            text = self._blank[1] + text if self._blank[0] == kind else text
            if not text.strip():
                self._blank = (kind, text)
                return
            yield from self._begin({"type": kind, **empty})
        yield from self._deltas(*_DELTAS[kind], text)

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.end()
        self._blank = ("", "")
        self._open = block["type"]
        self._n_begun += 1
        yield self._event("content_block_start", content_block=block)

    def _deltas(self, kind: str, name: str, text: str) -> Iterator[Event]:
        for i in range(0, len(text), MAX_DELTA_CHARS):
            yield self._event("content_block_delta", delta={"type": kind, name: text[i : i + MAX_DELTA_CHARS]})

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": self._n_begun - 1, **fields}


def _tool_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _ending(finish: Finish) -> dict[str, Any]:
    # The client must answer the calls, even if a limit or a stop string ended the text after them.
    if finish.stop is not None and finish.reason == "stop":
        return {**_NO_DETAILS, "stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    return {**_NO_DETAILS, "stop_reason": _STOP_REASONS[finish.reason], "stop_sequence": None}


def _part(block: dict[str, Any], delta: dict[str, Any]) -> str:
    """The text that a delta adds to its block."""
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
        return ""
    name = "partial_json" if block["type"] == "tool_use" else block["type"]
    return str(delta[name])


def _fill(block: dict[str, Any], text: str) -> None:
    if block["type"] == "tool_use":
        block["input"] = _input(text or "{}")
    else:
        block[block["type"]] = text


def _input(text: str) -> dict[str, Any]:
    """A call's input. Text that is not a JSON object (cut off, or a model's mistake) is kept as a string in a field."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # JSON can encode values that cannot be sent: half a surrogate pair, a number that is too large.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
