"""What every dialect does between its request and its reply: model, grammar, jobs, and the answer whole or streamed.

Knows the engine, and no dialect: fields and shapes are the callers'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol

from mlx_serve.api import errors
from mlx_serve.api.body import Defaults
from mlx_serve.api.cost import MAX_JSON_VALUES, length_check, tokens_with_logprobs
from mlx_serve.api.generation import Generation, OutputOptions
from mlx_serve.api.response_store import ResponseStore
from mlx_serve.api.scope import prefix_scope
from mlx_serve.api.shapes import json_response, total_usage
from mlx_serve.engine.catalog import DEFAULT_NAME, Catalog, ModelEntry, context_limit
from mlx_serve.engine.schedule.scheduler import Scheduler
from mlx_serve.metrics import Metrics, Trace
from mlx_serve.text.formats import formats
from mlx_serve.text.grammar import Function, Rule
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import (
    ApiError,
    Check,
    ClientGone,
    Event,
    Gate,
    Grammar,
    Job,
    Prompt,
    RawRequest,
    Response,
    Sampling,
    internal_error,
)

log = logging.getLogger(__name__)

# An odd constant of 64 bits (2**64 over the golden ratio), so that the samples of one seed are not those of the next.
_SEED_STRIDE = 0x9E3779B97F4A7C15
# The most tokens of an answer where neither the request nor the operator nor the model says how many there may be.
_LIMIT_WITHOUT_CONTEXT = 4096
# OpenAI's fields for the format of an answer in words.
_FORMAT_FIELDS = ("response_format", "text.format")


class Tokenizers(Protocol):
    """Where tokenizers come from."""

    def tokenizer(self, entry: ModelEntry) -> Tokenizer:
        """The tokenizer of a model. Raises ApiError when it can't be loaded."""


class Grammars(Protocol):
    """Where compiled grammars come from: ``grammars.GrammarCompiler``."""

    def compile(
        self, entry: ModelEntry, rule: Rule | None, functions: Sequence[Function], alive: Callable[[], bool]
    ) -> Grammar:
        """The grammar of a call of one of ``functions``, if there are any, or else of ``rule``. Raises ApiError."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints work with."""

    scheduler: Scheduler
    catalog: Catalog
    tokenizers: Tokenizers
    fingerprint: str
    # Compiles what requests demand of their texts.
    grammars: Grammars
    defaults: Defaults = field(default_factory=Defaults)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    # Whether requests with different API keys share KV caches.
    share_prefixes: bool = False
    # The command line's adapters and draft model, which a request may name and no others.
    adapter: str | None = None
    draft_model: str | None = None
    draining: Callable[[], bool] = lambda: False
    # Whether the default model has been loaded once, or there is none.
    started: Callable[[], bool] = lambda: True
    # What clients of the Responses dialect may come back to.
    responses: ResponseStore = field(default_factory=ResponseStore)
    metrics: Metrics = field(default_factory=Metrics)
    # Sequences that may wait; at so many no request more is taken.
    max_queue: int | None = None
    # The most values that a body's JSON, or a stored conversation's, may have.
    max_json_values: int = MAX_JSON_VALUES
    # The page's files by path; empty: there is no page.
    page: Mapping[str, Response] = field(default_factory=dict)
    version: str = ""


class Sampled(Protocol):
    """A request that says how its answers are chosen."""

    @property
    def seed(self) -> int | None:
        """The same seed gives the same answer."""

    @property
    def n_samples(self) -> int:
        """How many answers each prompt gets."""

    @property
    def needed_logprobs(self) -> int | None:
        """How many alternatives a token's log-probabilities come with; None: not asked for."""

    @property
    def priority(self) -> int:
        """Smaller is earlier."""

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same one share KV caches."""

    def sampling(self, defaults: Defaults, top_logprobs: int | None, max_tokens: int) -> Sampling:
        """How tokens are chosen; what the request leaves out comes from ``defaults``."""


class Writer(Protocol):
    """How one dialect writes an answer down."""

    def stream(self, generation: Generation) -> Iterator[bytes]:
        """Its events, one write each."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails on its way."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One request's answer, streamed or whole. ``n_per_prompt`` jobs share a prompt."""

    services: Services
    request: RawRequest
    entry: ModelEntry
    jobs: Sequence[Job]
    options: OutputOptions
    is_stream: bool
    n_per_prompt: int = 1

    def respond(self, writer: Writer, tokenizer: Tokenizer) -> Response:
        """Raises ApiError while nothing was sent; once a stream runs, an error is its last event."""
        generation = Generation(
            self.services.scheduler, tokenizer, self.jobs, self.options, self.request.alive, self._trace()
        )
        try:
            generation.submit()
        except (ApiError, ClientGone):
            self._note(generation)
            raise
        if self.is_stream:
            return Response(200, _Stream(self._stream(writer, generation), generation), "text/event-stream")
        try:
            return json_response(writer.whole(generation))
        finally:
            self._note(generation)

    def _trace(self) -> Trace:
        request = self.request
        return Trace(
            self.services.metrics,
            self.entry.name,
            request.path,
            request.request_id,
            request.received_at,
            len(self.jobs),
        )

    def _stream(self, writer: Writer, generation: Generation) -> Generator[bytes, None, None]:
        try:
            yield from writer.stream(generation)
        except ClientGone:
            raise
        except ApiError as error:
            self.request.notes["error"] = error.code or error.type
            yield writer.failure(error)
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:  # the request boundary of a stream: its 200 is out, so the reason must be its last event
            log.exception("a stream failed")
            self.request.notes["error"] = "server_error"
            yield writer.failure(internal_error(self.request.request_id))
        finally:
            self._note(generation)

    def _note(self, generation: Generation) -> None:
        """For the log, which also tells of what was made for a client that has left."""
        usage = total_usage(generation.usages, self.n_per_prompt)
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


def find_model(
    services: Services, name: str | None, adapters: str | None = None, draft_model: str | None = None
) -> tuple[ModelEntry, Tokenizer]:
    """The model that a request names. Raises ApiError 404, or 400 for adapters the operator did not name."""
    _check_choice("adapters", adapters, services.adapter)
    _check_choice("draft_model", draft_model, services.draft_model)
    entry = services.catalog.find(name)
    return entry, services.tokenizers.tokenizer(entry)


def _check_choice(param: str, wanted: str | None, offered: str | None) -> None:
    # mlx_lm.server loads whatever path or repository a client names; here the operator decides.
    if wanted not in (None, DEFAULT_NAME, offered):
        raise ApiError(400, f"'{param}' may only name what the server was started with.", param=param)


def template_options(services: Services, entry: ModelEntry, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """For the chat template: the request's word over the model's over the server's."""
    return {**services.template_options, **entry.template_options, **wanted}


def defaults_of(services: Services, entry: ModelEntry) -> Defaults:
    """The model's own defaults win over the server's."""
    return replace(services.defaults, **entry.defaults)  # type: ignore[arg-type]


def compiled_grammar(
    services: Services,
    entry: ModelEntry,
    rule: Rule | None,
    functions: Sequence[Function],
    alive: Callable[[], bool],
) -> Grammar | None:
    """What the text has to match: a call of one of ``functions``, if there are any, or else ``rule``.

    Raises ApiError 400 when that is too much, or cannot be compiled for the model; ClientGone when ``alive`` says so.
    """
    if functions and rule is not None and rule.param not in _FORMAT_FIELDS:
        # A format is for an answer in words, and there will be none.
        text = f"'{rule.param}' and a 'tool_choice' that asks for a call exclude each other."
        raise ApiError(400, text, param=rule.param)
    if not functions and rule is None:
        return None
    return services.grammars.compile(entry, rule, functions, alive)


def chat_gate(tokenizer: Tokenizer, prompt: Prompt, options: OutputOptions) -> Gate:
    """Where in a chat answer its grammar takes hold."""
    found = formats(tokenizer)
    # gpt-oss makes even a call that it has to make in its own way, should it begin one.
    with_calls = bool(options.tools) and (not options.forced_call or found.is_harmony)
    return found.gate(in_reasoning=prompt.in_reasoning, with_calls=with_calls)


def constrain(jobs: Sequence[Job], grammar: Grammar, gate: Gate) -> None:
    """Hold the jobs to a grammar. Raises ApiError 400 when it might leave none of the tokens that are allowed."""
    for job in jobs:
        if job.sampling.allowed_token_ids is not None:
            text = "'allowed_token_ids' cannot be combined with a format of the text, or a call that has to be made."
            raise ApiError(400, text, param="allowed_token_ids")
        job.sampling = replace(job.sampling, grammar=grammar, gate=gate)


def make_jobs(
    services: Services,
    request: RawRequest,
    entry: ModelEntry,
    body: Sampled,
    prompts: Sequence[Prompt],
    limit: int | None,
    *,
    param: str,
    streamed: bool = False,
) -> list[Job]:
    """A job for each prompt and sample; index = prompt * n + sample. Raises ApiError 400 when a prompt is too long.

    ``limit``: the most tokens of an answer that the request asks for; None: it does not say. ``streamed``: what is
    made of the tokens is sent as they come, and not kept.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    defaults = defaults_of(services, entry)
    scope = prefix_scope("" if services.share_prefixes else request.client, body.cache_salt)
    most = limit
    if most is None:
        # As at OpenAI, whatever the context leaves room for.
        most = defaults.max_tokens or context_tokens(services, entry) or _LIMIT_WITHOUT_CONTEXT
    jobs = []
    for i, prompt in enumerate(prompts):
        wanted = min(most, _room(services, entry, prompt, param))
        wanted = _check_logprobs(body, len(prompts), limit, wanted, streamed=streamed)
        sampling = body.sampling(defaults, body.needed_logprobs, wanted)
        sampling = replace(sampling, is_limit_default=limit is None)
        for k in range(body.n_samples):
            seed = None if body.seed is None else body.seed + k * _SEED_STRIDE
            index = i * body.n_samples + k
            own = replace(sampling, seed=seed)
            jobs.append(Job(entry.name, prompt, own, index, events, body.priority, scope=scope))
    return jobs


def _check_logprobs(body: Sampled, n_prompts: int, limit: int | None, wanted: int, *, streamed: bool) -> int:
    """``wanted`` tokens of each answer, or as many as may come with their log-probabilities.

    Raises ApiError 400 when the client has asked for more than these.
    """
    if body.needed_logprobs is None:
        return wanted
    most = tokens_with_logprobs(n_prompts * body.n_samples, body.needed_logprobs, streamed=streamed)
    if limit is not None and wanted > most:
        text = (
            f"Invalid value for 'max_tokens': {most} at most, with so many answers and log-probabilities of each token."
        )
        raise ApiError(400, text, param="max_tokens", code="too_many_logprobs")
    return min(wanted, most)


def context_tokens(services: Services, entry: ModelEntry) -> int | None:
    """What prompt and output together may come to; None: nobody says."""
    return context_limit(entry, services.max_model_len)


def context_check(services: Services, request: RawRequest, entry: ModelEntry, param: str) -> Check:
    """Ends the tokenizing of a text that is over the model's context, or whose client has left."""
    return length_check(request, context_tokens(services, entry), param)


def last_tokens(services: Services, entry: ModelEntry, prompt: Prompt, n_tokens: int | None) -> Prompt:
    """The prompt's last ``n_tokens``; None: all of them, -1: as many as leave room for a token."""
    most = context_tokens(services, entry)
    kept = n_tokens if n_tokens != -1 else most - 1 if most is not None else None
    return prompt if kept is None else replace(prompt, tokens=prompt.tokens[max(0, len(prompt.tokens) - kept) :])


def _room(services: Services, entry: ModelEntry, prompt: Prompt, param: str) -> int:
    """How many tokens may follow the prompt."""
    most = context_tokens(services, entry)
    if most is None:
        return 2**31
    if len(prompt.tokens) >= most:
        raise errors.ContextLengthError(most, len(prompt.tokens), param)
    return most - len(prompt.tokens)
