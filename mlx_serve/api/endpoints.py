"""The routes, and what each does. To add an endpoint, add a function and a row in ``ROUTES``.

``Api`` is the application that the wire layer calls: a RawRequest in, a Response out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_serve.api import embeddings, errors, models, tokenize
from mlx_serve.api.anthropic import endpoints
from mlx_serve.api.cost import MAX_CUT_TOKENS, check_prompt_logprobs, check_values, length_check
from mlx_serve.api.generation import Generation, OutputOptions
from mlx_serve.api.openai import render, schema
from mlx_serve.api.responses import endpoints as responses
from mlx_serve.api.routes import route_path
from mlx_serve.api.serving import (
    Reply,
    Services,
    chat_gate,
    compiled_grammar,
    constrain,
    context_tokens,
    find_model,
    json_response,
    last_tokens,
    make_jobs,
    request_prompt,
)
from mlx_serve.api.status import health, stats
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.text.prompt import text_prompt
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError, Finish, Gate, Prompt, RawRequest, Response, Usage
from mlx_serve.wire import sse
from mlx_serve.wire.request_log import RequestLog


class Api:
    """The API as a function from request to response."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def methods(self, path: str) -> frozenset[str]:
        """The methods that a path has; none: there is no such route."""
        if path in self._services.page:
            return frozenset({"GET"})
        return frozenset(method for method, route in ROUTES if _matches(route, path))

    def takes_body(self, method: str, path: str) -> bool:
        """Whether this method of the route needs a request body."""
        return not any(method == m and _matches(route, path) for m, route in BODILESS)

    def __call__(self, request: RawRequest) -> Response:
        """Answer a request. Raises ApiError, and ClientGone when nobody waits any more."""
        if request.path in self._services.page:
            return self._services.page[request.path]
        endpoint = next(e for (m, route), e in ROUTES.items() if m == request.method and _matches(route, request.path))
        check_values(request.body, self._services.max_json_values)
        try:
            return endpoint(self._services, replace(request, path=route_path(request.path)))
        except RecursionError:
            # Whatever it was that went down into the request's JSON: checking, the chat template, writing it out.
            raise ApiError(400, "The request is nested too deeply.") from None

    def error(self, error: ApiError, path: str, request_id: str) -> Response:
        """The reply that an error becomes, in the words of the route's clients."""
        return errors.as_response(error, path, request_id)

    def observe(self, entry: RequestLog) -> None:
        """Count a request that has ended, however it did."""
        stats.observe(self._services.metrics, entry, self._route(entry.path))

    def _route(self, path: str) -> str:
        # A name out of our tables: a client can ask for any number of paths.
        if path in self._services.page:
            return path
        return next((route for _, route in ROUTES if _matches(route, path)), "other")


def _matches(route: str, path: str) -> bool:
    # A route that ends in "/" takes the rest of the path as a name, which may hold "/" itself; {id} holds none.
    plain = route_path(path)
    start, is_open, end = route.partition("{id}")
    if is_open:
        middle = plain[len(start) : len(plain) - len(end)]
        return plain == start + middle + end and middle != "" and "/" not in middle
    if route == "/":
        return path == "/"
    return plain.startswith(route) and len(plain) > len(route) if route.endswith("/") else plain == route


def chat_completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/chat/completions"""
    body = schema.parse(schema.ChatRequest, request.body)
    entry, tokenizer = find_model(services, body.model, body.adapters, body.draft_model)
    grammar = compiled_grammar(services, entry, body.rule(), body.must_call, request.alive)
    prompt = request_prompt(services, request, entry, tokenizer, body)
    options = OutputOptions(
        tuple(body.stop),
        tuple(body.offered_tools),
        forced_call=bool(body.must_call),
        max_calls=body.max_calls,
        keeps_stop=body.include_stop_str_in_output,
    )
    jobs = make_jobs(
        services, request, entry, body, [prompt], body.wanted_tokens, param="messages", streamed=body.stream
    )
    if grammar is not None:
        constrain(jobs, grammar, chat_gate(tokenizer, prompt, options))
    reply = Reply(services, request, entry, jobs, options, body.stream, body.n_samples)
    return reply.respond(
        _Writer(render.ChatRenderer(reply.head("chatcmpl"), logprobs=body.logprobs), body, len(jobs)), tokenizer
    )


def chat_input_tokens(services: Services, request: RawRequest) -> Response:
    """POST /v1/chat/completions/input_tokens: what a chat request's prompt comes to, as llama-server has it."""
    body = schema.parse(schema.ChatRequest, request.body)
    entry, tokenizer = find_model(services, body.model, body.adapters, body.draft_model)
    prompt = request_prompt(services, request, entry, tokenizer, body)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


def completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/completions"""
    body = schema.parse(schema.CompletionRequest, request.body)
    entry, tokenizer = find_model(services, body.model, body.adapters, body.draft_model)
    grammar = compiled_grammar(services, entry, body.rule(), (), request.alive)
    prompts = [_completion_prompt(services, request, entry, tokenizer, body, prompt) for prompt in body.prompt]
    is_scored = body.wanted_logprobs is not None
    scores_prompt = is_scored and body.echo
    if body.max_tokens == 0 and not scores_prompt:
        return _only_echo(services, entry, tokenizer, body, prompts)
    limit = schema.COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    jobs = make_jobs(services, request, entry, body, prompts, limit, param="prompt", streamed=body.stream)
    if grammar is not None:
        constrain(jobs, grammar, Gate())
    echoes = _echoes(tokenizer, body)
    options = OutputOptions(tuple(body.stop), is_chat=False, keeps_stop=body.include_stop_str_in_output)
    if scores_prompt:
        # The prompts come with their log-probabilities, from the engine.
        check_prompt_logprobs(sum(len(job.prompt.tokens) for job in jobs), body.wanted_logprobs or 0)
        for job in jobs:
            job.sampling = replace(job.sampling, prompt_logprobs=body.wanted_logprobs)
        options, echoes = replace(options, echoes=tuple(echoes[job.index // body.n_samples] for job in jobs)), []
    reply = Reply(services, request, entry, jobs, options, body.stream, body.n_samples)
    renderer = render.CompletionRenderer(reply.head("cmpl"), echoes, body.n, logprobs=is_scored)
    return reply.respond(_Writer(renderer, body, len(jobs)), tokenizer)


def _echoes(tokenizer: Tokenizer, body: schema.CompletionRequest) -> list[str]:
    return [p if isinstance(p, str) else tokenizer.decode(p) for p in body.prompt] if body.echo else []


def _only_echo(
    services: Services,
    entry: ModelEntry,
    tokenizer: Tokenizer,
    body: schema.CompletionRequest,
    prompts: Sequence[Prompt],
) -> Response:
    """``max_tokens`` 0 with ``echo``: the prompts again, and nothing to generate."""
    n = len(prompts) * body.n
    finishes = [Finish(i, "length", Usage(len(prompts[i // body.n].tokens), 0)) for i in range(n)]
    head = render.new_head("cmpl", entry.name, services.fingerprint)
    renderer = render.CompletionRenderer(head, _echoes(tokenizer, body), body.n)
    if body.stream:
        include_usage = body.stream_options.include_usage
        pieces = render.stream(renderer, finishes, n, body.n, include_usage=include_usage)
        return Response(200, pieces, "text/event-stream")
    return json_response(render.fold(renderer, finishes, n, body.n))


def root(services: Services, request: RawRequest) -> Response:
    """GET /: Claude Code asks for it with HEAD, to see whether anybody is there."""
    return json_response({"name": "mlx-serve"})


ROUTES: dict[tuple[str, str], Callable[[Services, RawRequest], Response]] = {
    ("POST", "/chat/completions"): chat_completions,
    ("POST", "/chat/completions/input_tokens"): chat_input_tokens,
    ("POST", "/completions"): completions,
    ("POST", "/embeddings"): embeddings.embeddings,
    ("POST", "/responses"): responses.create,
    ("POST", "/responses/input_tokens"): responses.input_tokens,
    ("POST", "/responses/compact"): responses.compact,
    ("GET", "/responses/{id}"): responses.get,
    ("DELETE", "/responses/{id}"): responses.delete,
    ("GET", "/responses/{id}/input_items"): responses.input_items,
    ("POST", "/responses/{id}/cancel"): responses.cancel,
    ("POST", "/messages"): endpoints.messages,
    ("POST", "/messages/count_tokens"): endpoints.count_tokens,
    ("POST", "/tokenize"): tokenize.tokenize,
    ("POST", "/detokenize"): tokenize.detokenize,
    ("POST", "/apply-template"): tokenize.apply_template,
    ("GET", "/models"): models.list_models,
    ("GET", "/models/"): models.get_model,
    ("GET", "/health"): health.health,
    ("GET", "/ready"): health.ready,
    ("GET", "/stats"): health.live_stats,
    ("GET", "/metrics"): health.prometheus_metrics,
    ("GET", "/"): root,
}

# Routes of methods that send content, which need none.
BODILESS = frozenset({("POST", "/responses/{id}/cancel")})


@dataclass(frozen=True, slots=True)
class _Writer:
    """OpenAI's chunks and objects, of ``n_choices`` choices."""

    renderer: render.Renderer
    body: schema.ChatRequest | schema.CompletionRequest
    n_choices: int

    def stream(self, generation: Generation) -> Iterator[bytes]:
        """Chunks, and [DONE]."""
        include_usage = self.body.stream_options.include_usage
        return render.stream(self.renderer, generation, self.n_choices, self.body.n, include_usage=include_usage)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """One object, with the best of the choices where more were generated than asked for."""
        n_kept = self.body.n if self.body.n_samples > self.body.n else None
        return render.fold(self.renderer, generation, self.n_choices, self.body.n_samples, n_kept)

    def failure(self, error: ApiError) -> bytes:
        """In place of [DONE]."""
        return sse.event(render.dumps(errors.as_object(error)))


def _completion_prompt(
    services: Services,
    request: RawRequest,
    entry: ModelEntry,
    tokenizer: Tokenizer,
    body: schema.CompletionRequest,
    given: str | list[int],
) -> Prompt:
    if isinstance(given, str):
        # What is over the context is refused, unless it is to be cut; then it is tokenized up to a bound.
        is_cut = body.truncate_prompt_tokens is not None
        most = MAX_CUT_TOKENS if is_cut else context_tokens(services, entry)
        check = length_check(request, most, "prompt")
        prompt = text_prompt(tokenizer, given, check, special=body.add_special_tokens)
    else:
        # Before anything decodes them: a tokenizer is no more careful with ids than MLX is.
        check_ids(given, entry.vocab_size or tokenizer.n_tokens, "prompt")
        prompt = Prompt(tuple(given))
    return last_tokens(services, entry, prompt, body.truncate_prompt_tokens)
