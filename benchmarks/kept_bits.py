"""What ``--prompt-cache-bits 8`` does to answers: a prefix is kept in 8 bits, and a prompt goes on from it.

    python -m benchmarks.kept_bits [--model DIR] [--prompts 50] [--tokens 32] [--turns 10] [--quick] [--json FILE]

Each prompt asks about another passage of this project's pages; all but its last tokens are the kept prefix.

- divergence: the Kullback-Leibler divergence of the next token's distribution from that with the cache as it was, in
  nats, behind the whole prompt; also after the cache was kept so many times, once at each turn of a conversation.
- agreement: greedy answers of so many tokens that are the same, and how many tokens are before the first difference.

Runs in this process, without a server.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from mlx_serve import blas

if __name__ == "__main__":
    # Before anything imports MLX.
    blas.preload_openblas()

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from benchmarks import children
from benchmarks.options import parse
from mlx_serve.commands.bench.progress import note
from mlx_serve.engine.cache.kinds import packed, unpacked
from mlx_serve.engine.generate.drafts import n_common
from mlx_serve.engine.generate.prefill import prefill

_BITS = 8
# The tokens that are processed from the kept prefix on.
_REST = 24
_PASSAGE_CHARACTERS = 1200
_QUESTIONS = ("Summarize this text in two sentences.", "What is the most important point?", "Who should read this?")
_PAGES = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one prompt: divergences in nats, the same leading tokens of two answers, the bytes kept of those in use."""

    n_prompt: int
    divergence: float
    divergence_after_turns: float
    n_same: int
    is_same: bool
    n_bytes: int
    n_kept_bytes: int


def passages(n: int) -> list[str]:
    """Different passages of the project's pages."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(_PAGES.glob("*.md")))
    step = len(text) // n
    return [text[i * step :][:_PASSAGE_CHARACTERS] for i in range(n)]


def effect(model: Any, ids: Sequence[int], n_tokens: int, n_turns: int, eos: set[int]) -> Effect:
    """Go on from a prefix as it was, and as it was kept."""
    cache = make_prompt_cache(model)
    prefill(model, cache, ids[:-_REST])
    small = packed(cache, _BITS)
    kept = again = unpacked(small)
    for _ in range(n_turns - 1):
        again = unpacked(packed(again, _BITS))
        mx.eval([layer.state for layer in again])
    rest = list(ids[-_REST:])
    right, changed, changed_often = (_logprobs(model, copy.deepcopy(one), rest) for one in (cache, kept, again))
    answers = [_answer(model, copy.deepcopy(one), rest, n_tokens, eos) for one in (cache, kept)]
    return Effect(
        len(ids),
        _divergence(right, changed),
        _divergence(right, changed_often),
        n_common(*answers),
        answers[0] == answers[1],
        sum(layer.nbytes for layer in unpacked(small)),
        sum(layer.nbytes for layer in small),
    )


def _logprobs(model: Any, cache: list[Any], tokens: list[int]) -> np.ndarray[Any, Any]:
    logits = model(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits)).astype(np.float64)


def _divergence(right: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float((np.exp(right) * (right - other)).sum())


def _answer(model: Any, cache: list[Any], tokens: list[int], n: int, eos: set[int]) -> list[int]:
    answer: list[int] = []
    while len(answer) < n and not (answer and answer[-1] in eos):
        row = _logprobs(model, cache, tokens)
        tokens = [int(row.argmax())]
        answer += tokens
    return answer


def table(effects: Sequence[Effect], n_turns: int) -> str:
    lines = ["| | mean | most |", "|---|--:|--:|"]
    for name, values in (
        ("divergence, nats", [e.divergence for e in effects]),
        (f"divergence after {n_turns} turns, nats", [e.divergence_after_turns for e in effects]),
    ):
        lines.append(f"| {name} | {mean(values):.2g} | {max(values):.2g} |")
    n_equal, differ = sum(e.is_same for e in effects), [e.n_same for e in effects if not e.is_same]
    first = f", the first other token after {mean(differ):.1f} on average" if differ else ""
    ratio = sum(e.n_kept_bytes for e in effects) / sum(e.n_bytes for e in effects)
    lengths = [e.n_prompt for e in effects]
    return "\n".join(
        [
            *lines,
            "",
            f"{n_equal} of {len(effects)} greedy answers are the same{first}.",
            f"Prompts of {min(lengths)} to {max(lengths)} tokens; kept in {ratio:.2f} of the bytes.",
        ]
    )


def measure(model_path: Path, n_prompts: int, n_tokens: int, n_turns: int) -> list[Effect]:
    """The effect on each prompt."""
    model, tokenizer = load(str(model_path))[:2]
    effects = []
    for i, passage in enumerate(passages(n_prompts)):
        messages = [{"role": "user", "content": f"{passage}\n\n{_QUESTIONS[i % len(_QUESTIONS)]}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        effects.append(effect(model, ids, n_tokens, n_turns, set(tokenizer.eos_token_ids)))
        note(f"{i + 1} of {n_prompts} prompts")
    return effects


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept_bits", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--prompts", type=int, default=50, help="(default: 50)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: 32)")
    parser.add_argument("--turns", type=int, default=10, help="how often a cache is kept (default: 10)")
    options = parse(parser, prompts=3, tokens=4)
    model = options.model.resolve() if options.model else children.demo_model()
    effects = measure(model, options.prompts, options.tokens, options.turns)
    print(table(effects, options.turns))
    if options.json:
        options.json.write_text(json.dumps([asdict(e) for e in effects], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
