"""From a Sampling to mlx-lm's samplers and logits processors. To add a sampling parameter, add a line here.

Jobs with equal settings share one sampler object, because rows with the same sampler are sampled in one call.
A seeded job has a sampler of its own. Its draws depend on the seed and on the position in the output alone: not on who
else is in the batch, on drafts, or on a pause.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import (
    LogitsProcessor,
    Sampler,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
)

from mlx_serve.engine.generate.constraints import Constraint
from mlx_serve.engine.generate.reasoning import ReasoningWatch
from mlx_serve.values import Sampling

# Below this, logits divided by the temperature overflow float32; the result is the likeliest token anyway.
_GREEDY_BELOW = 1e-4
# Below this, the nucleus is the likeliest token; where it is 0 in float32, mlx-lm's filter reads past the vocabulary.
_GREEDY_TOP_P = 1e-7
# Two probabilities cannot both be above a half, so XTC never drops a token beyond this threshold.
_XTC_MAX_THRESHOLD = 0.5


def make_sampler(sampling: Sampling, *, vocab_size: int, kept_by_xtc: tuple[int, ...]) -> Sampler:
    """A function from log-probabilities, shape (batch, vocab), to token ids, shape (batch,)."""
    if sampling.temperature < _GREEDY_BELOW or sampling.top_p < _GREEDY_TOP_P:
        return greedy_sampler
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    xtc = sampling.xtc_probability if sampling.xtc_threshold <= _XTC_MAX_THRESHOLD else 0.0
    settings = (sampling.temperature, sampling.top_p, top_k, sampling.min_p, xtc, sampling.xtc_threshold, kept_by_xtc)
    if sampling.seed is not None:
        return Seeded(sampling.seed, *settings)
    return _shared(*settings)


def make_processors(sampling: Sampling, constraint: Constraint | None = None) -> list[LogitsProcessor]:
    """A job's logits processors, in order: the logits are biased, then masked, and the reasoning is closed."""
    repetition = sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else 0.0
    processors: list[LogitsProcessor] = make_logits_processors(
        dict(sampling.logit_bias) or None, repetition, sampling.repetition_context_size
    )
    if sampling.presence_penalty or sampling.frequency_penalty:
        processors.append(_OutputPenalties(sampling))
    if sampling.allowed_token_ids is not None:
        processors.append(_Allowed(sampling.allowed_token_ids))
    if constraint is not None:
        processors.append(_Masked(constraint))
    if sampling.reasoning_budget is not None:
        processors.append(_Budgeted(ReasoningWatch(sampling.reasoning_budget)))
    return processors


class _Output:
    """The output part of the token context that a processor gets: the tokens since the first call."""

    def __init__(self) -> None:
        self._n_prompt: int | None = None

    def __call__(self, context: mx.array) -> mx.array:
        if self._n_prompt is None:
            self._n_prompt = context.shape[0]
        return context[self._n_prompt :]


class _OutputPenalties:
    """OpenAI's presence and frequency penalties: one for having occurred, and one for each occurrence, in the output.

    mlx-lm's own penalties count the last tokens of prompt and output.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._presence = sampling.presence_penalty
        self._presence_window = sampling.presence_context_size
        self._frequency = sampling.frequency_penalty
        self._frequency_window = sampling.frequency_context_size
        self._output = _Output()

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        output = self._output(context)
        width = logits.shape[-1]
        penalty = mx.zeros((width,))
        if self._presence:
            penalty += self._presence * (_counts(output, self._presence_window, width) > 0)
        if self._frequency:
            penalty += self._frequency * _counts(output, self._frequency_window, width)
        return logits - penalty.astype(logits.dtype)


def _counts(output: mx.array, window: int | None, width: int) -> mx.array:
    """How often each token occurs in the last ``window`` tokens of ``output``; shape (width,)."""
    recent = output[-window:] if window else output
    return mx.zeros((width,)).at[recent].add(1.0)


class _Allowed:
    """Allows some tokens and masks all others."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._ids = mx.array(ids)

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        out = mx.full(logits.shape, -mx.inf, logits.dtype)
        out[..., self._ids] = logits[..., self._ids]
        return out


class _Budgeted:
    """Closes the reasoning when its budget is spent. Last of the processors: no mask keeps the closing tokens out."""

    def __init__(self, watch: ReasoningWatch) -> None:
        self._watch = watch
        self._output = _Output()

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        output = self._output(context)
        if not self._watch.is_due(output.shape[0]):
            return logits
        # This step's computation begins before the last one's token is waited for.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        following = self._watch.next(output.tolist())  # type: ignore[arg-type]
        if following.token is not None:
            ids = mx.arange(logits.shape[-1])
            return mx.where(ids == following.token, mx.array(0, logits.dtype), mx.array(-mx.inf, logits.dtype))[None]
        if following.banned:
            logits = logits[:]
            logits[..., mx.array(following.banned)] = -mx.inf
        return logits


class _Masked:
    """Masks the tokens that a constraint does not allow.

    The grammar needs the newest token's value, so this waits for the last step's computation. Such a job ends the
    overlap of Python with the GPU for its batch. This step's computation is then started before the mask is made, so
    the mask is made while the model runs and costs little on a GPU. The masks of drafted tokens were made before.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._output = _Output()

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        output = self._output(context)
        if output.shape[0] in self._constraint.noted:
            allowed = self._constraint.noted.pop(output.shape[0])
        else:
            if self._constraint.follows_tokens:
                self._follow(output)
                mx.async_eval(logits)  # type: ignore[no-untyped-call]
            allowed = self._constraint.allowed(output.shape[0], logits.shape[-1])
        if allowed is None:
            return logits
        return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, logits.dtype))

    def _follow(self, output: mx.array) -> None:
        n_output, taken = output.shape[0], self._constraint.taken
        if n_output > len(taken):
            newest: list[int] = output[len(taken) :].tolist()  # type: ignore[assignment]
            for token in newest:
                self._constraint.take(token)


class _Draw:
    """Filter, then draw. ``_keys`` returns the keys for the XTC coin and the draw; None: mlx's global random state."""

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
        # The order is that of mlx_lm.sample_utils.make_sampler.
        if self._top_p < 1:
            # An array, because mlx-lm's filters are compiled and would be compiled again for each plain number.
            logprobs = apply_top_p(logprobs, mx.array(self._top_p))
        if self._min_p > 0:
            floor = mx.max(logprobs, axis=-1, keepdims=True) + math.log(self._min_p)
            logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
        if self._xtc_probability > 0:
            logprobs = self._apply_xtc(logprobs, coin_key)
        if self._top_k > 0:
            logprobs = apply_top_k(logprobs, self._top_k)
        return mx.random.categorical(logprobs * (1 / self._temperature), key=draw_key)

    def _keys(self) -> tuple[Any, Any]:
        return None, None

    def _apply_xtc(self, logprobs: mx.array, key: Any) -> mx.array:
        """Drop all tokens over the threshold but the least likely of them (exclude top choices).

        mlx-lm's version is compiled for each threshold, and tosses one coin for the whole batch from the global random
        state. This one tosses a coin for each row.
        """
        probs = mx.softmax(logprobs, axis=-1)
        least = mx.where(probs > self._xtc_threshold, probs, mx.inf).min(axis=-1, keepdims=True)
        dropped = probs > least
        if self._kept_by_xtc:
            dropped[..., self._kept_by_xtc] = False
        coin = mx.random.uniform(shape=(logprobs.shape[0], 1), key=key)
        return mx.where((coin < self._xtc_probability) & dropped, -mx.inf, logprobs)


class Seeded(_Draw):
    """Draws by the seed and the position in the output.

    ``follow`` must be one of the job's processors. It gets the position from the token context, because the number of
    draws so far says nothing: drafts draw ahead, and a job that was paused draws its next token again.
    """

    def __init__(self, seed: int, *settings: Any) -> None:
        super().__init__(*settings)
        self._seed = seed % 2**64
        self._output = _Output()
        self.position = 0

    def follow(self, context: mx.array, logits: mx.array) -> mx.array:
        """Note the position of the next draw. The logits stay as they are."""
        self.position = self._output(context).shape[0]
        return logits

    def _keys(self) -> tuple[Any, Any]:
        # A hash, because the samples of a request have consecutive seeds, and no two may draw alike at any positions.
        digest = hashlib.blake2b(f"{self._seed} {self.position}".encode(), digest_size=8).digest()
        coin_key, draw_key = mx.random.split(mx.random.key(int.from_bytes(digest, "little")))
        return coin_key, draw_key


@lru_cache(maxsize=256)
def _shared(*settings: Any) -> Sampler:
    return _Draw(*settings)
