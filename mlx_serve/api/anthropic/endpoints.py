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
from mlx_serve.api.cost import n_content_chars
from mlx_serve.api.generation import Generation, OutputOptions
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import (
    Reply,
    Services,
    chat_gate,
    compiled_grammar,
    constrain,
    context_check,
    find_model,
    make_jobs,
    template_options,
)
from mlx_serve.api.shapes import dumps, json_response
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.text.prompt import chat_prompt
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError, Prompt, RawRequest, Response
from mlx_serve.wire import sse


def messages(services: Services, request: RawRequest) -> Response:
    """POST /v1/messages"""
    body = parse(MessagesRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    grammar = compiled_grammar(services, entry, body.rule(), body.must_call, request.alive)
    prompt = _prompt(services, request, entry, tokenizer, body)
    options = OutputOptions(
        tuple(body.stop_sequences),
        tuple(body.offered_tools),
        forced_call=bool(body.must_call),
        max_calls=body.max_calls,
    )
    jobs = make_jobs(services, request, entry, body, [prompt], body.max_tokens, param="messages")
    if grammar is not None:
        constrain(jobs, grammar, chat_gate(tokenizer, prompt, options))
    writer = _Writer(entry.name, len(prompt.tokens), request.request_id)
    return Reply(services, request, entry, jobs, options, body.stream).respond(writer, tokenizer)


def count_tokens(services: Services, request: RawRequest) -> Response:
    """POST /v1/messages/count_tokens: what the same request to /v1/messages would have as its prompt."""
    body = parse(CountRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    return json_response({"input_tokens": len(_prompt(services, request, entry, tokenizer, body).tokens)})


def _prompt(
    services: Services, request: RawRequest, entry: ModelEntry, tokenizer: Tokenizer, body: CountRequest
) -> Prompt:
    turns = body.chat_messages
    check = context_check(services, request, entry, "messages")
    check(n_content_chars(turns) // tokenizer.max_token_chars)
    begun = {"content": turns.pop()["content"]} if body.is_prefilled else None
    options = template_options(services, entry, body.template_options)
    return chat_prompt(tokenizer, turns, tools=body.offered_tools, options=options, begun=begun, check=check)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Anthropic's events, and the message that they add up to."""

    model: str
    prompt_tokens: int
    request_id: str

    def stream(self, generation: Generation) -> Iterator[bytes]:
        """Each event has its name, without which Anthropic's clients pass it over."""
        for event in self._events(generation):
            yield _event(event)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The message."""
        return render.fold(self._events(generation))

    def failure(self, error: ApiError) -> bytes:
        """An event of its own kind, and then nothing more."""
        return _event(as_anthropic_object(error, self.request_id))

    def _events(self, generation: Generation) -> Iterator[render.Event]:
        cached_tokens = generation.cached_tokens
        return render.events(self.model, self.prompt_tokens, cached_tokens, generation)


def _event(value: dict[str, Any]) -> bytes:
    return sse.event(dumps(value), value["type"])


ROUTES = (
    Route("POST", "/messages", messages, ANTHROPIC),
    Route("POST", "/messages/count_tokens", count_tokens, ANTHROPIC),
)
