"""Deltas to OpenAI's objects: streamed as chunks, or folded into one. Knows no engine and no sockets.

A renderer gives the shapes of one endpoint; ``stream`` and ``fold`` are the two ways to use it. The shapes are
chat.completion, chat.completion.chunk and text_completion of https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mlx_serve.api.shapes import (
    LOGPROB_OF_ZERO,
    MAX_DELTA_CHARS,
    chat_logprobs,
    dumps,
    json_logprob,
    new_call_id,
    split_text,
    total_usage,
)
from mlx_serve.values import Beat, Delta, Finish, Text, TokenLogprob, ToolCallArguments, ToolCallStart, Usage
from mlx_serve.wire import sse


@dataclass(frozen=True, slots=True)
class CompletionHead:
    """What all chunks of one reply share."""

    id: str
    created: int
    model: str
    fingerprint: str


def new_head(prefix: str, model: str, fingerprint: str) -> CompletionHead:
    """A head with a new id and the current time."""
    return CompletionHead(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model, fingerprint)


class Renderer(Protocol):
    """One endpoint's shapes."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """What each choice's stream begins with."""

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The stream chunks of a delta."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, when the client asked for it."""

    def whole(self, choices: Sequence[FoldedChoice], usage: Usage) -> dict[str, Any]:
        """The reply in one piece."""


@dataclass(slots=True)
class FoldedChoice:
    """One choice's deltas, folded."""

    index: int
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    # Each call's name and arguments.
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        """Take one delta in."""
        if isinstance(delta, Text):
            (self.content if delta.region == "content" else self.reasoning).append(delta.text)
            self.logprobs += delta.logprobs
        elif isinstance(delta, ToolCallStart):
            self.calls.append((delta.name, []))
        elif isinstance(delta, ToolCallArguments):
            self.calls[delta.call][1].append(delta.text)
        elif isinstance(delta, Finish):
            self.finish = delta


def fold(
    renderer: Renderer, deltas: Iterable[Delta], n_choices: int, n_per_prompt: int, n_kept: int | None = None
) -> dict[str, Any]:
    """The whole reply. ``n_per_prompt`` choices share a prompt, counted once; the best ``n_kept`` are given."""
    choices = [FoldedChoice(index) for index in range(n_choices)]
    for delta in deltas:
        if not isinstance(delta, Beat):
            choices[delta.index].add(delta)
    usage = total_usage({choice.index: choice.finish.usage for choice in choices if choice.finish}, n_per_prompt)
    if n_kept is not None:
        choices = best(choices, n_per_prompt, n_kept)
    return renderer.whole(choices, usage)


def best(choices: Sequence[FoldedChoice], n_per_prompt: int, n_kept: int) -> list[FoldedChoice]:
    """Of each prompt's choices the ``n_kept`` with the highest mean log-probability, numbered anew.

    Their log-probabilities are only for this choice, and are not shown.
    """
    kept: list[FoldedChoice] = []
    for first in range(0, len(choices), n_per_prompt):
        ranked = sorted(choices[first : first + n_per_prompt], key=_mean_logprob, reverse=True)
        kept += [replace(choice, index=len(kept) + i, logprobs=[]) for i, choice in enumerate(ranked[:n_kept])]
    return kept


def _mean_logprob(choice: FoldedChoice) -> float:
    logprobs = [json_logprob(entry.logprob) or 0.0 for entry in choice.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else LOGPROB_OF_ZERO


def stream(
    renderer: Renderer, deltas: Iterable[Delta], n_choices: int, n_per_prompt: int, *, include_usage: bool
) -> Iterator[bytes]:
    """The reply as server-sent events, one write each."""
    usages: dict[int, Usage] = {}

    def event(chunk: dict[str, Any]) -> bytes:
        return sse.event(dumps(chunk | {"usage": None} if include_usage else chunk))

    for index in range(n_choices):
        yield from map(event, renderer.opening(index))
    for delta in deltas:
        if isinstance(delta, Beat):
            yield sse.comment("keep-alive")
            continue
        if isinstance(delta, Finish):
            usages[delta.index] = delta.usage
        yield from map(event, renderer.chunks(delta))
    if include_usage:
        yield sse.event(dumps(renderer.usage_chunk(total_usage(usages, n_per_prompt))))
    yield sse.DONE


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object; audio does not occur here."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


class ChatRenderer:
    """chat.completion and chat.completion.chunk. ``logprobs``: they were asked for."""

    def __init__(self, head: CompletionHead, *, logprobs: bool = False) -> None:
        self._head = head
        self._logprobs = logprobs

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The role, before the first token is known, and only here: clients join the roles they get.

        It includes an empty list of log-probabilities, as OpenAI's does: an answer without tokens has no other list.
        """
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(index, delta, logprobs=chat_logprobs(()) if self._logprobs else None)]

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The stream chunks of a delta."""
        if isinstance(delta, Text):
            yield from self._text_chunks(delta)
        elif isinstance(delta, ToolCallStart):
            # The name with no arguments; clients join both, so neither is repeated.
            yield self._chunk(delta.index, {"tool_calls": [{"index": delta.call} | _call_object(delta.name, "")]})
        elif isinstance(delta, ToolCallArguments):
            yield from self._argument_chunks(delta)
        elif isinstance(delta, Finish):
            yield self._chunk(delta.index, {}, finish_reason=delta.reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """A chunk without choices."""
        return self._object("chat.completion.chunk", []) | {"usage": usage_object(usage)}

    def whole(self, choices: Sequence[FoldedChoice], usage: Usage) -> dict[str, Any]:
        """A chat.completion."""
        return self._object("chat.completion", [self._choice(c) for c in choices]) | {"usage": usage_object(usage)}

    def _choice(self, choice: FoldedChoice) -> dict[str, Any]:
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not content else content,
            "refusal": None,
        }
        if choice.reasoning:
            message |= _reasoning("".join(choice.reasoning))
        if choice.calls:
            message["tool_calls"] = [_call_object(name, "".join(arguments)) for name, arguments in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish.reason if choice.finish else None,
        }

    def _text_chunks(self, delta: Text) -> Iterator[dict[str, Any]]:
        for piece in split_text(delta):
            fields = {"content": piece.text} if piece.region == "content" else _reasoning(piece.text)
            logprobs = chat_logprobs(piece.logprobs) if piece.logprobs else None
            yield self._chunk(piece.index, fields, logprobs=logprobs)

    def _argument_chunks(self, delta: ToolCallArguments) -> Iterator[dict[str, Any]]:
        for i in range(0, len(delta.text), MAX_DELTA_CHARS):
            part = {"index": delta.call, "function": {"arguments": delta.text[i : i + MAX_DELTA_CHARS]}}
            yield self._chunk(delta.index, {"tool_calls": [part]})

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return _object(self._head, kind, choices)


class CompletionRenderer:
    """text_completion, which has the same name in streams. ``echoes`` has each prompt's text, when it was asked for.

    ``logprobs``: they were asked for.
    """

    def __init__(
        self, head: CompletionHead, echoes: Sequence[str] = (), n_per_prompt: int = 1, *, logprobs: bool = False
    ) -> None:
        self._head = head
        self._is_scored = logprobs
        self._echoes = tuple(echoes)
        self._n_per_prompt = n_per_prompt
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The echoed prompt, if any."""
        echo = self._echo(index)
        if not echo:
            return []
        return [self._chunk(piece) for piece in split_text(Text(index, "content", echo))]

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The stream chunks of a delta."""
        if isinstance(delta, Text):
            yield from map(self._chunk, split_text(delta))
        elif isinstance(delta, Finish):
            yield self._object([_completion_choice(delta.index, "", None, delta.reason)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """A chunk without choices."""
        return self._object([]) | {"usage": usage_object(usage)}

    def whole(self, choices: Sequence[FoldedChoice], usage: Usage) -> dict[str, Any]:
        """A text_completion."""
        objects = []
        for choice in choices:
            text = self._echo(choice.index) + "".join(choice.content)
            reason = choice.finish.reason if choice.finish else None
            logprobs = self._logprobs(choice.index, choice.logprobs) if self._is_scored else None
            objects.append(_completion_choice(choice.index, text, logprobs, reason))
        return self._object(objects) | {"usage": usage_object(usage)}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n_per_prompt] if self._echoes else ""

    def _chunk(self, piece: Text) -> dict[str, Any]:
        logprobs = self._logprobs(piece.index, piece.logprobs) if piece.logprobs else None
        return self._object([_completion_choice(piece.index, piece.text, logprobs, None)])

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry.token)
        self._offsets[index] = offset
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [json_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [_top_by_text(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _object(self, choices: list[Any]) -> dict[str, Any]:
        return _object(self._head, "text_completion", choices)


def _completion_choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


def _object(head: CompletionHead, kind: str, choices: list[Any]) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
    }


def _top_by_text(entry: TokenLogprob) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one by their text; of equal texts the likelier one stays."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for one in (*entry.top, entry):
        found[one.token] = max(found.get(one.token, LOGPROB_OF_ZERO), json_logprob(one.logprob) or 0.0)
    return found


def _reasoning(text: str) -> dict[str, str]:
    # DeepSeek, vLLM and llama.cpp use the first name, mlx_lm.server the second. Clients know one or the other.
    return {"reasoning_content": text, "reasoning": text}


def _call_object(name: str, arguments: str) -> dict[str, Any]:
    call_id = new_call_id()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
