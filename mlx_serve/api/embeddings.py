"""POST /v1/embeddings: texts as vectors (https://platform.openai.com/docs/api-reference/embeddings).

One job for the whole request, so that it takes one place in the queue however many inputs it has.
"""

from __future__ import annotations

import base64
import logging
import math
import struct
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from mlx_serve.api.body import parse
from mlx_serve.api.cost import length_check
from mlx_serve.api.fields import Inputs, Model, Str
from mlx_serve.api.routes import Route
from mlx_serve.api.running_jobs import ALIVE_EVERY_S, RunningJobs
from mlx_serve.api.serving import Services, context_tokens, find_model
from mlx_serve.api.shapes import dumps
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.metrics import Trace
from mlx_serve.text.prompt import text_prompt
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import (
    ApiError,
    Check,
    Embedded,
    Job,
    Prompt,
    RawRequest,
    Response,
    Sampling,
    internal_error,
)
from mlx_serve.values import Inputs as JobInputs

log = logging.getLogger(__name__)

Encoding: TypeAlias = Literal["float", "base64"]

# OpenAI's limit for all inputs of a request together.
MAX_TOTAL_TOKENS = 300_000


class EmbeddingRequest(Model):
    """POST /v1/embeddings. ``user`` is ignored, like all unknown fields."""

    model: Str | None = None
    input: Inputs
    encoding_format: Encoding = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    # vLLM's, as in chat.
    priority: int = 0


def embeddings(services: Services, request: RawRequest) -> Response:
    """POST /v1/embeddings: a vector of length 1 for each input, in their order."""
    body = parse(EmbeddingRequest, request.body)
    entry, tokenizer = find_model(services, body.model)
    tokens = _tokens(services, request, entry, tokenizer, body.input)
    n_tokens = sum(map(len, tokens))
    request.notes.update(model=entry.name, prompt_tokens=n_tokens)
    job = Job(
        entry.name,
        Prompt(max(tokens, key=len)),
        Sampling(max_tokens=0),
        0,
        SimpleQueue(),
        body.priority,
        JobInputs(tokens, body.dimensions),
    )
    vectors = list(_vectors(services, request, job))
    return Response(200, _written(vectors, body.encoding_format, entry.name, n_tokens, request.request_id))


def _tokens(
    services: Services,
    request: RawRequest,
    entry: ModelEntry,
    tokenizer: Tokenizer,
    inputs: Sequence[str | list[int]],
) -> tuple[tuple[int, ...], ...]:
    """Each input's token ids. Raises ApiError 400 that says which input is too long or has ids of no token."""
    most, n_total = context_tokens(services, entry), 0
    found: list[tuple[int, ...]] = []
    for i, one in enumerate(inputs):
        param = f"input[{i}]" if len(inputs) > 1 else "input"
        check = _input_check(request, most, n_total, param)
        if isinstance(one, str):
            tokens = text_prompt(tokenizer, one, check).tokens
        else:
            check(len(one))
            tokens = tuple(one)
        n_total += len(tokens)
        if not tokens:
            raise ApiError(400, f"Invalid value for '{param}': The tokenizer makes no token of it.", param=param)
        check_ids(tokens, entry.vocab_size or tokenizer.n_tokens, param)
        found.append(tokens)
    return tuple(found)


def _input_check(request: RawRequest, most: int | None, n_before: int, param: str) -> Check:
    """The check for an input that follows others of ``n_before`` tokens."""
    check_one = length_check(request, most, param, param)

    def check(n_tokens: int) -> None:
        check_one(n_tokens)
        if n_before + n_tokens > MAX_TOTAL_TOKENS:
            text = f"Invalid value for 'input': At most {MAX_TOTAL_TOKENS} tokens in all inputs together."
            raise ApiError(400, text, param="input")

    return check


def _vectors(services: Services, request: RawRequest, job: Job) -> Iterator[bytes]:
    """The vectors, as the engine finishes them. Raises ApiError, and ClientGone when the client has left."""
    trace = Trace(services.metrics, job.model, request.path, request.request_id, request.received_at)
    jobs = RunningJobs(services.scheduler, [job], request.alive, trace)
    jobs.submit(ALIVE_EVERY_S)
    with jobs:
        while jobs:
            event = jobs.next(ALIVE_EVERY_S)
            if isinstance(event, Embedded):
                yield event.vector
                if event.is_last:
                    jobs.end(event, "stop")


def _written(vectors: Sequence[bytes], encoding: Encoding, model: str, n_tokens: int, request_id: str) -> bytes:
    """OpenAI's object. It may have millions of numbers, so each vector is written separately."""
    items = b",".join(_item(i, vector, encoding, request_id) for i, vector in enumerate(vectors))
    end = {"model": model, "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}}
    return b'{"object":"list","data":[' + items + b"]," + dumps(end)[1:].encode()


def _item(index: int, vector: bytes, encoding: Encoding, request_id: str) -> bytes:
    numbers = struct.unpack(f"<{len(vector) // 4}f", vector)
    if not math.isfinite(sum(numbers)):
        # JSON has no NaN, and no client can do anything with one.
        log.error("the model's vector of an input has numbers that are none (NaN or infinite)")
        raise internal_error(request_id)
    # Nine digits are all that four bytes hold.
    text = base64.b64encode(vector).decode() if encoding == "base64" else ",".join(f"{n:.9g}" for n in numbers)
    shown = f'"{text}"' if encoding == "base64" else f"[{text}]"
    return f'{{"object":"embedding","index":{index},"embedding":{shown}}}'.encode()


ROUTES = (Route("POST", "/embeddings", embeddings),)
