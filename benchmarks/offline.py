"""The child that shows what mlx-lm does without a server: batch_generate over a list of prompts, greedily.

Reads tasks as JSON lines on stdin and writes a JSON line for each. Runs until stdin ends. Loading the model, the chat
template and tokenizing are not timed: what is left is the most that a server could reach.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from mlx_lm import load
from mlx_lm.generate import batch_generate


def main() -> None:
    model, tokenizer = load(sys.argv[1])[:2]
    for line in sys.stdin:
        print(json.dumps(run(model, tokenizer, json.loads(line))), flush=True)


def run(model: Any, tokenizer: Any, task: dict[str, Any]) -> dict[str, Any]:
    prompts = [tokenizer.apply_chat_template(messages, add_generation_prompt=True) for messages in task["prompts"]]
    start = time.perf_counter()
    response = batch_generate(
        model,
        tokenizer,
        prompts,
        max_tokens=task["max_tokens"],
        return_token_ids=True,
        completion_batch_size=task["batch_size"],
        prefill_batch_size=task["batch_size"],
    )
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "prompt_tokens": sum(len(prompt) for prompt in prompts),
        "output_tokens": sum(len(ids) for ids in response.token_ids),
        "n_short": sum(len(ids) < task["max_tokens"] for ids in response.token_ids),
    }
