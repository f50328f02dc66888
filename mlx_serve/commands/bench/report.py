"""Formats a run as text and as JSON. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_serve.commands.bench.ceiling import Offline
from mlx_serve.commands.bench.drafts import Drafts
from mlx_serve.commands.bench.stats import Record, Spread, Summary

_MARKS = ("mean", "p50", "p90", "p95", "p99", "max")
# If the client uses more than this share of a processor, it distorts the results.
_BUSY = 0.5
_LATE_MS = 50.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A round: its load and its results. ``level`` is the number of clients, or requests per second.

    ``n_planned``: the number of requests planned. ``client_cpu``: how many processors this process used on average.
    """

    open_loop: bool
    level: float
    n_planned: int
    records: Sequence[Record]
    summary: Summary
    client_cpu: float
    offline: Offline | None = None
    drafts: Drafts | None = None

    @property
    def label(self) -> str:
        """The load as text."""
        return label(self.open_loop, self.level)

    @property
    def ratio(self) -> float | None:
        """Output tokens per second, divided by those of mlx-lm without a server."""
        return self.summary.output_tokens_per_s / self.offline.rate if self.offline else None


def label(open_loop: bool, level: float) -> str:
    """A load as text."""
    return f"{level:g} requests/s" if open_loop else f"{level:g} at a time"


def level_json(level: float) -> float | str:
    """A load as JSON, which has no infinity."""
    return "inf" if math.isinf(level) else level


def text(rounds: Sequence[Measured]) -> str:
    """A block of text for each round, and a table if there are several rounds."""
    blocks = [_block(measured) for measured in rounds]
    if len(rounds) > 1:
        blocks.append(_table(rounds))
    return "\n\n".join(blocks)


def _block(measured: Measured) -> str:
    s = measured.summary
    lines = [
        f"{'open' if measured.open_loop else 'closed'} loop, {measured.label}: "
        f"{s.n_ok} of {measured.n_planned} requests in {s.seconds:.1f} s",
        f"  requests/s {s.requests_per_s:.2f}   output tokens/s {s.output_tokens_per_s:.1f}"
        f"   all tokens/s {s.total_tokens_per_s:.1f}   tokens in {s.prompt_tokens}{_cached(s)}, out {s.output_tokens}",
        *_spreads(s),
        *(f"  {line}" for line in _remarks(measured)),
    ]
    return "\n".join(lines)


def _cached(summary: Summary) -> str:
    if summary.cached_tokens is None or not summary.prompt_tokens:
        return ""
    return f" ({summary.cached_tokens / summary.prompt_tokens:.0%} cached)"


def _spreads(s: Summary) -> list[str]:
    named = {"TTFT": s.ttft_ms, "ITL": s.itl_ms, "TPOT": s.tpot_ms, "E2E": s.e2e_ms}
    rows = [[name, *(f"{getattr(spread, mark):.1f}" for mark in _MARKS)] for name, spread in named.items() if spread]
    return ["  " + line for line in _aligned([["ms", *_MARKS], *rows])] if rows else []


def _remarks(measured: Measured) -> Iterable[str]:
    s = measured.summary
    if s.goodput_per_s is not None:
        yield f"goodput {s.goodput_per_s:.2f} requests/s"
    if measured.offline is not None and measured.ratio is not None:
        offline = measured.offline
        yield f"mlx-lm without a server: {offline.rate:.1f} output tokens/s; served / offline: {measured.ratio:.2f}"
        if offline.prompt_tokens != s.prompt_tokens:
            yield (
                f"different prompts: {s.prompt_tokens} tokens at the server, {offline.prompt_tokens} in mlx-lm: "
                "the server uses another model, template or option"
            )
    if measured.drafts is not None and measured.drafts.drafted_tokens and s.output_tokens:
        drafted, right = measured.drafts.drafted_tokens, measured.drafts.accepted_tokens
        yield f"drafts: {drafted} tokens, of which {right} were right, {right / s.output_tokens:.0%} of the output"
    for kind, n in s.errors.items():
        yield f"failed: {n} x {kind}: {_example(measured.records, kind)}"
    yield from _doubts(measured)


def _doubts(measured: Measured) -> Iterable[str]:
    s = measured.summary
    n_sent = s.n_ok + s.n_failed
    if n_sent < measured.n_planned:
        yield f"not sent: {measured.n_planned - n_sent}"
    if s.n_short:
        yield f"short: {s.n_short} answers have fewer tokens than requested"
    if s.n_silent:
        yield f"silent: {s.n_silent} answers have no text, so they have no TTFT"
    if measured.client_cpu > _BUSY:
        yield f"busy: this client used {measured.client_cpu:.0%} of a processor; its own delays distort the results"
    if s.late_ms is not None and s.late_ms.p99 > _LATE_MS:
        yield f"late: requests were sent up to {s.late_ms.max:.0f} ms after their scheduled time"


def _example(records: Iterable[Record], kind: str) -> str:
    return next(str(r.failure) for r in records if r.failure is not None and r.failure.kind == kind)


def _table(rounds: Sequence[Measured]) -> str:
    heads = ["load", "requests/s", "output tok/s", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99 ms", "failed"]
    columns = [_row(measured) for measured in rounds]
    if any(measured.summary.goodput_per_s is not None for measured in rounds):
        heads.append("goodput")
        for row, measured in zip(columns, rounds, strict=True):
            row.append(f"{measured.summary.goodput_per_s or 0:.2f}")
    if any(measured.ratio is not None for measured in rounds):
        heads.append("/ offline")
        for row, measured in zip(columns, rounds, strict=True):
            row.append("-" if measured.ratio is None else f"{measured.ratio:.2f}")
    return "\n".join(_aligned([heads, *columns]))


def _row(measured: Measured) -> list[str]:
    s = measured.summary
    times = [mark for spread in (s.ttft_ms, s.itl_ms, s.e2e_ms) for mark in _two(spread)]
    return [measured.label, f"{s.requests_per_s:.2f}", f"{s.output_tokens_per_s:.1f}", *times, str(s.n_failed)]


def _two(spread: Spread | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (f"{spread.p50:.1f}", f"{spread.p99:.1f}")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_json(measured: Measured) -> dict[str, Any]:
    """All results of a round, without texts. Times of requests are in milliseconds."""
    return {
        "loop": "open" if measured.open_loop else "closed",
        "level": level_json(measured.level),
        "n_planned": measured.n_planned,
        "client_cpu": measured.client_cpu,
        **asdict(measured.summary),
        "offline": asdict(measured.offline) | {"rate": measured.offline.rate} if measured.offline else None,
        "served_over_offline": measured.ratio,
        "drafts": asdict(measured.drafts) if measured.drafts else None,
        "requests": [_request(record) for record in measured.records],
    }


def _request(record: Record) -> dict[str, Any]:
    common = {"start_ms": _ms(record.start_s), "late_ms": _ms(record.late_s), "asked_tokens": record.asked_tokens}
    if record.failure is not None:
        return {**common, "error": record.failure.kind, "message": str(record.failure)}
    answer = record.answer
    assert answer is not None
    return {
        **common,
        "ttft_ms": None if answer.ttft_s is None else _ms(answer.ttft_s),
        "e2e_ms": _ms(answer.e2e_s),
        "itl_ms": [_ms(gap) for gap in answer.gaps_s],
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "finish_reason": answer.finish,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
