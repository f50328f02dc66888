"""Errors in the format of each dialect, and the errors that several endpoints raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_serve.values import ApiError, Response


class ContextLengthError(ApiError):
    """A prompt that exceeds the context. ``prompt_tokens``: its length, or a lower bound of it.

    ``what``: the client's word for the prompt.
    """

    def __init__(self, context_tokens: int, prompt_tokens: int, param: str, what: str = "messages") -> None:
        # This is OpenAI's own sentence. Clients search for it or for the code, some (LangChain) within the message.
        super().__init__(
            400,
            f"This model's maximum context length is {context_tokens} tokens. However, your {what} resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the {what}. (context_length_exceeded)",
            param=param,
            code="context_length_exceeded",
        )
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens


def as_object(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object. It always has all four keys."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a route's clients expect errors, given the request's id."""

    name: str
    error_object: Callable[[ApiError, str], dict[str, Any]]


# The format for clients without one of their own.
OPENAI = Dialect("openai", lambda error, request_id: as_object(error))


def as_response(error: ApiError, dialect: Dialect, request_id: str) -> Response:
    """The reply to a request that is refused, or that fails before any part of its answer is sent."""
    return Response(error.status, json.dumps(dialect.error_object(error, request_id)).encode(), headers=error.headers)
