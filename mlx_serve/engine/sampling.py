"""From a Sampling to mlx-lm's samplers and logits processors. To add a sampling parameter, add a line here.

Jobs with equal settings share one sampler object, for mlx-lm samples a batch in one call when its rows share one.
A seeded job has a sampler of its own, with its own random key: its draws do not depend on who else is in the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import (
    LogitsProcessor,
    Sampler,
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    greedy_sampler,
    make_logits_processors,
)

from mlx_serve.core import Sampling

# Below this, logits divided by the temperature overflow float32; the result is the likeliest token anyway.
_GREEDY_BELOW = 1e-4
# Two probabilities cannot both be above a half, so XTC never drops a token beyond this threshold.
_XTC_MAX_THRESHOLD = 0.5


def make_sampler(sampling: Sampling, *, vocab_size: int, kept_by_xtc: tuple[int, ...]) -> Sampler:
    """A function from log-probabilities, shape (batch, vocab), to token ids, shape (batch,)."""
    if sampling.temperature < _GREEDY_BELOW or sampling.top_p <= 0:
        return greedy_sampler
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    xtc = sampling.xtc_probability if sampling.xtc_threshold <= _XTC_MAX_THRESHOLD else 0.0
    settings = (sampling.temperature, sampling.top_p, top_k, sampling.min_p, xtc, sampling.xtc_threshold, kept_by_xtc)
    if sampling.seed is not None:
        return _Seeded(sampling.seed, *settings)
    return _shared(*settings)


def make_processors(sampling: Sampling) -> list[LogitsProcessor]:
    """mlx-lm's processors: logit bias and penalties, each only when it does something."""
    repetition = sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else 0.0
    processors: list[LogitsProcessor] = make_logits_processors(
        dict(sampling.logit_bias) or None,
        repetition,
        sampling.repetition_context_size,
        sampling.presence_penalty,
        sampling.presence_context_size,
        sampling.frequency_penalty,
        sampling.frequency_context_size,
    )
    return processors


class _Draw:
    """Filter, then draw. ``_keys`` gives the keys for the XTC coin and the draw; None: mlx's global random state."""

    def __init__(
        self,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        xtc_probability: float,
        xtc_threshold: float,
        kept_by_xtc: tuple[int, ...],
    ) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._min_p = min_p
        self._xtc_probability = xtc_probability
        self._xtc_threshold = xtc_threshold
        self._kept_by_xtc = list(kept_by_xtc)

    def __call__(self, logprobs: mx.array) -> mx.array:
        coin_key, draw_key = self._keys()
        # The order is mlx_lm.sample_utils.make_sampler's.
        if self._top_p < 1:
            logprobs = apply_top_p(logprobs, self._top_p)
        if self._min_p > 0:
            logprobs = apply_min_p(logprobs, self._min_p)
        if self._xtc_probability > 0:
            logprobs = self._apply_xtc(logprobs, coin_key)
        if self._top_k > 0:
            logprobs = apply_top_k(logprobs, self._top_k)
        return mx.random.categorical(logprobs * (1 / self._temperature), key=draw_key)

    def _keys(self) -> tuple[Any, Any]:
        return None, None

    def _apply_xtc(self, logprobs: mx.array, key: Any) -> mx.array:
        # mlx-lm tosses its coin from the global random state and once for the whole batch; ours is one for each row.
        always = apply_xtc(logprobs, 1.0, self._xtc_threshold, self._kept_by_xtc)
        coin = mx.random.uniform(shape=(logprobs.shape[0], 1), key=key)
        return mx.where(coin < self._xtc_probability, always, logprobs)


class _Seeded(_Draw):
    def __init__(self, seed: int, *settings: Any) -> None:
        super().__init__(*settings)
        self._key = mx.random.key(seed % 2**64)

    def _keys(self) -> tuple[Any, Any]:
        self._key, coin_key, draw_key = mx.random.split(self._key, 3)
        return coin_key, draw_key


@lru_cache(maxsize=256)
def _shared(*settings: Any) -> Sampler:
    return _Draw(*settings)
