"""What the scheduler asks of whatever generates tokens, and of whatever opens models, both on the worker thread."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from mlx_serve.engine.memory import MemoryUse
from mlx_serve.values import Embedded, Event, Failed, Job, PromptLogprobs, TokenEvent

# What Python code and MLX's checks of shapes raise while a computation is still being described: the same on all ranks,
# and before any of it has run. What comes later (RuntimeError: a device's fault, a lost connection) may be one rank's.
ALIKE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)


class EngineLost(Exception):
    """Nothing can be generated any more, and this process can't mend it; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does: up to ``n_tokens`` prompt tokens, and whether it then decodes a token of each stream."""

    n_tokens: int
    decodes: bool = True


class Backend(Protocol):
    """What generates tokens for one model. Made, stepped and closed on the worker thread.

    ``capacity`` is how many jobs it takes at a time; ``n_decoding`` how many of them are past their prompt.
    """

    capacity: int

    @property
    def alone(self) -> str:
        """Why it takes one job at a time; "": it need not. Any thread, as ``capacity``."""

    @property
    def n_decoding(self) -> int:
        """Jobs whose streams wait for every step."""

    @property
    def cache_bytes(self) -> int:
        """What prefixes of former prompts hold of memory."""

    @property
    def n_cached(self) -> int:
        """How many prefixes are kept. Any thread, as ``cache_bytes`` and ``n_evicted``."""

    @property
    def n_evicted(self) -> int:
        """How many were given up for room."""

    def kv_bytes(self, jobs: Collection[Job]) -> int:
        """What the KV caches of ``jobs`` can come to, run together. Any thread."""

    def insert(self, job: Job) -> None:
        """Take a job in; its prefill may begin later. An ApiError concerns that job alone."""

    def remove(self, jobs: Collection[Job]) -> None:
        """Forget jobs, at whatever stage they are."""

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        """Go one step on with all jobs, with about ``gap_s`` seconds of prefill.

        A job that failed, or whose event says that it was the last one, is forgotten. Raising concerns all jobs.
        """

    def shrink_cache(self, max_bytes: int) -> None:
        """Let prefixes go, the least recently used first, until they hold no more than ``max_bytes``."""

    def close(self) -> None:
        """Give back what the backend holds."""


# Opens a model in slices, so that others decode meanwhile; its return value is the backend. Raises ApiError.
Opening: TypeAlias = Generator[None, None, Backend]


class ModelLoader(Protocol):
    """What opens and unloads models, and knows what there is room for.

    ``kv_copies``: how many times the KV caches that run are counted.
    """

    kv_copies: int

    def weights_bytes(self, name: str) -> int:
        """What a model's weights will hold of memory. Raises ApiError when there is no such model."""

    def has_room(self, names: Collection[str]) -> bool:
        """Whether these models may be in memory together."""

    def kv_limit(self, names: Collection[str]) -> int | None:
        """Bytes for KV caches, running and kept, while these models are in memory. None: nobody says."""

    def open(self, name: str) -> Opening:
        """Load a model that is not in memory yet, and make a backend for it."""

    def memory(self) -> MemoryUse:
        """What it all takes now."""

    def rest(self) -> None:
        """Nothing is going on: give back what is held for the next step alone."""

    def unload(self, name: str) -> None:
        """Let a model's weights go."""


def is_last(event: Event) -> bool:
    """Whether nothing more comes of the event's job."""
    if isinstance(event, TokenEvent):
        return event.finish is not None
    return isinstance(event, Failed) or (isinstance(event, PromptLogprobs | Embedded) and event.is_last)
