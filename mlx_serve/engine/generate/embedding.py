"""Turns texts into vectors: the model's last hidden states, pooled. Computes no logits and generates no text.

Each input runs alone and in chunks, like a prompt. Its KV cache is dropped when it is done. Worker thread.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.generate.pooling import too_many_dimensions
from mlx_serve.engine.generate.token_choice import Loaded
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.values import ApiError, Embedded, Event, Job, Started

# mlx-lm's names for a model without its output layer.
_TRUNKS = ("model", "transformer", "backbone")
# A vector shorter than this has no direction.
_LEAST_NORM = 1e-12


class Embedder:
    """Makes the vectors of one model."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.pooling = loaded.pooling

    def start(self, job: Job) -> Embedding:
        """The job, ready for its first step. Raises ApiError 400."""
        assert job.inputs is not None
        if self.pooling.fault:
            raise _no_embeddings(self.pooling.fault)
        wanted, width = job.inputs.dimensions, self.width
        if wanted is not None and wanted > width:
            raise too_many_dimensions(wanted, width)
        for tokens in job.inputs.tokens:
            if not tokens:
                raise ApiError(400, "An input is empty.", param="input")
            check_ids(tokens, self.loaded.vocab_size, "input")
        return Embedding(job, self)

    @cached_property
    def trunk(self) -> Any:
        """The model without its output layer. Raises ApiError 400 when it has no such part."""
        model = getattr(self.loaded.model, "language_model", self.loaded.model)
        for name in _TRUNKS:
            trunk = getattr(model, name, None)
            if callable(trunk):
                return trunk
        raise _no_embeddings("mlx-lm does not give its hidden states")

    @cached_property
    def width(self) -> int:
        """The numbers in a vector, found by describing a computation without running it. Raises ApiError 400."""
        try:
            hidden = self.trunk(mx.array([[0]]), cache=make_prompt_cache(self.loaded.model))
        except TypeError as error:
            raise _no_embeddings("its hidden states can't be had by themselves") from error
        # Some models have their output layer inside this part.
        if not isinstance(hidden, mx.array) or hidden.ndim != 3 or hidden.shape[-1] == self.loaded.vocab_size:
            raise _no_embeddings("mlx-lm does not give its hidden states")
        return int(hidden.shape[-1])


class Embedding:
    """The progress of one job's inputs. ``n_taken``: the tokens of the last step."""

    def __init__(self, job: Job, embedder: Embedder) -> None:
        assert job.inputs is not None
        self.job = job
        self.n_taken = 0
        self._inputs = job.inputs
        self._embedder = embedder
        self._number = 0
        self._n_done = 0
        self._cache: list[Any] | None = None
        # The sum is in float32: in the model's own type, a mean of thousands of states would lose precision.
        self._pooled = mx.zeros((embedder.width,))

    @property
    def is_between(self) -> bool:
        """Whether no input is half done."""
        return self._n_done == 0

    def step(self, n_tokens: int) -> list[Event]:
        """Run up to ``n_tokens`` of an input. Returns its vector when the input is done."""
        events: list[Event] = [Started(self.job.index, 0)] if self._number == self._n_done == 0 else []
        tokens = self._inputs.tokens[self._number]
        chunk = tokens[self._n_done : self._n_done + n_tokens]
        self._run(chunk)
        self.n_taken = len(chunk)
        self._n_done += len(chunk)
        if self._n_done < len(tokens):
            return events
        vector = self._finish()
        return [*events, Embedded(self.job.index, vector, is_last=self._number == len(self._inputs.tokens))]

    def _run(self, chunk: tuple[int, ...]) -> None:
        with mx.stream(generation_stream):
            if self._cache is None:
                self._cache = make_prompt_cache(self._embedder.loaded.model)
            (hidden,) = self._embedder.trunk(mx.array(chunk)[None], cache=self._cache).astype(mx.float32)
            if self._embedder.pooling.mode == "mean":
                self._pooled = self._pooled + hidden.sum(axis=0)
            else:
                self._pooled = hidden[-1]
            mx.eval(self._pooled, [layer.state for layer in self._cache])
        mx.clear_cache()

    def _finish(self) -> bytes:
        """The vector of a finished input. The sum serves as the mean: they differ in length alone."""
        vector = np.array(self._pooled)[: self._inputs.dimensions]
        self._number, self._n_done, self._cache = self._number + 1, 0, None
        self._pooled = mx.zeros_like(self._pooled)
        return (vector / max(float(np.linalg.norm(vector)), _LEAST_NORM)).astype("<f4").tobytes()


def _no_embeddings(reason: str) -> ApiError:
    return ApiError(400, f"This model can't make embeddings: {reason}.", param="model")
