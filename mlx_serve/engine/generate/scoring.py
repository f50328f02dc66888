"""The log-probabilities of a prompt's tokens, for ``echo`` with ``logprobs``: a separate forward pass, in chunks.

Prefill computes no logits, so this module runs the prompt in passes of its own. Its cache is then used to generate.
Kept prefixes do not help, because every token's row of logits is needed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.generate.logprobs import Logprobs, Scored
from mlx_serve.engine.generate.token_choice import TokenChoice
from mlx_serve.values import PromptLogprobs

# A chunk's logits are chunk x vocabulary numbers: 150 MB for 256 tokens and a vocabulary of 150,000.
_MAX_CHUNK = 256


class Scoring:
    """The progress of one job's prompt. When done, ``cache`` holds all of it but the last token."""

    def __init__(self, choice: TokenChoice, model: Any) -> None:
        self.choice = choice
        self.cache: list[Any] = make_prompt_cache(model)
        self._model = model
        self._tokens = choice.job.prompt.tokens
        self._rows: list[Scored] = []

    @property
    def n_left(self) -> int:
        """The tokens without a score so far."""
        return len(self._tokens) - 1 - len(self._rows)

    def step(self, n_tokens: int) -> int:
        """Score up to ``n_tokens`` and return how many were scored."""
        start = len(self._rows)
        n = min(n_tokens, _MAX_CHUNK, self.n_left)
        if n == 0:
            return 0
        with mx.stream(generation_stream):
            inputs = mx.array(self._tokens[start : start + n])[None]
            k = self.choice.job.sampling.prompt_logprobs or 0
            logprobs = Logprobs(self._model(inputs, cache=self.cache)[0], k)
            mx.eval([layer.state for layer in self.cache])
            followers = self._tokens[start + 1 : start + 1 + n]
            self._rows += [logprobs.row(i, token, k) for i, token in enumerate(followers)]
        mx.clear_cache()
        return n

    def event(self) -> PromptLogprobs:
        """The event with all scores."""
        job = self.choice.job
        return PromptLogprobs(job.index, tuple(self._rows), is_last=job.sampling.max_tokens == 0)
