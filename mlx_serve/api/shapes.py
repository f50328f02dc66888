"""What every dialect writes its answers with: JSON, ids, usage, log-probabilities, texts cut to the length of a line.

Knows no dialect's objects, no engine and no sockets.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_serve.values import Response, Text, TokenLogprob, Usage

# one-api silently ends its reply at a line over 64 KiB. A character takes up to 6 bytes as JSON.
MAX_DELTA_CHARS = 8192
# OpenAI's value for a probability of 0, because JSON has no -Infinity.
LOGPROB_OF_ZERO = -9999.0


def dumps(value: Any) -> str:
    """JSON on one line, and never NaN or Infinity, which are not JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_response(value: Any, status: int = 200) -> Response:
    """A reply whose body is JSON."""
    return Response(status, dumps(value).encode())


def new_call_id() -> str:
    """The id of a tool call, as OpenAI's have it."""
    return f"call_{secrets.token_hex(12)}"


def total_usage(usages: Mapping[int, Usage], n_per_prompt: int) -> Usage:
    """Tokens of all choices, by their index; those that share a prompt count it once."""
    firsts = [usage for index, usage in usages.items() if index % n_per_prompt == 0]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages.values()),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages.values()),
        accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in usages.values()),
        rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in usages.values()),
    )


def split_text(delta: Text) -> Iterator[Text]:
    """Pieces short enough for one line of a stream; log-probabilities go with the first."""
    yield replace(delta, text=delta.text[:MAX_DELTA_CHARS])
    for i in range(MAX_DELTA_CHARS, len(delta.text), MAX_DELTA_CHARS):
        yield replace(delta, text=delta.text[i : i + MAX_DELTA_CHARS], logprobs=())


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """A choice's ``logprobs``, of the tokens that are seen."""
    content = [_token_object(e) | {"top_logprobs": [_token_object(t) for t in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def json_logprob(logprob: float | None) -> float | None:
    """A log-probability that JSON can say."""
    if logprob is None:
        return None
    # Written so that NaN, which compares as false, takes this way out too.
    return logprob if logprob > LOGPROB_OF_ZERO else LOGPROB_OF_ZERO


def _token_object(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": json_logprob(entry.logprob), "bytes": list(entry.raw)}
