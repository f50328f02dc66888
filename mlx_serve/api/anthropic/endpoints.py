"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect, as its own packages and Claude Code speak it.

The same prompts, jobs and deltas as chat's, with other fields and shapes around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_serve.api.anthropic import render
from mlx_serve.api.anthropic.errors import ANTHROPIC, as_anthropic_object
from mlx_serve.api.anthropic.schema import CountRequest, MessagesRequest
from mlx_serve.api.body import parse
from mlx_serve.api.generation import Generation
from mlx_serve.api.pipeline import Prepared, count_tokens, generate, prepare
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import Services
from mlx_serve.api.shapes import dumps, json_response
from mlx_serve.values import ApiError, RawRequest, Response
from mlx_serve.wire import sse


def messages(services: Services, request: RawRequest) -> Response:
    """POST /v1/messages"""
    asked = parse(MessagesRequest, request.body).generation_request()
    return generate(prepare(services, request, asked), MessageWriter.of)


def count(services: Services, request: RawRequest) -> Response:
    """POST /v1/messages/count_tokens: the length of the prompt that /v1/messages would make of the same request."""
    body = parse(CountRequest, request.body)
    return json_response({"input_tokens": count_tokens(services, request, body.model, body.as_conversation())})


@dataclass(frozen=True, slots=True)
class MessageWriter:
    """Anthropic's events, and the message that they add up to."""

    model: str
    prompt_tokens: int
    request_id: str

    @classmethod
    def of(cls, prepared: Prepared) -> MessageWriter:
        """For one request."""
        return cls(prepared.entry.name, len(prepared.prompts[0].tokens), prepared.request.request_id)

    def stream(self, generation: Generation) -> Iterator[bytes]:
        """Each event has a name: Anthropic's clients ignore events without one."""
        for event in self._events(generation):
            yield _event(event)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The message."""
        return render.fold(self._events(generation))

    def failure(self, error: ApiError) -> bytes:
        """An ``error`` event, which is the last one."""
        return _event(as_anthropic_object(error, self.request_id))

    def _events(self, generation: Generation) -> Iterator[render.Event]:
        cached_tokens = generation.cached_tokens
        return render.events(self.model, self.prompt_tokens, cached_tokens, generation)


def _event(value: dict[str, Any]) -> bytes:
    return sse.event(dumps(value), value["type"])


ROUTES = (
    Route("POST", "/messages", messages, ANTHROPIC),
    Route("POST", "/messages/count_tokens", count, ANTHROPIC),
)
