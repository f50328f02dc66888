"""Answers requests, in one piece or as a stream: model, grammar, prompts, jobs, and a dialect's writer.

All requests for answers pass through here. Knows the engine, and no dialect: callers pass the fields and shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol

from mlx_serve.api import prompts
from mlx_serve.api.cost import check_prompt_logprobs, tokens_with_logprobs
from mlx_serve.api.errors import ContextLengthError
from mlx_serve.api.generation import Generation, OutputOptions
from mlx_serve.api.generation_request import ChatConversation, GenerationRequest
from mlx_serve.api.scope import prefix_scope
from mlx_serve.api.serving import Services, context_tokens, defaults_of, find_model, new_sampling
from mlx_serve.api.shapes import json_response, total_usage
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.metrics import Trace
from mlx_serve.text.formats import formats
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import (
    ApiError,
    ClientGone,
    Event,
    Gate,
    Grammar,
    Job,
    Prompt,
    RawRequest,
    ReasoningBudget,
    Response,
    Sampling,
    internal_error,
)

log = logging.getLogger(__name__)

# An odd 64-bit constant (2**64 over the golden ratio), so that the samples of one seed differ from those of the next.
_SEED_STRIDE = 0x9E3779B97F4A7C15
# The most tokens of an answer when the request, the operator and the model set no limit.
_LIMIT_WITHOUT_CONTEXT = 4096
# The fields that set the format of a text answer.
_FORMAT_FIELDS = ("response_format", "text.format")


class Writer(Protocol):
    """Writes answers in one dialect."""

    def stream(self, generation: Generation) -> Iterator[bytes]:
        """Its events, one write each."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its model, grammar and prompts. ``echoes``: each prompt's text, if the request wants it."""

    services: Services
    request: RawRequest
    asked: GenerationRequest
    entry: ModelEntry
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    grammar: Grammar | None = None
    echoes: Sequence[str] = field(default_factory=list)
    prediction: tuple[int, ...] = ()

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The defaults of requests for this model."""
        return defaults_of(self.services, self.entry)

    @property
    def n_answers(self) -> int:
        """The number of answers to all prompts together."""
        return len(self.prompts) * self.asked.n_samples


def prepare(services: Services, request: RawRequest, asked: GenerationRequest) -> Prepared:
    """Raises ApiError 404 for the model, 400 for an invalid request; ClientGone when the client has left."""
    entry, tokenizer = find_model(services, asked.model, asked.adapters, asked.draft_model)
    grammar = _grammar(services, request, entry, asked)
    if isinstance(asked.prompt, ChatConversation):
        found = [prompts.chat_prompt(services, request, entry, tokenizer, asked.prompt)]
        prediction = prompts.prediction_tokens(services, request, entry, tokenizer, asked.prediction)
        return Prepared(services, request, asked, entry, tokenizer, found, grammar, prediction=prediction)
    found = prompts.text_prompts(services, request, entry, tokenizer, asked.prompt)
    texts = prompts.echoes(tokenizer, asked.prompt)
    return Prepared(services, request, asked, entry, tokenizer, found, grammar, texts)


def count_tokens(
    services: Services,
    request: RawRequest,
    model: str | None,
    asked: ChatConversation,
    adapters: str | None = None,
    draft_model: str | None = None,
) -> int:
    """The length of the prompt that a conversation would have. Raises as ``prepare`` does."""
    entry, tokenizer = find_model(services, model, adapters, draft_model)
    return len(prompts.chat_prompt(services, request, entry, tokenizer, asked).tokens)


def generate(prepared: Prepared, new_writer: Callable[[Prepared], Writer]) -> Response:
    """The answer. Raises ApiError while nothing was sent; once a stream runs, an error is its last event."""
    options = _options(prepared)
    jobs = _jobs(prepared, options)
    request, services = prepared.request, prepared.services
    trace = Trace(
        services.metrics, prepared.entry.name, request.path, request.request_id, request.received_at, len(jobs)
    )
    generation = Generation(services.scheduler, prepared.tokenizer, jobs, options, request.alive, trace)
    return _GeneratedAnswer(prepared, generation, new_writer(prepared)).respond()


@dataclass(frozen=True, slots=True)
class _GeneratedAnswer:
    prepared: Prepared
    generation: Generation
    writer: Writer

    def respond(self) -> Response:
        try:
            self.generation.submit()
        except (ApiError, ClientGone):
            self._note()
            raise
        if self.prepared.asked.is_stream:
            return Response(200, _Stream(self._stream(), self.generation), "text/event-stream")
        try:
            return json_response(self.writer.whole(self.generation))
        finally:
            self._note()

    def _stream(self) -> Generator[bytes, None, None]:
        request = self.prepared.request
        try:
            yield from self.writer.stream(self.generation)
        except ClientGone:
            raise
        except ApiError as error:
            request.notes["error"] = error.code or error.type
            yield self.writer.failure(error)
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:  # the request boundary of a stream: its 200 is out, so the reason must be its last event
            log.exception("a stream failed")
            request.notes["error"] = "server_error"
            yield self.writer.failure(internal_error(request.request_id))
        finally:
            self._note()

    def _note(self) -> None:
        """Note the usage for the log, also when the client has left."""
        usage = total_usage(self.generation.usages, self.prepared.asked.n_samples)
        reasons = {finish.reason for finish in self.generation.finishes}
        self.prepared.request.notes.update(
            model=self.prepared.entry.name,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            finish_reason=",".join(sorted(reasons)) or "none",
        )


class _Stream:
    """A stream's pieces. Closing it frees its jobs even if it was never iterated, which a generator would not do."""

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


def _grammar(services: Services, request: RawRequest, entry: ModelEntry, asked: GenerationRequest) -> Grammar | None:
    """The grammar of the text: a call of a function that must be called, or else the request's rule.

    Raises ApiError 400 when it is too large or does not compile for the model; ClientGone when the client has left.
    """
    rule, functions = asked.rule, asked.must_call
    if functions and rule is not None and rule.param not in _FORMAT_FIELDS:
        # A format applies to text, and a required call has no text.
        text = f"'{rule.param}' and a 'tool_choice' that asks for a call exclude each other."
        raise ApiError(400, text, param=rule.param)
    if not functions and rule is None:
        return None
    return services.grammars.compile(entry, rule, functions, request.alive)


def _options(prepared: Prepared) -> OutputOptions:
    asked = prepared.asked
    is_scored = asked.prompt_logprobs is not None
    return OutputOptions(
        tuple(asked.stops),
        tuple(asked.tools),
        is_chat=isinstance(asked.prompt, ChatConversation),
        forced_call=bool(asked.must_call),
        # The prompts come with their log-probabilities, from the engine.
        echoes=tuple(text for text in prepared.echoes for _ in range(asked.n_samples)) if is_scored else (),
        max_calls=asked.max_calls,
        keeps_stop=asked.keeps_stop,
    )


def _jobs(prepared: Prepared, options: OutputOptions) -> list[Job]:
    """A job for each prompt and sample; index = prompt * n + sample. Raises ApiError 400 when a prompt is too long."""
    asked = prepared.asked
    events: SimpleQueue[Event] = SimpleQueue()
    scope = prefix_scope(prepared.services.owner(prepared.request), asked.cache_salt)
    samplings = [_sampling(prepared, prompt, options) for prompt in prepared.prompts]
    if asked.prompt_logprobs is not None:
        n_tokens = sum(len(prompt.tokens) for prompt in prepared.prompts) * asked.n_samples
        check_prompt_logprobs(n_tokens, asked.prompt_logprobs)
    return [
        Job(
            prepared.entry.name,
            prompt,
            _sample(sampling, k),
            i * asked.n_samples + k,
            events,
            asked.priority,
            scope=scope,
            prediction=prepared.prediction,
        )
        for i, (prompt, sampling) in enumerate(zip(prepared.prompts, samplings, strict=True))
        for k in range(asked.n_samples)
    ]


def _sample(sampling: Sampling, k: int) -> Sampling:
    """For the answer ``k`` to a prompt, of which the first has the request's own seed."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + k * _SEED_STRIDE)


def _sampling(prepared: Prepared, prompt: Prompt, options: OutputOptions) -> Sampling:
    asked, defaults = prepared.asked, prepared.defaults
    context = context_tokens(prepared.services, prepared.entry)
    most = asked.limit
    if most is None:
        # As at OpenAI, whatever the context leaves room for.
        most = defaults.get("max_tokens") or context or _LIMIT_WITHOUT_CONTEXT
    wanted = min(most, _room(context, prompt, asked.param))
    gate = _gate(prepared.tokenizer, prompt, options) if prepared.grammar is not None else Gate()
    return new_sampling(
        defaults,
        asked.sampling,
        max_tokens=_within_logprobs(prepared, wanted),
        top_logprobs=asked.top_logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        grammar=_allowed(prepared),
        gate=gate,
        reasoning_budget=_reasoning_budget(prepared, prompt, options),
    )


def _allowed(prepared: Prepared) -> Grammar | None:
    """The grammar. Raises ApiError 400 when it might leave none of the tokens that are allowed."""
    if prepared.grammar is not None and prepared.asked.sampling.get("allowed_token_ids") is not None:
        text = "'allowed_token_ids' cannot be combined with a format of the text, or a call that has to be made."
        raise ApiError(400, text, param="allowed_token_ids")
    return prepared.grammar


def _gate(tokenizer: Tokenizer, prompt: Prompt, options: OutputOptions) -> Gate:
    """Where in an answer its grammar applies."""
    if not options.is_chat:
        return Gate()
    found = formats(tokenizer)
    # gpt-oss may begin a required call in its own format.
    with_calls = bool(options.tools) and (not options.forced_call or found.is_harmony)
    return found.gate(in_reasoning=prompt.in_reasoning, with_calls=with_calls)


def _reasoning_budget(prepared: Prepared, prompt: Prompt, options: OutputOptions) -> ReasoningBudget | None:
    n_tokens = prepared.asked.reasoning_tokens
    if n_tokens is None:
        return None
    may_call = bool(options.tools)
    return formats(prepared.tokenizer).reasoning_budget(n_tokens, in_reasoning=prompt.in_reasoning, may_call=may_call)


def _within_logprobs(prepared: Prepared, wanted: int) -> int:
    """``wanted`` tokens of each answer, or as many as may come with their log-probabilities.

    Raises ApiError 400 when the client has asked for more than these.
    """
    asked = prepared.asked
    if asked.top_logprobs is None:
        return wanted
    is_sent = asked.is_stream and not asked.holds_logprobs
    most = tokens_with_logprobs(prepared.n_answers, asked.top_logprobs, streamed=is_sent)
    if asked.limit is not None and wanted > most:
        text = (
            f"Invalid value for 'max_tokens': {most} at most, with so many answers and log-probabilities of each token."
        )
        raise ApiError(400, text, param="max_tokens", code="too_many_logprobs")
    return min(wanted, most)


def _room(context: int | None, prompt: Prompt, param: str) -> int:
    """How many tokens may follow the prompt."""
    if context is None:
        return 2**31
    if len(prompt.tokens) >= context:
        raise ContextLengthError(context, len(prompt.tokens), param)
    return context - len(prompt.tokens)
