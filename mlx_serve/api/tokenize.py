"""POST /tokenize, /detokenize and /apply-template: what the model is given, without asking it.

Fields and answers are llama-server's (https://github.com/ggml-org/llama.cpp/tree/master/tools/server). As everywhere,
``model`` may name a model.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

from mlx_serve.api.cost import length_check
from mlx_serve.api.errors import ContextLengthError
from mlx_serve.api.fields import Model, Str
from mlx_serve.api.schema import ChatRequest, parse
from mlx_serve.api.serving import (
    Services,
    context_tokens,
    find_model,
    json_response,
    request_prompt,
)
from mlx_serve.core import RawRequest, Response
from mlx_serve.engine.vocabulary import check_ids
from mlx_serve.text.guard import Guard
from mlx_serve.text.tokenizer import Tokenizer

# For models that do not say how long their context is: longer lists would hold up the decoding of everybody's answers.
MAX_IDS = 2**20


class TokenizeRequest(Model):
    """POST /tokenize. ``add_special``: with a start token; ``parse_special``: control tokens written out are tokens."""

    model: Str | None = None
    content: Str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Model):
    """POST /detokenize."""

    model: Str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_IDS), FailFast()]


def tokenize(services: Services, request: RawRequest) -> Response:
    """POST /tokenize: ``{"tokens": [id, ...]}``, or with pieces ``[{"id", "piece"}, ...]``."""
    body = parse(TokenizeRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    most = context_tokens(services, entry)
    check = length_check(request, MAX_IDS if most is None else most, "content", "content")
    check(len(body.content) // tokenizer.max_token_chars)
    text = body.content if body.parse_special else _plain(tokenizer, body.content)
    ids = tokenizer.encode(text, special=body.add_special, check=check)
    tokens: list[Any] = [{"id": i, "piece": _piece(tokenizer, i)} for i in ids] if body.with_pieces else list(ids)
    return json_response({"tokens": tokens})


def detokenize(services: Services, request: RawRequest) -> Response:
    """POST /detokenize: ``{"content": text}``"""
    body = parse(DetokenizeRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    most = context_tokens(services, entry)
    if most is not None and len(body.tokens) > most:
        raise ContextLengthError(most, len(body.tokens), "tokens")
    check_ids(body.tokens, entry.vocab_size or tokenizer.n_tokens, "tokens")
    return json_response({"content": tokenizer.decode(body.tokens)})


def apply_template(services: Services, request: RawRequest) -> Response:
    """POST /apply-template: ``{"prompt": text}``, what a chat request gives the model."""
    body = parse(ChatRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    prompt = request_prompt(services, request, entry, tokenizer, body)
    return json_response({"prompt": tokenizer.decode(prompt.tokens)})


def _plain(tokenizer: Tokenizer, text: str) -> str:
    """The text, cut where it would become a control token."""
    return Guard(tokenizer.controls[i] for i in tokenizer.special_ids if i in tokenizer.controls).text(text)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are not whole characters."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
