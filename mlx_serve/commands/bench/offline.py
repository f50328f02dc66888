"""The child process that measures mlx-lm without a server: runs batch_generate over a list of prompts, greedily.

    python -m mlx_serve.commands.bench.offline MODEL_DIRECTORY_OR_demo

Reads tasks as JSON lines from stdin and writes one JSON line for each, until stdin ends. Loading, the chat template and
tokenizing are not timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from mlx_serve import blas
from mlx_serve.demo.model import ensure_demo_model

# The warm-up's tokens of each prompt and of each answer: enough for MLX to compile every kernel.
_WARM_UP_INPUT, _WARM_UP_OUTPUT = 8, 2


def main() -> None:
    """Answers tasks until stdin ends."""
    # stdout carries only replies. Anything that libraries print goes to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        blas.preload_openblas()
        from mlx_lm import load

        path = ensure_demo_model() if sys.argv[1] == "demo" else sys.argv[1]
        model, tokenizer = load(str(path))[:2]
        for line in sys.stdin:
            task = json.loads(line)
            answer = texts if task["kind"] == "texts" else run
            print(json.dumps(answer(model, tokenizer, task)), file=replies, flush=True)


def texts(model: Any, tokenizer: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The greedy continuation of each prompt, generated alone: the fields of ``ceiling.Continuation`` for each."""
    return [
        continuation(model, tokenizer, prompt, limit)
        for prompt, limit in zip(task["prompts"], task["max_tokens"], strict=True)
    ]


def continuation(model: Any, tokenizer: Any, prompt: str, limit: int) -> dict[str, Any]:
    """The greedy continuation of one prompt. Its text has no control tokens, because servers send none."""
    import mlx.core as mx
    from mlx_lm import stream_generate

    ids: list[int] = []
    starts, margins = [], []
    for response in stream_generate(model, tokenizer, prompt, max_tokens=limit):
        second, first = mx.sort(mx.topk(response.logprobs, 2)).astype(mx.float32)
        starts.append(len(tokenizer.decode(ids, skip_special_tokens=True)))
        margins.append((first - second).item())
        ids.append(response.token)
    return {"text": tokenizer.decode(ids, skip_special_tokens=True), "starts": starts, "margins": margins}


def run(model: Any, tokenizer: Any, task: dict[str, Any]) -> dict[str, float]:
    """Runs one task. Returns the fields of ``ceiling.Offline``."""
    prompts = [token_ids(tokenizer, prompt, task["template_options"]) for prompt in task["prompts"]]
    limits = task["max_tokens"]
    limits = limits if isinstance(limits, list) else [limits] * len(prompts)
    ends = tokenizer.eos_token_ids
    try:
        if task["ignore_eos"]:
            tokenizer.eos_token_ids = []
        if task["warm_up"]:  # kernels are compiled for each batch size
            first = [prompt[:_WARM_UP_INPUT] for prompt in prompts[: task["batch_size"]]]
            generate(model, tokenizer, first, [_WARM_UP_OUTPUT] * len(first), task["batch_size"])
        start = time.perf_counter()
        counts = generate(model, tokenizer, prompts, limits, task["batch_size"])
        seconds = time.perf_counter() - start
    finally:
        tokenizer.eos_token_ids = ends
    return {
        "seconds": seconds,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(counts),
        "n_short": sum(n < limit for n, limit in zip(counts, limits, strict=True)),
    }


def token_ids(tokenizer: Any, prompt: str | list[dict[str, Any]], template_options: dict[str, Any]) -> list[int]:
    """Tokenizes a prompt as the server does."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **template_options))


def generate(model: Any, tokenizer: Any, prompts: list[list[int]], limits: Sequence[int], batch_size: int) -> list[int]:
    """Returns the number of generated tokens for each prompt."""
    from mlx_lm.generate import batch_generate

    response = batch_generate(
        model,
        tokenizer,
        prompts,
        max_tokens=list(limits),
        return_token_ids=True,
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
    )
    return [len(ids) for ids in response.token_ids]


if __name__ == "__main__":
    main()
