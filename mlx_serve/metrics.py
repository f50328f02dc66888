"""Metrics and running requests: plain Python, in an object that is passed down and never a global.

Names and meanings are vLLM's where there is one (docs/metrics.md). A lock is held for one addition. Every label takes
its values from the server's own tables, and a family has a bound on its series all the same. Must not know HTTP, models
or how it is shown.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from threading import Lock
from typing import Literal, Protocol, TypeAlias

from mlx_serve.values import Job

Labels: TypeAlias = tuple[str, ...]
Phase: TypeAlias = Literal["queued", "prefill", "decoding"]

# How a sequence can end; abort: its client left, error: the server failed.
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
MAX_SERIES = 512
# Number of latest observations: a live view shows the present, not the time since the start.
N_RECENT = 512
N_ERRORS = 50

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Counter:
    """Sums that only grow, one for each set of label values."""

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._lock = Lock()
        self._sums: dict[Labels, float] = {}

    def add(self, n: float, *values: str) -> None:
        """Add to one of the sums. Adding 0 shows it from now on: a rate needs a value before the first increase."""
        with self._lock:
            key = _bounded(self._sums, values)
            self._sums[key] = self._sums.get(key, 0.0) + n

    def total(self) -> float:
        return sum(self.series().values())

    def series(self) -> dict[Labels, float]:
        with self._lock:
            return dict(self._sums)


@dataclass(frozen=True, slots=True)
class Buckets:
    """``counts[i]``: observations of at most ``bounds[i]``; the last bound is infinity."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Histogram:
    """How often values fell below each bound, for each set of label values; and the latest values."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Labels = ("model_name",)) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._bounds = (*bounds, math.inf)
        self._lock = Lock()
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._recent: deque[float] = deque(maxlen=N_RECENT)

    def observe(self, value: float, *values: str) -> None:
        at = bisect_left(self._bounds, value)
        with self._lock:
            key = _bounded(self._counts, values)
            counts = self._counts.get(key) or self._counts.setdefault(key, [0] * len(self._bounds))
            counts[at] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value
            self._recent.append(value)

    def series(self) -> dict[Labels, Buckets]:
        with self._lock:
            copied = {key: (tuple(counts), self._sums[key]) for key, counts in self._counts.items()}
        return {key: Buckets(self._bounds, tuple(accumulate(counts)), total) for key, (counts, total) in copied.items()}

    def recent(self) -> list[float]:
        """The latest observations, rising."""
        with self._lock:
            latest = list(self._recent)
        return sorted(latest)


def _bounded(known: dict[Labels, float] | dict[Labels, list[int]], values: Labels) -> Labels:
    return values if values in known or len(known) < MAX_SERIES else ("other",) * len(values)


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """A request that was refused or failed; ``at`` is Unix time. Nothing of what the client sent is in it.

    ``count``: so many of the same kind came one after another, of which this is the latest.
    """

    at: float
    route: str
    status: int
    reason: str
    request_id: str
    count: int = 1

    def same_kind(self, other: ErrorEntry) -> bool:
        return (self.route, self.status, self.reason) == (other.route, other.status, other.reason)


class Observer(Protocol):
    """Is told of requests while they run, on their own threads. It must neither wait nor raise."""

    def entered(self, trace: Trace, jobs: Sequence[Job]) -> None:
        """A request's jobs are about to be queued."""

    def left(self, trace: Trace) -> None:
        """A request has ended, or was not taken."""


class Metrics:
    """Everything that is counted, the requests that run, and the latest errors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, observers: Sequence[Observer] = ()) -> None:
        self.clock = clock
        self.observers = observers
        self.began = clock()
        self.started_at = time.time()
        model: Labels = ("model_name",)
        self.http_requests = Counter("http_requests", "HTTP requests answered.", ("method", "route", "status"))
        self.refusals = Counter("request_refusals", "Requests refused or failed, by the error's code.", ("reason",))
        self.cancellations = Counter("request_cancellations", "Requests whose client left before the end.", ("route",))
        self.finished = Counter(
            "request_success",
            "Sequences that ended, by reason; abort: the client left, error: the server failed.",
            ("model_name", "finished_reason"),
        )
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of sequences that began to run.", model)
        self.cached_tokens = Counter("prompt_tokens_cached", "Prompt tokens that needed no prefill.", model)
        self.generation_tokens = Counter("generation_tokens", "Tokens generated.", model)
        self.prefix_queries = Counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", model)
        self.prefix_hits = Counter("prefix_cache_hits", "Tokens found in the prefix cache.", model)
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request's last byte to its first token.", _FIRST_TOKEN_S
        )
        self.inter_token = Histogram("inter_token_latency_seconds", "Between a sequence's tokens.", _TOKEN_S)
        self.whole = Histogram("e2e_request_latency_seconds", "From a request's last byte to its end.", _REQUEST_S)
        self.queue_time = Histogram(
            "request_queue_time_seconds", "From submission to the beginning of the prefill.", _REQUEST_S
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "From the beginning of the prefill to the first token.", _REQUEST_S
        )
        self.decode_time = Histogram("request_decode_time_seconds", "From the first token to the last.", _REQUEST_S)
        self.prompt_length = Histogram("request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS)
        self.output_length = Histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._traces: dict[Trace, None] = {}
        self._errors: deque[ErrorEntry] = deque(maxlen=N_ERRORS)
        self._lock = Lock()

    def know_model(self, name: str) -> None:
        """Show the model's counters from now on."""
        for reason in FINISH_REASONS:
            self.finished.add(0, name, reason)
        for counter in (self.prompt_tokens, self.cached_tokens, self.generation_tokens):
            counter.add(0, name)

    def counters(self) -> list[Counter]:
        return [value for value in vars(self).values() if isinstance(value, Counter)]

    def histograms(self) -> list[Histogram]:
        return [value for value in vars(self).values() if isinstance(value, Histogram)]

    def running(self) -> list[Trace]:
        """The requests that have been queued and have not ended, the oldest first."""
        with self._lock:
            return list(self._traces)

    def errors(self) -> list[ErrorEntry]:
        """The latest ones, the newest first."""
        with self._lock:
            return list(self._errors)[::-1]

    def record_error(self, entry: ErrorEntry) -> None:
        """Keep an error; one that comes again and again takes one place, or it would drive out all others."""
        self.refusals.add(1, entry.reason)
        with self._lock:
            latest = self._errors[-1] if self._errors else None
            if latest is not None and latest.same_kind(entry):
                entry = replace(self._errors.pop(), at=entry.at, request_id=entry.request_id, count=latest.count + 1)
            self._errors.append(entry)

    def enter(self, trace: Trace) -> None:
        with self._lock:
            self._traces[trace] = None

    def leave(self, trace: Trace) -> None:
        with self._lock:
            self._traces.pop(trace, None)


@dataclass(slots=True, eq=False)
class Trace:
    """One request on its way through the engine. Written by the request's own thread alone, read by any.

    Times are those of the metrics' clock, in seconds. ``received_at``: when its last byte was here; None: now.
    """

    metrics: Metrics
    model: str
    route: str = ""
    request_id: str = ""
    received_at: float | None = None
    n_sequences: int = 1
    jobs: Sequence[Job] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    submitted_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    _n_ended: int = 0
    _open: bool = False
    _last: dict[int, float] = field(default_factory=dict)

    @property
    def phase(self) -> Phase:
        if self.admitted_at is None:
            return "queued"
        return "prefill" if self.first_token_at is None else "decoding"

    @property
    def began(self) -> float:
        return self.submitted_at if self.received_at is None else self.received_at

    @property
    def prefilled_tokens(self) -> int:
        """Of the prompt tokens, those that are in the KV caches so far."""
        return sum(job.n_prefilled for job in self.jobs)

    def submitting(self, jobs: Sequence[Job]) -> None:
        """The engine is about to get the request's sequences: from here on, they may be what ends the process."""
        for observer in self.metrics.observers:
            observer.entered(self, jobs)

    def refused(self) -> None:
        """The engine has not taken them."""
        for observer in self.metrics.observers:
            observer.left(self)

    def queued(self, jobs: Sequence[Job] = ()) -> None:
        """The engine has taken the request's sequences."""
        self.submitted_at = self.metrics.clock()
        self.jobs = jobs
        self._open = True
        self.metrics.enter(self)

    def admitted(self, prompt_tokens: int, cached_tokens: int, *, looked_up: bool = True) -> None:
        """The prefill of one of its sequences begins. ``looked_up``: the prompt was looked for in the prefix cache."""
        metrics, now = self.metrics, self.metrics.clock()
        if self.admitted_at is None:
            self.admitted_at = now
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        metrics.queue_time.observe(now - self.submitted_at, self.model)
        metrics.prompt_length.observe(prompt_tokens, self.model)
        metrics.prompt_tokens.add(prompt_tokens, self.model)
        metrics.cached_tokens.add(cached_tokens, self.model)
        if looked_up:
            metrics.prefix_queries.add(prompt_tokens, self.model)
            metrics.prefix_hits.add(cached_tokens, self.model)

    def token(self, index: int) -> None:
        """One of its sequences has one more token."""
        metrics, now = self.metrics, self.metrics.clock()
        if self.first_token_at is None:
            self.first_token_at = now
            metrics.first_token.observe(now - self.began, self.model)
            metrics.prefill_time.observe(now - (self.admitted_at or self.submitted_at), self.model)
        if index in self._last:
            metrics.inter_token.observe(now - self._last[index], self.model)
        self._last[index] = self.last_token_at = now
        self.output_tokens += 1
        metrics.generation_tokens.add(1, self.model)

    def ended(self, reason: str) -> None:
        """One of its sequences came to its end."""
        self._n_ended += 1
        self.metrics.finished.add(1, self.model, reason)

    def close(self, *, failed: bool = False) -> None:
        """The request is over: its sequences have ended, or failed, or nobody waits for them. May be repeated."""
        if not self._open:
            return
        self._open = False
        metrics = self.metrics
        metrics.leave(self)
        for observer in metrics.observers:
            observer.left(self)
        if n_left := self.n_sequences - self._n_ended:
            metrics.finished.add(n_left, self.model, "error" if failed else "abort")
            return
        metrics.output_length.observe(self.output_tokens, self.model)
        metrics.whole.observe(metrics.clock() - self.began, self.model)
        if self.first_token_at is not None:
            metrics.decode_time.observe(self.last_token_at - self.first_token_at, self.model)
