"""GET /v1/models: what can be served, in one shape for OpenAI's and Anthropic's clients.

Each reads the fields it knows (https://platform.openai.com/docs/api-reference/models,
https://platform.claude.com/docs/en/api/models-list).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, unquote

from mlx_serve.api.body import parse
from mlx_serve.api.fields import Model, Str
from mlx_serve.api.routes import Route
from mlx_serve.api.serving import Services, context_tokens
from mlx_serve.api.shapes import json_response
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.values import ApiError, RawRequest, Response

# Anthropic's.
MAX_LIMIT = 1000
# What Anthropic's schema requires of a model besides, with null where there is nothing to say.
_NOT_KNOWN = ("capabilities", "deprecated_at", "line", "retires_at")


def list_models(services: Services, request: RawRequest) -> Response:
    """GET /v1/models, all of them, or a page: ``limit``, ``after_id``, ``before_id`` in the query. Raises ApiError."""
    loaded = services.scheduler.health().models
    found = [_model_object(services, name, entry, loaded) for name, entry in services.catalog.listing()]
    query = parse_qs(request.query)
    page, has_more = _page(found, query)
    ids = [model["id"] for model in page] or [None]
    places = {"has_more": has_more, "first_id": ids[0], "last_id": ids[-1]}
    return json_response({"object": "list", "data": page, **places})


def get_model(services: Services, request: RawRequest) -> Response:
    """GET /v1/models/{id}"""
    # The path is still escaped, and a slash in a name may be escaped.
    name = unquote(request.path.removeprefix("/models/"))
    return json_response(_model_object(services, *services.catalog.look_up(name), services.scheduler.health().models))


class UnloadRequest(Model):
    """POST /models/unload, as in llama-server's router."""

    model: Str


def unload_model(services: Services, request: RawRequest) -> Response:
    """POST /models/unload: unload a model that nobody uses; the next request for it loads it again. Raises ApiError."""
    entry = services.catalog.find(parse(UnloadRequest, request.body).model)
    return json_response({"model": entry.name, "unloaded": services.scheduler.unload(entry.name)})


def _page(found: Sequence[dict[str, Any]], query: dict[str, list[str]]) -> tuple[Sequence[dict[str, Any]], bool]:
    """A page of the list, and whether there are more entries in the requested direction."""
    limit = _limit(query)
    if "before_id" in query:
        before = found[: _place(found, query, "before_id")]
        page = before[-limit:] if limit else before
        return page, len(page) < len(before)
    after = found[_place(found, query, "after_id") + 1 :] if "after_id" in query else found
    page = after[:limit] if limit else after
    return page, len(page) < len(after)


def _limit(query: dict[str, list[str]]) -> int | None:
    """The page size. None: the whole list, for OpenAI's clients, which do not ask for pages."""
    if "limit" not in query:
        return None
    text = query["limit"][0]
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise ApiError(400, f"Invalid value for 'limit': Must be an integer between 1 and {MAX_LIMIT}.", param="limit")
    return int(text)


def _place(found: Sequence[dict[str, Any]], query: dict[str, list[str]], param: str) -> int:
    name = query[param][0]
    places = [i for i, model in enumerate(found) if model["id"] == name]
    if not places:
        raise ApiError(400, f"Invalid value for '{param}': there is no such model.", param=param)
    return places[0]


def _model_object(services: Services, name: str, entry: ModelEntry, loaded: Collection[str]) -> dict[str, Any]:
    most = context_tokens(services, entry)
    # The root of an alias is its model; the root of an adapter is its base model.
    root = entry.name if name != entry.name else entry.base or entry.name
    openai = {"id": name, "object": "model", "created": entry.created, "owned_by": "mlx-serve"}
    ours = {"root": root, "loaded": entry.name in loaded}
    created = datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    anthropic: dict[str, Any] = {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
    anthropic |= dict.fromkeys(_NOT_KNOWN) | {"max_input_tokens": most, "max_tokens": most}
    # vLLM's name for it.
    length = {"max_model_len": most} if most is not None else {}
    return openai | ours | anthropic | length


ROUTES = (
    Route("GET", "/models", list_models),
    Route("GET", "/models/", get_model),
    Route("POST", "/models/unload", unload_model),
)
