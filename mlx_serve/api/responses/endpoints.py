"""The routes of the Responses dialect, and what each does."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from mlx_serve.api.generation_request import GenerationRequest
from mlx_serve.api.pipeline import Prepared, count_tokens, generate, prepare
from mlx_serve.api.response_store import StoredTurn, input_of
from mlx_serve.api.responses import history
from mlx_serve.api.responses.compaction import MAX_TOKENS, REQUEST, CompactionWriter
from mlx_serve.api.responses.render import AnswerForm, ResponseWriter, new_response
from mlx_serve.api.responses.resolved_request import ResolvedRequest, keeper, read
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import Services
from mlx_serve.api.shapes import json_response
from mlx_serve.values import ApiError, RawRequest, Response

_MAX_PAGE, _PAGE = 100, 20


def create(services: Services, request: RawRequest) -> Response:
    """POST /v1/responses"""
    asked = _asked(services, request)
    body = asked.body
    stored = body.store and services.responses.keeps
    keep = keeper(services.responses, asked) if stored else lambda _: None

    def writer(prepared: Prepared) -> ResponseWriter:
        response = new_response(body, asked.raw, prepared.entry.name, prepared.defaults, stored=stored)
        return ResponseWriter(response, AnswerForm.of(body), keep)

    return generate(prepare(services, request, body.generation_request(_messages(asked))), writer)


def input_tokens(services: Services, request: RawRequest) -> Response:
    """POST /v1/responses/input_tokens: what a request's prompt comes to."""
    asked = _asked(services, request)
    body = asked.body
    conversation = body.as_conversation(_messages(asked))
    n_tokens = count_tokens(services, request, body.model, conversation, body.adapters, body.draft_model)
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


def compact(services: Services, request: RawRequest) -> Response:
    """POST /v1/responses/compact: the conversation as one item, without its oldest turns if they do not fit."""
    asked = _asked(services, request)
    limit = asked.body.wanted_tokens or MAX_TOKENS
    body = asked.body.model_copy(update={"truncation": "auto", "max_output_tokens": limit})
    # The request's settings for answers do not apply: the answer is a summary of the conversation.
    plain = GenerationRequest(
        body.model,
        body.as_conversation([*_messages(asked), dict(REQUEST)]),
        body.given_sampling,
        limit,
        top_logprobs=body.needed_logprobs,
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapters=body.adapters,
        draft_model=body.draft_model,
    )

    def writer(prepared: Prepared) -> CompactionWriter:
        response = new_response(body, asked.raw, prepared.entry.name, prepared.defaults, stored=False)
        return CompactionWriter(response, AnswerForm({}), lambda _: None)

    return generate(prepare(services, request, plain), writer)


def get(services: Services, request: RawRequest) -> Response:
    """GET /v1/responses/{id}"""
    if parse_qs(request.query).get("stream") == ["true"]:
        text = "A response that has ended cannot be streamed again: 'stream' true is not served here."
        raise ApiError(400, text, param="stream")
    return Response(200, _turn(services, request).response)


def delete(services: Services, request: RawRequest) -> Response:
    """DELETE /v1/responses/{id}"""
    response_id = _id(request)
    if not services.responses.delete(response_id, services.owner(request)):
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
        # Several items may have one id from the client. Starting after the first of them would repeat a page for ever.
        items = items[places[-1] + 1 :]
    limit = _limit(query.get("limit"))
    page = items[:limit]
    ids = [item["id"] for item in page] or [""]
    places_of = {"first_id": ids[0], "last_id": ids[-1], "has_more": len(items) > limit}
    return json_response({"object": "list", "data": page, **places_of})


def _asked(services: Services, request: RawRequest) -> ResolvedRequest:
    return read(services.responses, request.body, services.max_json_values, services.owner(request))


def _messages(asked: ResolvedRequest) -> list[dict[str, Any]]:
    return history.as_messages(asked.items, asked.body.instructions)


def _id(request: RawRequest) -> str:
    return request.path.removeprefix("/responses/").partition("/")[0]


def _turn(services: Services, request: RawRequest) -> StoredTurn:
    response_id = _id(request)
    found = services.responses.turn(response_id, services.owner(request))
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
