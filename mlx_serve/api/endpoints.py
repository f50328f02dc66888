"""The routes, and what each does. To add an endpoint, add a function and a row in ``ROUTES``.

``Api`` is the application that the wire layer calls: a RawRequest in, a Response out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol

from mlx_serve.api import errors, prometheus, render, schema, stats
from mlx_serve.api.generation import Generation, OutputOptions
from mlx_serve.core import (
    ApiError,
    ClientGone,
    EngineStats,
    Event,
    Finish,
    Gate,
    Job,
    Prompt,
    RawRequest,
    Response,
    Usage,
    internal_error,
)
from mlx_serve.engine.catalog import DEFAULT_NAME, Catalog, ModelEntry, context_limit
from mlx_serve.engine.scheduler import Health, Scheduler
from mlx_serve.engine.vocabulary import check_ids
from mlx_serve.metrics import Metrics, Trace
from mlx_serve.text.formats import formats
from mlx_serve.text.grammar import compile_forced_call, compile_rule
from mlx_serve.text.prompt import chat_prompt, text_prompt
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.wire import sse
from mlx_serve.wire.log import RequestLog

log = logging.getLogger(__name__)

# An odd constant of 64 bits (2**64 over the golden ratio), so that the samples of one seed are not those of the next.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class Tokenizers(Protocol):
    """Where tokenizers come from."""

    def tokenizer(self, entry: ModelEntry) -> Tokenizer:
        """The tokenizer of a model. Raises ApiError when it can't be loaded."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints work with."""

    scheduler: Scheduler
    catalog: Catalog
    tokenizers: Tokenizers
    fingerprint: str
    defaults: schema.Defaults = field(default_factory=schema.Defaults)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    # The command line's adapters and draft model, which a request may name and no others.
    adapter: str | None = None
    draft_model: str | None = None
    draining: Callable[[], bool] = lambda: False
    # The names of the models that are in memory.
    loaded: Callable[[], frozenset[str]] = frozenset
    # Compiles a grammar for a model before a job needs it, and says what is wrong with it, or "".
    check_grammar: Callable[[ModelEntry, str], str] = lambda entry, grammar: ""
    metrics: Metrics = field(default_factory=Metrics)
    # What only the engine knows. None: the scheduler is asked.
    engine_stats: Callable[[], EngineStats] | None = None
    # Sequences that may wait; at so many no request more is taken.
    max_queue: int | None = None
    # The page's files by path; empty: there is no page.
    page: Mapping[str, Response] = field(default_factory=dict)
    version: str = ""


class Api:
    """The OpenAI API as a function from request to response."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def methods(self, path: str) -> frozenset[str]:
        """The methods that a path has; none: there is no such route."""
        if path in self._services.page:
            return frozenset({"GET"})
        return frozenset(method for method, route in ROUTES if _matches(route, path))

    def __call__(self, request: RawRequest) -> Response:
        """Answer a request. Raises ApiError, and ClientGone when nobody waits any more."""
        if request.path in self._services.page:
            return self._services.page[request.path]
        endpoint = next(e for (m, route), e in ROUTES.items() if m == request.method and _matches(route, request.path))
        try:
            return endpoint(self._services, request)
        except RecursionError:
            # Whatever it was that went down into the request's JSON: checking, the chat template, writing it out.
            raise ApiError(400, "The request is nested too deeply.") from None

    def error(self, error: ApiError) -> Response:
        """The reply that an error becomes."""
        return errors.as_response(error)

    def observe(self, entry: RequestLog) -> None:
        """Count a request that has ended, however it did."""
        stats.observe(self._services.metrics, entry, self._route(entry.path))

    def _route(self, path: str) -> str:
        # A name out of our tables: a client can ask for any number of paths.
        if path in self._services.page:
            return path
        return next((route for _, route in ROUTES if _matches(route, path)), "other")


def _matches(route: str, path: str) -> bool:
    # A route that ends in "/" takes the rest of the path as a name, which may hold "/" itself.
    plain = path.removeprefix("/v1") if path.startswith("/v1/") else path
    return plain.startswith(route) and len(plain) > len(route) if route.endswith("/") else plain == route


def chat_completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/chat/completions"""
    body = schema.parse(schema.ChatRequest, request.body)
    entry, tokenizer = _model(services, body)
    _check_length(services, entry, tokenizer, sum(len(m.content or "") for m in body.messages), "messages")
    grammar = _grammar(services, entry, body)
    prompt = chat_prompt(
        tokenizer,
        [message.as_dict() for message in body.messages],
        tools=body.offered_tools,
        options={**services.template_options, **entry.template_options, **body.template_options},
        role_mapping=body.role_mapping,
    )
    options = OutputOptions(
        tuple(body.stop), tuple(body.offered_tools), forced_call=bool(body.must_call), max_calls=body.max_calls
    )
    limit = body.wanted_tokens or _defaults(services, entry).max_tokens
    jobs = _jobs(services, entry, body, [prompt], limit, param="messages")
    if grammar is not None:
        _constrain(jobs, grammar, _gate(tokenizer, prompt, options))
    reply = _Reply(services, request, entry, jobs, options, body)
    return reply.respond(render.ChatRenderer(reply.head("chatcmpl"), logprobs=body.logprobs), tokenizer)


def completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/completions"""
    body = schema.parse(schema.CompletionRequest, request.body)
    entry, tokenizer = _model(services, body)
    grammar = _grammar(services, entry, body)
    prompts = [_completion_prompt(services, entry, tokenizer, prompt) for prompt in body.prompt]
    scored = body.echo and body.wanted_logprobs is not None
    if body.max_tokens == 0 and not scored:
        return _only_echo(services, entry, tokenizer, body, prompts)
    limit = schema.COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    jobs = _jobs(services, entry, body, prompts, limit, param="prompt")
    if grammar is not None:
        _constrain(jobs, grammar, Gate())
    echoes = _echoes(tokenizer, body)
    options = OutputOptions(tuple(body.stop), is_chat=False)
    if scored:
        # The prompts come with their log-probabilities, from the engine.
        for job in jobs:
            job.sampling = replace(job.sampling, prompt_logprobs=body.wanted_logprobs)
        options, echoes = replace(options, echoes=tuple(echoes[job.index // body.n_samples] for job in jobs)), []
    reply = _Reply(services, request, entry, jobs, options, body)
    return reply.respond(render.CompletionRenderer(reply.head("cmpl"), echoes, body.n), tokenizer)


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
    return _json(render.fold(renderer, finishes, n, body.n))


def list_models(services: Services, request: RawRequest) -> Response:
    """GET /v1/models"""
    loaded = services.loaded()
    models = [_model_object(services, name, entry, loaded) for name, entry in services.catalog.listing()]
    return _json({"object": "list", "data": models})


def get_model(services: Services, request: RawRequest) -> Response:
    """GET /v1/models/{id}"""
    name = request.path.removeprefix("/v1").removeprefix("/models/")
    return _json(_model_object(services, *services.catalog.look_up(name), services.loaded()))


def health(services: Services, request: RawRequest) -> Response:
    """GET /health: 200 when requests are served, 503 with the reason when they are not."""
    state = services.scheduler.health()
    status = "draining" if services.draining() else state.status
    body = {
        "status": status,
        "model": state.models[-1] if state.models else None,
        "models": list(state.models),
        "waiting": state.waiting,
        "running": state.running,
    }
    return _json(body, status=200 if status == "ok" else 503)


def ready(services: Services, request: RawRequest) -> Response:
    """GET /ready: 200 when a request would be taken now, 503 with the reason when it would not."""
    reason = _not_ready(services, services.scheduler.health())
    return _json({"status": reason or "ready"}, status=503 if reason else 200)


def _not_ready(services: Services, state: Health) -> str:
    if services.draining():
        return "draining"
    if state.status != "ok":
        return state.status
    # Without a default model, models are loaded when they are asked for: waiting for one would be waiting for ever.
    if not state.models and services.catalog.default is not None:
        return "loading"
    is_full = services.max_queue is not None and state.waiting >= services.max_queue
    return "queue_full" if is_full else ""


def live_stats(services: Services, request: RawRequest) -> Response:
    """GET /stats: what runs, how fast, and in how much memory, at this moment."""
    status = "draining" if services.draining() else services.scheduler.health().status
    return _json(stats.as_object(services.metrics, _engine_stats(services), status, services.version))


def prometheus_metrics(services: Services, request: RawRequest) -> Response:
    """GET /metrics, in Prometheus's text format. Raises ApiError 501 without prometheus-client."""
    return prometheus.respond(services.metrics, _engine_stats(services), services.scheduler.health().status)


def _engine_stats(services: Services) -> EngineStats:
    return services.scheduler.stats() if services.engine_stats is None else services.engine_stats()


ROUTES: dict[tuple[str, str], Callable[[Services, RawRequest], Response]] = {
    ("POST", "/chat/completions"): chat_completions,
    ("POST", "/completions"): completions,
    ("GET", "/models"): list_models,
    ("GET", "/models/"): get_model,
    ("GET", "/health"): health,
    ("GET", "/ready"): ready,
    ("GET", "/stats"): live_stats,
    ("GET", "/metrics"): prometheus_metrics,
}


@dataclass(frozen=True, slots=True)
class _Reply:
    """One request's answer, streamed or whole."""

    services: Services
    request: RawRequest
    entry: ModelEntry
    jobs: Sequence[Job]
    options: OutputOptions
    body: schema.ChatRequest | schema.CompletionRequest

    def head(self, prefix: str) -> render.Head:
        return render.new_head(prefix, self.entry.name, self.services.fingerprint)

    def respond(self, renderer: render.Renderer, tokenizer: Tokenizer) -> Response:
        """Raises ApiError while nothing was sent; once a stream runs, an error is its last event."""
        generation = Generation(
            self.services.scheduler, tokenizer, self.jobs, self.options, self.request.alive, self._trace()
        )
        generation.submit()
        if self.body.stream:
            return Response(200, _Stream(self._stream(renderer, generation), generation), "text/event-stream")
        try:
            n_kept = self.body.n if self.body.n_samples > self.body.n else None
            return _json(render.fold(renderer, generation, len(self.jobs), self.body.n_samples, n_kept))
        finally:
            self._note(generation)

    def _trace(self) -> Trace:
        request = self.request
        route = request.path.removeprefix("/v1")
        return Trace(
            self.services.metrics, self.entry.name, route, request.request_id, request.received_at, len(self.jobs)
        )

    def _stream(self, renderer: render.Renderer, generation: Generation) -> Generator[bytes, None, None]:
        include_usage = self.body.stream_options.include_usage
        try:
            yield from render.stream(renderer, generation, len(self.jobs), self.body.n, include_usage=include_usage)
        except ClientGone:
            raise
        except ApiError as error:
            self.request.notes["error"] = error.code or error.type
            yield sse.event(render.dumps(errors.as_object(error)))
        except Exception:  # the request boundary of a stream: its 200 is out, so the reason must be its last event
            log.exception("a stream failed")
            self.request.notes["error"] = "server_error"
            yield sse.event(render.dumps(errors.as_object(internal_error(self.request.request_id))))
        finally:
            self._note(generation)

    def _note(self, generation: Generation) -> None:
        """For the log."""
        usage = render.total_usage(generation.finishes, self.body.n_samples)
        reasons = {finish.reason for finish in generation.finishes}
        self.request.notes.update(
            model=self.entry.name,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            finish_reason=",".join(sorted(reasons)) or "none",
        )


class _Stream:
    """A stream's pieces. Closing it frees its jobs even when not one piece was taken: a generator would not."""

    def __init__(self, pieces: Generator[bytes, None, None], generation: Generation) -> None:
        self._pieces = pieces
        self._generation = generation

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()
        self._generation.cancel()


def _model(services: Services, body: schema._Request) -> tuple[ModelEntry, Tokenizer]:
    """The model that a request names. Raises ApiError 404, or 400 for adapters the operator did not name."""
    _check_choice("adapters", body.adapters, services.adapter)
    _check_choice("draft_model", body.draft_model, services.draft_model)
    entry = services.catalog.find(body.model)
    return entry, services.tokenizers.tokenizer(entry)


def _grammar(services: Services, entry: ModelEntry, body: schema.ChatRequest | schema.CompletionRequest) -> str | None:
    """What the text has to match. Raises ApiError 400 when that is too much, or cannot be compiled for the model."""
    rule = body.rule()
    functions = body.must_call if isinstance(body, schema.ChatRequest) else []
    if functions:
        # A format is for an answer in words, and there will be none.
        if rule is not None and rule.param != "response_format":
            text = f"'{rule.param}' and a 'tool_choice' that asks for a call exclude each other."
            raise ApiError(400, text, param=rule.param)
        grammar, param = compile_forced_call(functions), "tools"
    elif rule is not None:
        grammar, param = compile_rule(rule), rule.param
    else:
        return None
    if fault := services.check_grammar(entry, grammar):
        raise ApiError(400, f"Invalid value for '{param}': it cannot be compiled: {fault}", param=param)
    return grammar


def _gate(tokenizer: Tokenizer, prompt: Prompt, options: OutputOptions) -> Gate:
    found = formats(tokenizer)
    # gpt-oss makes even a call that it has to make in its own way, should it begin one.
    with_calls = bool(options.tools) and (not options.forced_call or found.is_harmony)
    return found.gate(in_reasoning=prompt.in_reasoning, with_calls=with_calls)


def _constrain(jobs: Sequence[Job], grammar: str, gate: Gate) -> None:
    for job in jobs:
        job.sampling = replace(job.sampling, grammar=grammar, gate=gate)


def _completion_prompt(services: Services, entry: ModelEntry, tokenizer: Tokenizer, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        _check_length(services, entry, tokenizer, len(prompt), "prompt")
        return text_prompt(tokenizer, prompt)
    # Before anything decodes them: a tokenizer is no more careful with ids than MLX is.
    check_ids(prompt, entry.vocab_size or tokenizer.n_tokens, "prompt")
    return Prompt(tuple(prompt))


def _check_choice(param: str, wanted: str | None, offered: str | None) -> None:
    # mlx_lm.server loads whatever path or repository a client names; here the operator decides.
    if wanted not in (None, DEFAULT_NAME, offered):
        raise ApiError(400, f"'{param}' may only name what the server was started with.", param=param)


def _jobs(
    services: Services, entry: ModelEntry, body: Any, prompts: Sequence[Prompt], limit: int, *, param: str
) -> list[Job]:
    """A job for each prompt and sample; index = prompt * n + sample. Raises ApiError 400 when a prompt is too long."""
    events: SimpleQueue[Event] = SimpleQueue()
    defaults = _defaults(services, entry)
    jobs = []
    for i, prompt in enumerate(prompts):
        room = _room(services, entry, prompt, param)
        sampling = body.sampling(defaults, body.needed_logprobs, min(limit, room))
        for k in range(body.n_samples):
            seed = None if body.seed is None else body.seed + k * _SEED_STRIDE
            index = i * body.n_samples + k
            jobs.append(Job(entry.name, prompt, replace(sampling, seed=seed), index, events, body.priority))
    return jobs


def _defaults(services: Services, entry: ModelEntry) -> schema.Defaults:
    """The model's own defaults win over the server's."""
    return replace(services.defaults, **entry.defaults)  # type: ignore[arg-type]


def _context_tokens(services: Services, entry: ModelEntry) -> int | None:
    """What prompt and output together may come to; None: nobody says."""
    return context_limit(entry, services.max_model_len)


def _check_length(services: Services, entry: ModelEntry, tokenizer: Tokenizer, n_chars: int, param: str) -> None:
    """Refuse what can't fit before it is tokenized, which takes many seconds for millions of characters."""
    context_tokens = _context_tokens(services, entry)
    least = n_chars // tokenizer.max_token_chars
    if context_tokens is not None and least > context_tokens:
        raise errors.context_length(context_tokens, least, param)


def _room(services: Services, entry: ModelEntry, prompt: Prompt, param: str) -> int:
    """How many tokens may follow the prompt."""
    context_tokens = _context_tokens(services, entry)
    if context_tokens is None:
        return 2**31
    if len(prompt.tokens) >= context_tokens:
        raise errors.context_length(context_tokens, len(prompt.tokens), param)
    return context_tokens - len(prompt.tokens)


def _model_object(services: Services, name: str, entry: ModelEntry, loaded: frozenset[str]) -> dict[str, Any]:
    # The root of an alias is its model, and of an adapter the model that it is on.
    root = entry.name if name != entry.name else entry.base or entry.name
    context_tokens = _context_tokens(services, entry)
    return {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "mlx-serve",
        "root": root,
        "loaded": entry.name in loaded,
    } | ({"max_model_len": context_tokens} if context_tokens is not None else {})


def _json(value: Any, status: int = 200) -> Response:
    return Response(status, render.dumps(value).encode())
