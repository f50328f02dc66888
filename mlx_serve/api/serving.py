"""What the endpoints work with, and what they ask of a model: its context, its template's options, its defaults.

Knows the engine, and no dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_serve.api.cost import MAX_JSON_VALUES, length_check
from mlx_serve.api.response_store import ResponseStore
from mlx_serve.engine.catalog import DEFAULT_NAME, Catalog, ModelEntry, context_limit
from mlx_serve.engine.schedule.scheduler import Scheduler
from mlx_serve.metrics import Metrics
from mlx_serve.text.grammar import Function, Rule
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import (
    ApiError,
    Check,
    Grammar,
    RawRequest,
    Response,
    Sampling,
)


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
    # The server's defaults for requests, by the names of ``values.Sampling``.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    # Whether requests with different API keys share KV caches and kept responses.
    share_prefixes: bool = False
    # The command line's adapters and draft model. Requests may name these and no others.
    adapter: str | None = None
    draft_model: str | None = None
    draining: Callable[[], bool] = lambda: False
    # Whether the default model has been loaded once, or there is no default.
    started: Callable[[], bool] = lambda: True
    # The stored responses of the Responses dialect.
    responses: ResponseStore = field(default_factory=ResponseStore)
    metrics: Metrics = field(default_factory=Metrics)
    # The most waiting sequences. A full queue refuses further requests.
    max_queue: int | None = None
    # The most values that a body's JSON, or a stored conversation's, may have.
    max_json_values: int = MAX_JSON_VALUES
    # The page's files by path; empty: there is no page.
    page: Mapping[str, Response] = field(default_factory=dict)
    version: str = ""

    def owner(self, request: RawRequest) -> str:
        """Whose request it is, where clients are kept apart."""
        return "" if self.share_prefixes else request.client


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


def defaults_of(services: Services, entry: ModelEntry) -> Mapping[str, Any]:
    """By the names of ``values.Sampling``; the model's own win over the server's. ``max_tokens`` None: not given."""
    return {**services.defaults, **entry.defaults}


def new_sampling(defaults: Mapping[str, Any], given: Mapping[str, Any], *, max_tokens: int, **more: Any) -> Sampling:
    """How tokens are chosen; what a request has not ``given`` comes from ``defaults``."""
    return Sampling(**{**defaults, **given, "max_tokens": max_tokens, **more})


def context_tokens(services: Services, entry: ModelEntry) -> int | None:
    """The most tokens of prompt and output together; None: no limit is known."""
    return context_limit(entry, services.max_model_len)


def context_check(services: Services, request: RawRequest, entry: ModelEntry, param: str) -> Check:
    """Ends the tokenizing of a text that is over the model's context, or whose client has left."""
    return length_check(request, context_tokens(services, entry), param)
