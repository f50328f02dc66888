"""Errors in the words of Anthropic's clients (https://platform.claude.com/docs/en/api/errors)."""

from __future__ import annotations

from typing import Any

from mlx_serve.api.errors import ContextLengthError, Dialect
from mlx_serve.values import ApiError

# Anthropic's error type for each status. Other statuses use the general type of 4xx or 5xx.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def as_anthropic_object(error: ApiError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if isinstance(error, ContextLengthError):
        # Claude Code compacts its conversation when it finds this text.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} maximum"
    fields = {"type": _TYPES.get(error.status, other), "message": message}
    return {"type": "error", "error": fields, "request_id": request_id}


ANTHROPIC = Dialect("anthropic", as_anthropic_object)
