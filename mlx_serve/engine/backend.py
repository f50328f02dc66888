"""The scheduler's interfaces: of a backend, which generates tokens, and of a model loader. Both run on the worker."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from mlx_serve.engine.memory import Marks, MemoryUse
from mlx_serve.values import Embedded, Event, Failed, Job, PromptLogprobs, TokenEvent

# Python code and MLX's shape checks raise these while a computation is being described, before it runs. All ranks raise
# the same. A later error (RuntimeError: a device's fault, a lost connection) may occur on one rank alone.
ALIKE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
# The gap of a step that holds up nobody's stream.
NO_GAP = math.inf


class EngineLost(Exception):
    """This process can no longer generate and cannot recover. The text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does: it runs up to ``n_tokens`` prompt tokens, and may then decode one token of each stream.

    ``n_held``: once a prompt is done, the step runs at most so many tokens of others before it decodes; None: any.
    ``n_overhead``: how many tokens take as long as a pass's overhead, which each pass after the first costs as well.
    ``max_spare``: see ``Backend``. ``n_drafts``: how many tokens it drafts for each stream.
    """

    n_tokens: int
    decodes: bool = True
    n_held: int | None = None
    n_overhead: int = 0
    max_spare: int | None = None
    n_drafts: int = 0


class Backend(Protocol):
    """Generates tokens for one model. Created, stepped and closed on the worker thread.

    ``capacity``: how many jobs it takes at a time. ``n_decoding``: how many of them have finished their prompt.
    ``max_spare``: how many bytes it may take for rows of the batch that are free, from the next step on; None: any.
    """

    capacity: int
    max_spare: int | None

    @property
    def alone(self) -> str:
        """Why it takes one job at a time; "" if it takes several. Any thread may call this and ``capacity``."""

    @property
    def undrafted(self) -> str:
        """Why nothing is drafted for its jobs; "" if something may be. Any thread."""

    @property
    def n_decoding(self) -> int:
        """The number of jobs that get a token in every step."""

    @property
    def cache_bytes(self) -> int:
        """The bytes that kept prefixes take."""

    @property
    def n_cached(self) -> int:
        """How many prefixes are kept. Any thread may call this, ``cache_bytes`` and ``n_evicted``."""

    @property
    def n_evicted(self) -> int:
        """How many prefixes were evicted."""

    @property
    def n_drafted(self) -> int:
        """How many tokens were drafted, and checked by the model. Any thread may call this and ``n_accepted``."""

    @property
    def n_accepted(self) -> int:
        """How many of the drafted tokens were right."""

    def kv_bytes(self, tokens: Mapping[Job, int]) -> int:
        """The bytes of KV caches for jobs that run together, of so many tokens each. Any thread."""

    def insert(self, job: Job) -> None:
        """Add a job, or continue a paused one; its prefill may begin later. An ApiError fails that job alone.

        The prefix that only this job continues is no longer counted in ``cache_bytes``, but as a part of the job.
        """

    def remove(self, jobs: Collection[Job]) -> None:
        """Remove jobs, whatever their stage. What they have computed is kept as prefixes."""

    def pause(self, jobs: Collection[Job]) -> Sequence[tuple[Job, Event]]:
        """Take generating jobs out, so that ``insert`` continues them with the very tokens that would have come.

        Their caches become kept prefixes. The events are tokens that were drawn already. A job whose last event is
        among them has ended.
        """

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        """Run one step of all jobs, with about ``gap_s`` seconds of prefill.

        Jobs that failed or that got their last event are removed. An exception fails all jobs.
        """

    def pin(self, jobs: Sequence[Job]) -> None:
        """Say which jobs come next, in order. The prefixes that they will use are pinned: evicted last."""

    def missing(self, job: Job) -> tuple[int, float]:
        """How many tokens of a waiting job's prompt must be computed for it alone, and in about how many seconds.

        Nothing and no time where prefixes that were evicted come back from disk, and for a job that is not in line.
        """

    def wanted_bytes(self, within_s: float) -> int:
        """The bytes of prefixes that are pinned, or were used in the last ``within_s`` seconds."""

    def shrink_cache(self, max_bytes: int, *, pinned: bool = True) -> None:
        """Evict prefixes, the least recently used first, until the rest takes at most ``max_bytes``.

        Without ``pinned``, those that jobs will use stay even so.
        """

    def close(self) -> None:
        """Release what the backend holds."""


# Opens a model in slices, so that other models decode in between. Its return value is the backend. Raises ApiError.
Opening: TypeAlias = Generator[None, None, Backend]


class ModelLoader(Protocol):
    """Opens and unloads models, and knows which of them fit in memory."""

    def weights_bytes(self, name: str) -> int:
        """The bytes that a model's weights take in memory. Raises ApiError when there is no such model."""

    def has_room(self, names: Collection[str]) -> bool:
        """Whether these models may be in memory together."""

    def kv_limit(self, names: Collection[str]) -> int | None:
        """The bytes for KV caches, running and kept, while these models are in memory. None: no limit."""

    def marks(self, names: Collection[str]) -> Marks | None:
        """What the process may hold while these models are in memory. None: no limit. Any thread."""

    def open(self, name: str) -> Opening:
        """Load a model that is not in memory yet, and make a backend for it."""

    def memory(self) -> MemoryUse:
        """The memory that is in use now."""

    def rest(self) -> None:
        """The engine is idle: release memory that is held only for the next step."""

    def release(self) -> None:
        """Return freed memory to the system. Jobs may be running."""

    def unload(self, name: str) -> None:
        """Release a model's weights."""


def is_last(event: Event) -> bool:
    """Whether this is the last event of its job."""
    if isinstance(event, TokenEvent):
        return event.finish is not None
    return isinstance(event, Failed) or (isinstance(event, PromptLogprobs | Embedded) and event.is_last)
