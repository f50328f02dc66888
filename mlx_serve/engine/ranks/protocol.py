"""One server in several processes: rank 0 decides and announces each action, and the others repeat it on their part.

    rank 0   scheduler -> Leader, LedBackend --post--> the same call on its own part
    others                                   receive --> Follower --> the same call on its own part

A model's computations meet in MLX's collectives, so all ranks must run the same ones in the same order. Some decisions
depend on time or on a rank's memory: how many tokens to prefill, which grammar took too long, which prefixes to
evict. Rank 0 makes and announces these. All else follows from the messages. This module has the parts that leader.py
and follower.py share. Knows no MLX; worker thread.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from mlx_serve.engine.backend import EngineLost, ModelLoader
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.values import ApiError, Gate, Grammar, Inputs, Job, Marker, Prompt, ReasoningBudget, Sampling

if TYPE_CHECKING:  # they import MLX
    from mlx_serve.engine.cache.prefixes import PrefixCache
    from mlx_serve.engine.generate.batch import BatchBackend
    from mlx_serve.engine.ranks.group import Ranks

_READING, _READ, _FAILED = range(3)


class Store(ModelLoader, Protocol):
    """The models of one rank (``models.store.ModelStore``). Loading has separate parts, which ranks do in parallel."""

    def tokenizer(self, entry: ModelEntry) -> Any:
        """The model's tokenizer."""

    def vocabulary(self, entry: ModelEntry) -> Any:
        """The model's tokens, for grammars."""

    def check_room(self, name: str) -> None:
        """Raises ApiError when a model can't be loaded here."""

    def read(self, name: str) -> Generator[None, None, None]:
        """Read a model's weights in slices."""

    def finish(self, name: str) -> BatchBackend:
        """A backend for a model that was read. All ranks call this together."""

    def prefix_cache(self, name: str) -> PrefixCache:
        """The kept prefixes of a model in memory."""

    def close(self) -> None:
        """Unload all models."""


class JointOpening:
    """A model that all ranks load, each at its own pace. The common computation begins when all have read it."""

    def __init__(self, store: Store, ranks: Ranks, name: str) -> None:
        self._store = store
        self._ranks = ranks
        self._name = name
        self._slices = store.read(name)
        self._state = _READING
        self._error: ApiError | None = None

    def go_on(self) -> BatchBackend | None:
        """Load a slice on every rank. Returns the backend when all are done; raises ApiError on all if one failed."""
        with self._ranks.stream():
            self._read()
            states = [state for (state,) in self._ranks.gather([self._state])]
            if _FAILED in states:
                self._store.unload(self._name)
                raise self._error or _failed_elsewhere(self._name, states.index(_FAILED))
            if _READING in states:
                return None
            return self._store.finish(self._name)

    def _read(self) -> None:
        if self._state != _READING:
            return
        try:
            next(self._slices)
        except StopIteration:
            self._state = _READ
        except ApiError as error:
            self._state, self._error = _FAILED, error


def _failed_elsewhere(name: str, rank: int) -> ApiError:
    message = f"The model '{name}' could not be loaded; the server's log says why."
    error = ApiError(500, message, type="server_error", param="model")
    error.__cause__ = EngineLost(f"cannot load {name}: rank {rank} says why in its log")
    return error


def job_data(job: Job) -> dict[str, Any]:
    """A job as JSON values, for another rank."""
    return {
        "model": job.model,
        "tokens": job.prompt.tokens,
        "sampling": asdict(replace(job.sampling, grammar=_unbound(job.sampling.grammar))),
        "index": job.index,
        "inputs": None if job.inputs is None else asdict(job.inputs),
        "scope": job.scope,
        "prediction": job.prediction,
    }


def _unbound(grammar: Grammar | None) -> Grammar | None:
    """The grammar without what this process compiled of it."""
    return None if grammar is None else replace(grammar, compiled=None)


def job_of(data: dict[str, Any]) -> Job:
    """The job on another rank."""
    sampling = _frozen(data["sampling"])
    sampling["gate"] = Gate(**_frozen(sampling["gate"]))
    if (budget := sampling["reasoning_budget"]) is not None:
        markers = {name: Marker(**_frozen(budget[name])) for name in ("opening", "ending")}
        sampling["reasoning_budget"] = ReasoningBudget(**_frozen(budget | markers))
    if sampling["grammar"] is not None:
        sampling["grammar"] = Grammar(**sampling["grammar"])
    inputs = None if data["inputs"] is None else Inputs(**_frozen(data["inputs"]))
    prompt = Prompt(tuple(data["tokens"]))
    job = Job(data["model"], prompt, Sampling(**sampling), data["index"], SimpleQueue(), inputs=inputs)
    job.scope, job.prediction = data["scope"], tuple(data["prediction"])
    return job


def _frozen(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with tuples in place of JSON's lists."""
    return {name: _tuples(value) for name, value in fields.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
