"""Errors in the words of the route's clients, and the ones that several endpoints raise."""

from __future__ import annotations

import json
from typing import Any

from mlx_serve.api.routes import route_path
from mlx_serve.values import ApiError, Response

# Anthropic's words for a status (https://platform.claude.com/docs/en/api/errors); others are 4xx or 5xx of ours.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class ContextLengthError(ApiError):
    """A prompt that does not fit. ``prompt_tokens`` is what it has, or the least that it can have.

    ``what``: the client's word for it.
    """

    def __init__(self, context_tokens: int, prompt_tokens: int, param: str, what: str = "messages") -> None:
        # OpenAI's own sentence: clients look for it, and for the code, some of them (LangChain) in the message.
        super().__init__(
            400,
            f"This model's maximum context length is {context_tokens} tokens. However, your {what} resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the {what}. (context_length_exceeded)",
            param=param,
            code="context_length_exceeded",
        )
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens


def is_anthropic(path: str) -> bool:
    """Whether a route speaks Anthropic's dialect."""
    plain = route_path(path)
    return plain == "/messages" or plain.startswith("/messages/")


def as_object(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object: all four keys are always there."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


def as_anthropic_object(error: ApiError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if isinstance(error, ContextLengthError):
        # Claude Code compacts its conversation when it reads this.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} maximum"
    fields = {"type": _ANTHROPIC_TYPES.get(error.status, other), "message": message}
    return {"type": "error", "error": fields, "request_id": request_id}


def as_response(error: ApiError, path: str, request_id: str) -> Response:
    """The reply to a request that is refused or failed before anything of its answer was sent."""
    value = as_anthropic_object(error, request_id) if is_anthropic(path) else as_object(error)
    return Response(error.status, json.dumps(value).encode(), headers=error.headers)
