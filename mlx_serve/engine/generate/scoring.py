"""How likely a prompt is to the model: ``echo`` with ``logprobs``. A forward pass of its own, in chunks.

BatchGenerator throws the prompt's logits away, so this runs a sequence alone; its cache then goes on to be generated
from. Nothing cached helps here, for every token's row is wanted.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.generate.token_choice import TokenChoice, top
from mlx_serve.values import PromptLogprobs

# A chunk's logits are chunk x vocabulary numbers: 150 MB for 256 tokens and a vocabulary of 150,000.
_MAX_CHUNK = 256


class Scoring:
    """One job's prompt on its way through the model; ``cache`` holds all of it but the last token when done."""

    def __init__(self, choice: TokenChoice, model: Any) -> None:
        self.choice = choice
        self.cache: list[Any] = make_prompt_cache(model)
        self._model = model
        self._tokens = choice.job.prompt.tokens
        self._rows: list[tuple[float, tuple[tuple[int, float], ...]]] = []

    @property
    def n_left(self) -> int:
        """Tokens that have no score yet."""
        return len(self._tokens) - 1 - len(self._rows)

    def step(self, n_tokens: int) -> int:
        """Score up to ``n_tokens`` more; gives how many it were."""
        start = len(self._rows)
        n = min(n_tokens, _MAX_CHUNK, self.n_left)
        if n == 0:
            return 0
        with mx.stream(generation_stream):
            inputs = mx.array(self._tokens[start : start + n])[None]
            logits = self._model(inputs, cache=self.cache)[0].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(logprobs, [layer.state for layer in self.cache])
            k = self.choice.job.sampling.prompt_logprobs or 0
            for row, token in zip(logprobs, self._tokens[start + 1 : start + 1 + n], strict=True):
                self._rows.append((float(row[token]), top(row, k)))
        mx.clear_cache()
        return n

    def event(self) -> PromptLogprobs:
        """What came out."""
        job = self.choice.job
        return PromptLogprobs(job.index, tuple(self._rows), is_last=job.sampling.max_tokens == 0)
