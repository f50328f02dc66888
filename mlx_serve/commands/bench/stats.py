"""Computes a round's results from times and counts, by the definitions in docs/bench.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_serve.client.answer import Answer
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench.workload import Message


@dataclass(frozen=True, slots=True)
class Record:
    """A request that was sent. ``start_s``: since the round began. ``asked_tokens``: the maximum length of its answer.

    ``prompt``: the messages or the text. If the request failed, ``answer`` is None and ``failure`` is the reason.
    ``late_s``: in an open loop, how long after its time the request was sent.
    """

    start_s: float
    asked_tokens: int
    prompt: Sequence[Message] | str
    answer: Answer | None = None
    failure: Failure | None = None
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """The goals for each request, in seconds; None means no goal. ``itl_s`` limits every single gap."""

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def any(self) -> bool:
        """Whether there is any goal."""
        return any(limit is not None for limit in (self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s))

    def met(self, answer: Answer) -> bool:
        """Whether a request meets all goals."""
        return (
            _within(answer.ttft_s if answer.ttft_s is not None else math.inf, self.ttft_s)
            and _within(max(answer.gaps_s, default=0.0), self.itl_s)
            and _within(tpot_s(answer) or 0.0, self.tpot_s)
            and _within(answer.e2e_s, self.e2e_s)
        )


def _within(value: float, limit: float | None) -> bool:
    return limit is None or value <= limit


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of ``n`` values, in milliseconds."""

    n: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a round. Rates are per second of ``seconds``, from the first request to the last answer.

    ``n_short``: answers with fewer tokens than requested. ``n_silent``: answers without text, which have no TTFT.
    """

    seconds: float
    n_ok: int
    n_failed: int
    n_short: int
    n_silent: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    late_ms: Spread | None
    errors: dict[str, int]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, linear between neighbours like numpy's. Raises IndexError without values."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Iterable[float]) -> Spread | None:
    """The statistics of times in seconds, in milliseconds. None without values."""
    ordered = sorted(1000 * value for value in seconds)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
    return Spread(len(ordered), mean, p50, p90, p95, p99, ordered[-1])


def tpot_s(answer: Answer) -> float | None:
    """The time per output token after the first. None for an answer of one token or without text."""
    if answer.ttft_s is None or answer.output_tokens < 2:
        return None
    return (answer.e2e_s - answer.ttft_s) / (answer.output_tokens - 1)


def summarize(records: Sequence[Record], seconds: float, slo: Slo, *, open_loop: bool = False) -> Summary:
    """The results of a round. Rates and times count only requests that were answered completely."""
    answered = [(record, record.answer) for record in records if record.answer is not None]
    answers = [answer for _, answer in answered]
    failures = Counter(record.failure.kind for record in records if record.failure is not None)
    tpots = [tpot_s(answer) for answer in answers]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    return Summary(
        seconds=seconds,
        n_ok=len(answers),
        n_failed=failures.total(),
        n_short=sum(answer.output_tokens < record.asked_tokens for record, answer in answered),
        n_silent=sum(answer.ttft_s is None for answer in answers),
        prompt_tokens=prompt_tokens,
        cached_tokens=_cached(answers),
        output_tokens=output_tokens,
        requests_per_s=_rate(len(answers), seconds),
        output_tokens_per_s=_rate(output_tokens, seconds),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, seconds),
        goodput_per_s=_rate(sum(map(slo.met, answers)), seconds) if slo.any() else None,
        ttft_ms=spread(answer.ttft_s for answer in answers if answer.ttft_s is not None),
        itl_ms=spread(gap for answer in answers for gap in answer.gaps_s),
        tpot_ms=spread(tpot for tpot in tpots if tpot is not None),
        e2e_ms=spread(answer.e2e_s for answer in answers),
        late_ms=spread(record.late_s for record in records) if open_loop else None,
        errors=dict(failures.most_common()),
    )


def _cached(answers: Sequence[Answer]) -> int | None:
    """The sum of cached tokens, or None if the server did not report it for every answer."""
    counts = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return sum(counts) if answers and len(counts) == len(answers) else None


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
