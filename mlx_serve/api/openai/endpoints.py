"""POST /v1/chat/completions and /v1/completions, and the routes beside them that take their requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_serve.api import errors
from mlx_serve.api.body import parse
from mlx_serve.api.cost import MAX_CUT_TOKENS, check_prompt_logprobs, length_check
from mlx_serve.api.generation import Generation, OutputOptions
from mlx_serve.api.openai import render, schema, tokenize
from mlx_serve.api.openai.prompt import request_prompt
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import (
    Reply,
    Services,
    chat_gate,
    compiled_grammar,
    constrain,
    context_tokens,
    find_model,
    last_tokens,
    make_jobs,
)
from mlx_serve.api.shapes import dumps, json_response
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.text.prompt import text_prompt
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError, Finish, Gate, Prompt, RawRequest, Response, Usage
from mlx_serve.wire import sse


def chat_completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/chat/completions"""
    body = parse(schema.ChatRequest, request.body)
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
        _Writer(render.ChatRenderer(_head(reply, "chatcmpl"), logprobs=body.logprobs), body, len(jobs)), tokenizer
    )


def chat_input_tokens(services: Services, request: RawRequest) -> Response:
    """POST /v1/chat/completions/input_tokens: what a chat request's prompt comes to, as llama-server has it."""
    body = parse(schema.ChatRequest, request.body)
    entry, tokenizer = find_model(services, body.model, body.adapters, body.draft_model)
    prompt = request_prompt(services, request, entry, tokenizer, body)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


def completions(services: Services, request: RawRequest) -> Response:
    """POST /v1/completions"""
    body = parse(schema.CompletionRequest, request.body)
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
    renderer = render.CompletionRenderer(_head(reply, "cmpl"), echoes, body.n, logprobs=is_scored)
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
        return sse.event(dumps(errors.as_object(error)))


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


def _head(reply: Reply, prefix: str) -> render.Head:
    return render.new_head(prefix, reply.entry.name, reply.services.fingerprint)


ROUTES = (
    Route("POST", "/chat/completions", chat_completions),
    Route("POST", "/chat/completions/input_tokens", chat_input_tokens),
    Route("POST", "/completions", completions),
    *tokenize.ROUTES,
)
