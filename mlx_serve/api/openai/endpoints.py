"""POST /v1/chat/completions and /v1/completions, and the routes beside them that take their requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_serve.api import errors
from mlx_serve.api.body import parse
from mlx_serve.api.generation import Generation
from mlx_serve.api.openai import render, schema, tokenize
from mlx_serve.api.pipeline import Prepared, count_tokens, generate, prepare
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import Services
from mlx_serve.api.shapes import dumps, json_response
from mlx_serve.values import ApiError, Finish, RawRequest, Response, Usage
from mlx_serve.wire import sse


def chat_completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/chat/completions"""
    body = parse(schema.ChatRequest, request.body)

    def writer(prepared: Prepared) -> ChunkWriter:
        return ChunkWriter(render.ChatRenderer(_head("chatcmpl", prepared), logprobs=body.logprobs), body, prepared)

    return generate(prepare(services, request, body.generation_request()), writer)


def chat_input_tokens(services: Services, request: RawRequest) -> Response:
    """POST /v1/chat/completions/input_tokens: what a chat request's prompt comes to, as llama-server has it."""
    body = parse(schema.ChatRequest, request.body)
    n_tokens = count_tokens(services, request, body.model, body.as_conversation(), body.adapters, body.draft_model)
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


def completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/completions"""
    body = parse(schema.CompletionRequest, request.body)
    prepared = prepare(services, request, body.generation_request())
    if body.only_echoes:
        return _only_echo(prepared, body)

    def writer(prepared: Prepared) -> ChunkWriter:
        is_scored = body.wanted_logprobs is not None
        # Prompts with log-probabilities come from the engine.
        echoes = [] if is_scored else prepared.echoes
        renderer = render.CompletionRenderer(_head("cmpl", prepared), echoes, body.n, logprobs=is_scored)
        return ChunkWriter(renderer, body, prepared)

    return generate(prepared, writer)


def _only_echo(prepared: Prepared, body: schema.CompletionRequest) -> Response:
    """``max_tokens`` 0 with ``echo``: the prompts again, and nothing to generate."""
    n = len(prepared.prompts) * body.n
    finishes = [Finish(i, "length", Usage(len(prepared.prompts[i // body.n].tokens), 0)) for i in range(n)]
    renderer = render.CompletionRenderer(_head("cmpl", prepared), prepared.echoes, body.n)
    if body.stream:
        include_usage = body.stream_options.include_usage
        pieces = render.stream(renderer, finishes, n, body.n, include_usage=include_usage)
        return Response(200, pieces, "text/event-stream")
    return json_response(render.fold(renderer, finishes, n, body.n))


def _head(prefix: str, prepared: Prepared) -> render.CompletionHead:
    return render.new_head(prefix, prepared.entry.name, prepared.services.fingerprint)


@dataclass(frozen=True, slots=True)
class ChunkWriter:
    """OpenAI's chunks and objects."""

    renderer: render.Renderer
    body: schema.ChatRequest | schema.CompletionRequest
    prepared: Prepared

    def stream(self, generation: Generation) -> Iterator[bytes]:
        """Chunks, and [DONE]."""
        include_usage = self.body.stream_options.include_usage
        return render.stream(
            self.renderer, generation, self.prepared.n_answers, self.body.n, include_usage=include_usage
        )

    def whole(self, generation: Generation) -> dict[str, Any]:
        """One object, with the best of the choices where more were generated than asked for."""
        n_samples = self.prepared.asked.n_samples
        n_kept = self.body.n if n_samples > self.body.n else None
        return render.fold(self.renderer, generation, self.prepared.n_answers, n_samples, n_kept)

    def failure(self, error: ApiError) -> bytes:
        """In place of [DONE]."""
        return sse.event(dumps(errors.as_object(error)))


ROUTES = (
    Route("POST", "/chat/completions", chat_completions),
    Route("POST", "/chat/completions/input_tokens", chat_input_tokens),
    Route("POST", "/completions", completions),
    *tokenize.ROUTES,
)
