"""What a model can do, tried on a few tokens when it is loaded, because no list of architectures would be complete.

Whether its sequences can be run together, whether drafts can be checked and wrong ones taken back, whether its KV cache
can be quantized (--kv-bits). Each function gives the reason why not, in a line, or "". Worker thread, or the doctor's
process.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.backend import ALIKE
from mlx_serve.engine.cache.batch_cache import BatchCache
from mlx_serve.engine.cache.kinds import (
    Quantization,
    is_complete,
    is_fixed,
    is_quantized,
    kind_names,
    leaves,
    packed,
)
from mlx_serve.engine.cache.lone import LoneCache
from mlx_serve.engine.cache.rows import can_join
from mlx_serve.engine.errors import one_line
from mlx_serve.engine.generate.prefill import prefill
from mlx_serve.engine.generate.row import Row
from mlx_serve.engine.generate.rows import Rows

# A model that lacks the tried ability raises one of these, or MLX does during the computation.
_FAULTS = (*ALIKE, MemoryError, RuntimeError)
# A long prompt, and a short one that joins it. The short one is much shorter, also than the window of some layers.
_LONG = tuple(range(3, 51))
_SHORT = (7, 11)
_N_TOKENS = 3
# The tokens of the two passes with drafts that are tried, the first behind the last token of each prompt; any will do.
_DRAFTS, _MORE = _LONG[: _N_TOKENS - 1], _LONG[_N_TOKENS : 2 * _N_TOKENS]
# How many tokens each prompt keeps of the first of them.
_N_KEPT = (2, 1)
_FAILS = "it fails with several tokens per sequence"
# The allowed distance between log-probabilities of the same tokens, as a fraction of their spread. Rounding to 16 bits
# gives 0.01, and more where a token is near a tie between two experts. The long prompt starts alone, so it shows the
# rounding of this model. The short prompt differs by more only if it saw more than its tokens or had a wrong position.
_TOLERANCE = 0.1
_LEAST_TOLERANCE = 0.02
_TIMES_THE_LONG_ONE_S = 4


def refusal(
    model: Any,
    draft_model: Any,
    quantization: Quantization | None,
    *,
    computes: bool,
    prompt_cache_bits: int | None = None,
) -> str:
    """Why a model can't be served with a draft model or quantized KV caches, whichever of them is wanted.

    Without ``computes`` the steps are described and not run: no weight is read.
    """
    models = [("the model", model)] + ([("the draft model", draft_model)] if draft_model is not None else [])
    for which, one in models if draft_model is not None else []:
        if fault := _row_fault(make_prompt_cache(one)) or draft_fault(one):
            return f"--draft-model does not work: no drafts with {which}: {fault}"
    for which, one in models if quantization is not None else []:
        assert quantization is not None
        if fault := quantization_fault(one, quantization, computes=computes):
            return f"--kv-bits does not work: the KV cache of {which} cannot be quantized: {fault}"
    if prompt_cache_bits is not None and (
        fault := packing_fault([one for _, one in models], prompt_cache_bits, quantization)
    ):
        return f"--prompt-cache-bits does not work: {fault}"
    return ""


def packing_fault(models: Sequence[Any], bits: int, quantization: Quantization | None) -> str:
    """Why kept caches can't be quantized. Describes a step of each model and runs none."""
    if quantization is not None:
        return "--kv-bits quantizes the KV cache already"
    for model in models:
        cache = make_prompt_cache(model)
        try:
            model(_row(_SHORT), cache=cache)
            small = packed(cache, bits)
        except _FAULTS as error:
            return f"the KV cache cannot be quantized: {one_line(error)}"
        if not any(map(is_quantized, leaves(small))):
            return "the model has no layers of full attention"
    return ""


def batch_fault(model: Any, quantization: Quantization | None = None) -> str:
    """Why sequences of a model can't run together. Raises the model's error when it can't even run alone.

    With a ``quantization``, they are also tried with quantized caches.
    """
    if fault := _row_fault(make_prompt_cache(model)):
        return fault
    plain = _batch_fault(model, None)
    if plain or quantization is None:
        return plain
    fault = _batch_fault(model, replace(quantization, start=0))
    return f"with --kv-bits {fault}" if fault else ""


def _batch_fault(model: Any, quantization: Quantization | None) -> str:
    caches = [_prefilled(model, prompt, quantization) for prompt in (_LONG, _SHORT)]
    alone = copy.deepcopy(caches)
    try:
        together = _together(model, caches)
    except _FAULTS as error:
        return f"it fails in a batch: {one_line(error)}"
    off = _off(model, alone, together)
    return f"in a batch its log-probabilities are off by {off:.0%}" if off is not None else ""


def draft_fault(model: Any, *, alone: bool = False) -> str:
    """Why nothing can be drafted for a model's sequences. ``alone``: they can't run together. Describes passes only."""
    # A batch's rows have room for a pass beside a window. mlx-lm's own caches forget what a pass pushes out of it.
    forgets = (lambda layer: not is_complete(layer)) if alone else is_fixed
    if faulty := list(filter(forgets, leaves(make_prompt_cache(model)))):
        return f"its {kind_names(faulty)} cannot be cut back"
    # A sequence that runs alone has been expanded before, in the passes over its prompt.
    return "" if alone else _expansion(model)


def pass_fault(model: Any, quantization: Quantization | None = None, *, alone: bool = False) -> str:
    """Why drafts can't be checked: passes of several tokens per sequence fail, or differ from those of one.

    ``alone`` as in ``draft_fault``, ``quantization`` as in ``batch_fault``.
    """
    kinds = [None] if quantization is None else [None, replace(quantization, start=0)]
    return next(filter(None, (_pass_fault(model, kind, alone=alone) for kind in kinds)), "")


def _pass_fault(model: Any, quantization: Quantization | None, *, alone: bool) -> str:
    """How passes of several tokens per row fail, with both prompts as its rows, or each by itself."""
    prompts = (_LONG, _SHORT)
    caches = [_prefilled(model, prompt, quantization) for prompt in prompts]
    own = copy.deepcopy(caches)
    sequences = list(zip(prompts, caches, _N_KEPT, strict=True))
    try:
        passes = [[one] for one in sequences] if alone else [sequences]
        rows = [row for some in passes for row in _in_passes(model, some, alone=alone)]
    except _FAULTS as error:
        return f"{_FAILS}: {one_line(error)}"
    off = _off(model, own, rows)
    return f"with several tokens per sequence its log-probabilities are off by {off:.0%}" if off is not None else ""


def _in_passes(
    model: Any, sequences: Sequence[tuple[Sequence[int], list[Any], int]], *, alone: bool
) -> list[list[tuple[int, mx.array]]]:
    """What each sequence keeps of two passes with drafts: tokens, and the log-probabilities behind each of them.

    The first pass has wrong drafts. What they leave behind would be felt in the second one.
    ``sequences``: a prompt, a cache of all but its last token, and how many tokens of the first pass are right.
    """
    batch: BatchCache | LoneCache = LoneCache() if alone else BatchCache(sequences[0][1])
    rows: list[list[tuple[int, mx.array]]] = [[] for _ in sequences]
    with mx.stream(generation_stream):
        for prompt, cache, _ in sequences:
            batch.join(cache, len(prompt) - 1)
        first = [[prompt[-1], *_DRAFTS] for prompt, *_ in sequences], [n for *_, n in sequences]
        second = [list(_MORE) for _ in sequences], [len(_MORE) for _ in sequences]
        for tokens, n_kept in (first, second):
            batch.begin(_N_TOKENS)
            logits = model(mx.array(tokens), cache=batch.layers).astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(logprobs)
            batch.advance(n_kept)
            for row, fed, seen, n in zip(rows, tokens, logprobs, n_kept, strict=True):
                row.extend(zip(fed[:n], seen[:n], strict=True))
    return rows


def _expansion(model: Any) -> str:
    """Whether a pass of two tokens makes keys and values for each head, of all held tokens, from what the cache has.

    Multi-latent attention does, if a pass has more than one token: in a batch that is about all its caches again, which
    nothing accounts for.
    """
    try:
        one, two = (_attended(model, n) for n in (1, 2))
    except _FAULTS as error:
        return f"{_FAILS}: {one_line(error)}"
    return "a pass of several tokens expands the whole cache" if two > one else ""


def _attended(model: Any, n_tokens: int) -> int:
    """How many numbers MLX's attention gets for each held token, in all layers. Describes a pass and runs none.

    mlx-lm's models look the function up at each call, and no other thread calls it.
    """
    cache, widths = make_prompt_cache(model), []
    model(_row(_LONG), cache=cache)
    attention = mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, values: mx.array, *rest: Any, **options: Any) -> mx.array:
        widths.append(keys.shape[1] * (keys.shape[-1] + values.shape[-1]))
        return attention(queries, keys, values, *rest, **options)

    try:
        mx.fast.scaled_dot_product_attention = noted  # type: ignore[assignment]
        model(_row(_LONG[:n_tokens]), cache=cache)
    finally:
        mx.fast.scaled_dot_product_attention = attention
    return sum(widths)


def quantization_fault(model: Any, quantization: Quantization, *, computes: bool) -> str:
    """Why a model's KV cache can't be quantized. ``computes`` as in ``refusal``."""
    cache = make_prompt_cache(model)
    try:
        model(_row(_LONG), cache=cache)
        replace(quantization, start=0).apply(cache)
        logits = model(_row(_SHORT), cache=cache)
        if computes:
            mx.eval(logits)
    except _FAULTS as error:
        return f"mlx-lm fails with one: {one_line(error)}"
    plain = [layer for layer in leaves(cache) if not is_quantized(layer) and not is_fixed(layer)]
    if plain:
        return f"mlx-lm does not quantize its {kind_names(plain)}"
    return "" if any(map(is_quantized, leaves(cache))) else "it has none"


def _row_fault(cache: Sequence[Any]) -> str:
    faulty = [layer for layer in leaves(cache) if not can_join(layer)]
    return f"a batch cannot have its {kind_names(faulty)}" if faulty else ""


def _together(model: Any, caches: Sequence[list[Any]]) -> list[list[tuple[int, mx.array]]]:
    """The last tokens of both prompts and their answers, greedy, and the log-probabilities behind each token.

    The short prompt joins after a token of the long one's answer.
    """
    rows = Rows(model)
    logprobs: list[list[mx.array]] = [[], []]
    joining = [
        Row(list(prompt[:-1]), prompt[-1], partial(_noted, seen))
        for prompt, seen in zip((_LONG, _SHORT), logprobs, strict=True)
    ]
    tokens: dict[Row, list[int]] = {row: [] for row in joining}

    def step() -> None:
        for row, token in rows.step():
            tokens[row].append(token)

    long, short = joining
    rows.join(long, caches[0])
    while not tokens[long]:
        step()
    rows.join(short, caches[1])
    while len(tokens[short]) < _N_TOKENS:
        step()
    # The rows are a token ahead.
    fed = [[prompt[-1], *tokens[row][:-1]] for prompt, row in zip((_LONG, _SHORT), joining, strict=True)]
    return [list(zip(own, seen, strict=False)) for own, seen in zip(fed, logprobs, strict=True)]


def _noted(seen: list[mx.array], logprobs: mx.array) -> mx.array:
    """A greedy sampler for one row that keeps what it has seen."""
    seen.append(logprobs[0])
    return mx.argmax(logprobs, axis=-1)


def _off(model: Any, caches: Sequence[list[Any]], rows: Sequence[Sequence[tuple[int, mx.array]]]) -> float | None:
    """How far the log-probabilities of both prompts are from those of a token at a time; None: near enough.

    ``caches``: all but the last token of each prompt. ``rows``: the tokens from there on, and what was said behind each
    of them.
    """
    long, short = (median(_apart(model, cache, row)) for cache, row in zip(caches, rows, strict=True))
    is_near = long <= _TOLERANCE and short <= max(_LEAST_TOLERANCE, _TIMES_THE_LONG_ONE_S * long)
    return None if is_near else max(long, short)


def _apart(model: Any, cache: list[Any], row: Sequence[tuple[int, mx.array]]) -> list[float]:
    """The distance of what was said behind each token from what the model says of it without a batch."""
    return [_distance(_logprobs(model, cache, token), seen.astype(mx.float32)) for token, seen in row]


def _prefilled(model: Any, prompt: Sequence[int], quantization: Quantization | None = None) -> list[Any]:
    """A cache of all but the last token."""
    cache: list[Any] = make_prompt_cache(model)
    prefill(model, cache, prompt[:-1], quantization)
    return cache


def _logprobs(model: Any, cache: list[Any], token: int) -> mx.array:
    with mx.stream(generation_stream):
        logits = model(_row([token]), cache=cache)[0, -1].astype(mx.float32)
        row: mx.array = logits - mx.logsumexp(logits)
        return row


def _distance(own: mx.array, other: mx.array) -> float:
    with mx.stream(generation_stream):
        spread = mx.linalg.norm(own - own.mean())
        return float(mx.linalg.norm(own - other) / mx.maximum(spread, 1e-9))


def _row(tokens: Sequence[int]) -> mx.array:
    return mx.array(list(tokens))[None]
