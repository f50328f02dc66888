"""POST /tokenize, /detokenize and /apply-template: what the model is given, without asking it.

Fields and answers are llama-server's (https://github.com/ggml-org/llama.cpp/tree/master/tools/server), and vLLM's where
``prompt`` or ``messages`` stand for ``content``. As everywhere, ``model`` may name a model.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

from mlx_serve.api.body import parse, read_object, validated
from mlx_serve.api.cost import length_check, parsing
from mlx_serve.api.errors import ContextLengthError
from mlx_serve.api.fields import Model, Str
from mlx_serve.api.openai.schema import ChatRequest
from mlx_serve.api.prompts import chat_prompt
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import Services, context_tokens, find_model
from mlx_serve.api.shapes import json_response
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.text.guard import Guard
from mlx_serve.text.prompt import text_prompt
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import Check, Prompt, RawRequest, Response

# For models that do not say how long their context is: longer lists would hold up the decoding of everybody's answers.
MAX_IDS = 2**20


class TokenizeRequest(Model):
    """POST /tokenize. ``add_special``: with a start token; ``parse_special``: control tokens written out are tokens."""

    model: Str | None = None
    content: Str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class PromptRequest(Model):
    """POST /tokenize of a text, as vLLM has it."""

    model: Str | None = None
    prompt: Str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatRequest):
    """POST /tokenize of a conversation, as vLLM has it."""

    return_token_strs: bool = False


class DetokenizeRequest(Model):
    """POST /detokenize."""

    model: Str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_IDS), FailFast()]


def tokenize(services: Services, request: RawRequest) -> Response:
    """POST /tokenize: ``{"tokens": [id, ...]}``, or with pieces ``[{"id", "piece"}, ...]``.

    In vLLM's form ``{"tokens", "count", "max_model_len", "token_strs"}``.
    """
    body = _parsed(request.body)
    if isinstance(body, TokenizeChatRequest):
        return _of_messages(services, request, body)
    if isinstance(body, PromptRequest):
        return _of_prompt(services, request, body)
    entry, tokenizer = find_model(services, body.model)
    check = _check(services, request, entry, "content")
    check(len(body.content) // tokenizer.max_token_chars)
    text = body.content if body.parse_special else _plain(tokenizer, body.content)
    ids = tokenizer.encode(text, special=body.add_special, check=check)
    tokens: list[Any] = [{"id": i, "piece": _piece(tokenizer, i)} for i in ids] if body.with_pieces else list(ids)
    return json_response({"tokens": tokens})


def _parsed(body: bytes) -> TokenizeChatRequest | PromptRequest | TokenizeRequest:
    """The form of the request that its fields say. Raises ApiError 400."""
    with parsing(body):
        raw = read_object(body)
        if "messages" in raw:
            return validated(TokenizeChatRequest, raw)
        return validated(PromptRequest, raw) if "prompt" in raw else validated(TokenizeRequest, raw)


def _check(services: Services, request: RawRequest, entry: ModelEntry, param: str) -> Check:
    most = context_tokens(services, entry)
    return length_check(request, MAX_IDS if most is None else most, param, param)


def _of_messages(services: Services, request: RawRequest, body: TokenizeChatRequest) -> Response:
    entry, tokenizer = find_model(services, body.model)
    prompt = chat_prompt(services, request, entry, tokenizer, body.as_conversation())
    return _vllm_tokens(services, entry, tokenizer, prompt, with_texts=body.return_token_strs)


def _of_prompt(services: Services, request: RawRequest, body: PromptRequest) -> Response:
    entry, tokenizer = find_model(services, body.model)
    check = _check(services, request, entry, "prompt")
    check(len(body.prompt) // tokenizer.max_token_chars)
    prompt = text_prompt(tokenizer, body.prompt, check, special=body.add_special_tokens)
    return _vllm_tokens(services, entry, tokenizer, prompt, with_texts=body.return_token_strs)


def _vllm_tokens(
    services: Services, entry: ModelEntry, tokenizer: Tokenizer, prompt: Prompt, *, with_texts: bool
) -> Response:
    ids = prompt.tokens
    texts = [tokenizer.decode([i]) for i in ids] if with_texts else None
    found = {"count": len(ids), "max_model_len": context_tokens(services, entry), "tokens": ids, "token_strs": texts}
    return json_response(found)


def detokenize(services: Services, request: RawRequest) -> Response:
    """POST /detokenize: the text as ``content``, and under vLLM's name as ``prompt``."""
    body = parse(DetokenizeRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    most = context_tokens(services, entry)
    if most is not None and len(body.tokens) > most:
        raise ContextLengthError(most, len(body.tokens), "tokens")
    check_ids(body.tokens, entry.vocab_size or tokenizer.n_tokens, "tokens")
    text = tokenizer.decode(body.tokens)
    return json_response({"content": text, "prompt": text})


def apply_template(services: Services, request: RawRequest) -> Response:
    """POST /apply-template: ``{"prompt": text}``, what a chat request gives the model."""
    body = parse(ChatRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    prompt = chat_prompt(services, request, entry, tokenizer, body.as_conversation())
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


ROUTES = (
    Route("POST", "/tokenize", tokenize),
    Route("POST", "/detokenize", detokenize),
    Route("POST", "/apply-template", apply_template),
)
