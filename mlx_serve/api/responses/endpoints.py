"""The routes of the Responses dialect, and what each does."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import parse_qs

from mlx_serve.api.cost import n_content_chars
from mlx_serve.api.generation import OutputOptions
from mlx_serve.api.response_store import Turn, input_of
from mlx_serve.api.responses import history
from mlx_serve.api.responses.asked import Asked, keeper, read
from mlx_serve.api.responses.compaction import MAX_TOKENS, REQUEST, CompactionWriter
from mlx_serve.api.responses.render import ResponseWriter, Shape, new_response
from mlx_serve.api.responses.schema import ResponseRequest
from mlx_serve.api.responses.truncation import truncated
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import (
    Reply,
    Services,
    chat_gate,
    compiled_grammar,
    constrain,
    context_check,
    context_tokens,
    defaults_of,
    find_model,
    make_jobs,
    template_options,
)
from mlx_serve.api.shapes import json_response
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.text.prompt import chat_text
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import ApiError, Prompt, RawRequest, Response

_MAX_PAGE, _PAGE = 100, 20


def create(services: Services, request: RawRequest) -> Response:
    """POST /v1/responses"""
    asked = read(services.responses, request.body, services.max_json_values)
    body = asked.body
    entry, tokenizer = find_model(services, body.model, body.adapters, body.draft_model)
    must_call, free_input = body.must_call(), body.free_input()
    rule = free_input.rule() if free_input is not None else body.rule()
    grammar = compiled_grammar(services, entry, rule, must_call, request.alive)
    stored = body.store and services.responses.keeps
    response = new_response(body, asked.raw, entry.name, defaults_of(services, entry), stored=stored)
    prompt = _prompt(services, request, entry, tokenizer, body, _messages(asked))
    tools = () if free_input is not None else tuple(offer.definition() for offer in body.offers())
    options = OutputOptions(
        tuple(body.stop),
        tools,
        forced_call=bool(must_call),
        max_calls=body.max_calls,
        keeps_stop=body.include_stop_str_in_output,
    )
    jobs = make_jobs(services, request, entry, body, [prompt], body.wanted_tokens, param="input")
    if grammar is not None:
        constrain(jobs, grammar, chat_gate(tokenizer, prompt, options))
    keep = keeper(services.responses, asked) if stored else lambda _: None
    writer = ResponseWriter(response, Shape.of(body), keep)
    return Reply(services, request, entry, jobs, options, body.stream).respond(writer, tokenizer)


def input_tokens(services: Services, request: RawRequest) -> Response:
    """POST /v1/responses/input_tokens: what a request's prompt comes to."""
    asked = read(services.responses, request.body, services.max_json_values)
    entry, tokenizer = find_model(services, asked.body.model, asked.body.adapters, asked.body.draft_model)
    prompt = _prompt(services, request, entry, tokenizer, asked.body, _messages(asked))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


def compact(services: Services, request: RawRequest) -> Response:
    """POST /v1/responses/compact: the conversation as one item, without its oldest turns if they do not fit."""
    asked = read(services.responses, request.body, services.max_json_values)
    limit = asked.body.wanted_tokens or MAX_TOKENS
    body = asked.body.model_copy(update={"truncation": "auto", "max_output_tokens": limit})
    entry, tokenizer = find_model(services, body.model, body.adapters, body.draft_model)
    response = new_response(body, asked.raw, entry.name, defaults_of(services, entry), stored=False)
    prompt = _prompt(services, request, entry, tokenizer, body, [*_messages(asked), dict(REQUEST)])
    jobs = make_jobs(services, request, entry, body, [prompt], limit, param="input")
    writer = CompactionWriter(response, Shape({}), lambda _: None)
    return Reply(services, request, entry, jobs, OutputOptions(), is_stream=False).respond(writer, tokenizer)


def get(services: Services, request: RawRequest) -> Response:
    """GET /v1/responses/{id}"""
    if parse_qs(request.query).get("stream") == ["true"]:
        text = "A response that has ended cannot be streamed again: 'stream' true is not served here."
        raise ApiError(400, text, param="stream")
    return Response(200, _turn(services, request).response)


def delete(services: Services, request: RawRequest) -> Response:
    """DELETE /v1/responses/{id}"""
    response_id = _id(request)
    if not services.responses.delete(response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def cancel(services: Services, request: RawRequest) -> Response:
    """POST /v1/responses/{id}/cancel: for responses in the background, of which there are none."""
    _turn(services, request)
    raise ApiError(400, "Only a response that runs in the background can be cancelled: close the connection instead.")


def input_items(services: Services, request: RawRequest) -> Response:
    """GET /v1/responses/{id}/input_items: a page of them, the newest first unless ``order`` is asc."""
    items = input_of(_turn(services, request))
    query = {key: values[-1] for key, values in parse_qs(request.query).items()}
    if query.get("order", "desc") not in ("asc", "desc"):
        raise ApiError(400, "Invalid value for 'order': Must be 'asc' or 'desc'.", param="order")
    if query.get("order") != "asc":
        items.reverse()
    if "after" in query:
        places = [i for i, item in enumerate(items) if item["id"] == query["after"]]
        if not places:
            raise ApiError(400, "Invalid value for 'after': there is no such item.", param="after")
        # The last of them: a client may give several items one id, and would come back to the first for ever.
        items = items[places[-1] + 1 :]
    limit = _limit(query.get("limit"))
    page = items[:limit]
    ids = [item["id"] for item in page] or [""]
    places_of = {"first_id": ids[0], "last_id": ids[-1], "has_more": len(items) > limit}
    return json_response({"object": "list", "data": page, **places_of})


def _messages(asked: Asked) -> list[dict[str, Any]]:
    return history.as_messages(asked.items, asked.body.instructions)


def _prompt(
    services: Services,
    request: RawRequest,
    entry: ModelEntry,
    tokenizer: Tokenizer,
    body: ResponseRequest,
    messages: list[dict[str, Any]],
) -> Prompt:
    """The prompt; with ``truncation`` auto without the oldest turns, if it does not fit. Raises ApiError 400."""
    most = context_tokens(services, entry)
    check = context_check(services, request, entry, "input")
    tools = [offer.definition() for offer in body.offers()]
    options = template_options(services, entry, body.template_options)
    render = partial(chat_text, tokenizer, tools=tools, options=options, check=check)
    if body.truncation == "disabled" or most is None:
        check(n_content_chars(messages) // tokenizer.max_token_chars)
        return render(messages).prompt(check)
    # Half of the context for what is said now, and what is already known, when the answer may be longer than that.
    most -= min(body.wanted_tokens or 1, most // 2)
    return truncated(messages, render, tokenizer, check, most)


def _id(request: RawRequest) -> str:
    return request.path.removeprefix("/responses/").partition("/")[0]


def _turn(services: Services, request: RawRequest) -> Turn:
    response_id = _id(request)
    found = services.responses.turn(response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id[:80]}' not found.", param="response_id")


def _limit(text: str | None) -> int:
    if text is None:
        return _PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= _MAX_PAGE):
        raise ApiError(400, f"Invalid value for 'limit': Must be an integer between 1 and {_MAX_PAGE}.", param="limit")
    return int(text)


ROUTES = (
    Route("POST", "/responses", create),
    Route("POST", "/responses/input_tokens", input_tokens),
    Route("POST", "/responses/compact", compact),
    Route("GET", "/responses/{id}", get),
    Route("DELETE", "/responses/{id}", delete),
    Route("GET", "/responses/{id}/input_items", input_items),
    Route("POST", "/responses/{id}/cancel", cancel, takes_body=False),
)
