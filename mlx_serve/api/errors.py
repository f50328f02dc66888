"""Errors in OpenAI's shape, and the ones that several endpoints raise."""

from __future__ import annotations

import json
from typing import Any

from mlx_serve.core import ApiError, Response


def as_object(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object: all four keys are always there."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


def as_response(error: ApiError) -> Response:
    """The reply to a request that is refused or failed before anything of its answer was sent."""
    return Response(error.status, json.dumps(as_object(error)).encode(), headers=error.headers)


def context_length(context_tokens: int, prompt_tokens: int, param: str) -> ApiError:
    """OpenAI's own sentence: clients look for it, and for the code, some of them (LangChain) in the message."""
    return ApiError(
        400,
        f"This model's maximum context length is {context_tokens} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages. (context_length_exceeded)",
        param=param,
        code="context_length_exceeded",
    )
