"""What the live view shows, as one JSON object; and the counting of requests as the HTTP layer reports their ends.

Reads the metrics and the engine's figures. Nothing of a prompt or an answer is in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlx_serve.metrics import ErrorEntry, Histogram, Metrics, Trace
from mlx_serve.values import EngineStats
from mlx_serve.wire.request_log import RequestLog

# Requests listed one by one; the number of all is beside them.
MAX_LISTED = 100
# The log's status for a client that left before its answer.
CLIENT_GONE = 499

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# The reasons for refusing malformed HTTP. The log has the full messages.
_REFUSED = {
    400: "malformed_request",
    408: "request_timeout",
    411: "length_required",
    413: "request_too_large",
    414: "uri_too_long",
    417: "expectation_failed",
    431: "headers_too_large",
}
# All reasons of refusals and failures: the errors' codes, and their types where they have no code.
REASONS = (
    *_REFUSED.values(),
    *("refused", "server_error", "invalid_request_error", "authentication_error", "permission_error"),
    *("not_found_error", "rate_limit_error", "overloaded_error"),
    *("context_length_exceeded", "draining", "host_not_allowed", "invalid_api_key", "kv_cache_exceeded"),
    *("method_not_supported", "metrics_not_installed", "missing_required_parameter", "model_busy", "model_not_found"),
    *("model_too_large", "origin_not_allowed", "overloaded", "previous_response_not_found", "queue_timeout"),
    *("rate_limit_exceeded", "too_many_bytes", "too_many_connections", "too_many_json_values", "too_many_logprobs"),
    "unsupported_media_type",
)
# Their 503 is an answer, and no failure: it says how the server is.
_STATES = ("/health", "/ready")


def begin(metrics: Metrics) -> None:
    """Show every reason from the start, so that a rate sees the first one too."""
    for reason in REASONS:
        metrics.refusals.add(0, reason)


def observe(metrics: Metrics, entry: RequestLog) -> None:
    """Count a request that has ended, under its route's path: a client can ask for any number of paths."""
    route = entry.route
    method = entry.method if entry.method in _METHODS else "other"
    metrics.http_requests.add(1, method, route, str(entry.status))
    if route in _STATES:
        return
    if entry.status == CLIENT_GONE:
        metrics.cancellations.add(1, route)
    elif reason := _reason(entry):
        metrics.record_error(ErrorEntry(time.time(), route, entry.status, reason, entry.id))


def _reason(entry: RequestLog) -> str:
    """Why it failed, or ""; a stream may fail after its 200."""
    if error := entry.notes.get("error"):
        return str(error)
    if "broken" in entry.notes or entry.status >= 500:
        return "server_error"
    return _REFUSED.get(entry.status, "refused") if entry.status >= 400 else ""


def as_object(metrics: Metrics, engine: EngineStats, status: str, version: str) -> dict[str, Any]:
    """The body of GET /stats (docs/metrics.md). Durations are in seconds."""
    now = metrics.clock()
    traces = metrics.running()
    return {
        "version": version,
        "status": status,
        "uptime_s": round(now - metrics.began, 3),
        "waiting": engine.waiting,
        "running": engine.running,
        "paused": engine.paused,
        "preemptions": engine.preemptions,
        "models": [asdict(model) for model in engine.models],
        "memory": {
            "weights_bytes": engine.weights_bytes,
            "kv_bytes": engine.kv_bytes,
            "prefix_cache_bytes": engine.prefix_cache_bytes,
            "active_bytes": engine.active_bytes,
            "peak_bytes": engine.peak_bytes,
            "cache_bytes": engine.cache_bytes,
            "wired_limit_bytes": engine.wired_limit_bytes,
            "footprint_bytes": engine.footprint_bytes,
            "soft_mark_bytes": engine.soft_mark_bytes,
            "hard_mark_bytes": engine.hard_mark_bytes,
            "pressure": engine.pressure,
        },
        "prefix_cache": {
            "queried_tokens": int(metrics.prefix_queries.total()),
            "hit_tokens": int(metrics.prefix_hits.total()),
            "entries": engine.prefix_cache_entries,
            "evictions": engine.evictions,
        },
        "drafts": {"drafted_tokens": engine.drafted, "accepted_tokens": engine.accepted},
        "totals": {
            "http_requests": int(metrics.http_requests.total()),
            "prompt_tokens": int(metrics.prompt_tokens.total()),
            "cached_tokens": int(metrics.cached_tokens.total()),
            "output_tokens": int(metrics.generation_tokens.total()),
            "cancelled": int(metrics.cancellations.total()),
            "refused": int(metrics.refusals.total()),
        },
        "latency": {
            "first_token_s": _quantiles(metrics.first_token),
            "inter_token_s": _quantiles(metrics.inter_token),
            "request_s": _quantiles(metrics.whole),
            "queue_s": _quantiles(metrics.queue_time),
        },
        "n_requests": len(traces),
        "requests": [_request(trace, now) for trace in traces[:MAX_LISTED]],
        "errors": [asdict(entry) for entry in metrics.errors()],
    }


def _quantiles(histogram: Histogram) -> dict[str, float | int | None]:
    """Of the latest observations."""
    recent = histogram.recent()
    return {"n": len(recent), "p50": _quantile(recent, 0.5), "p95": _quantile(recent, 0.95)}


def _quantile(rising: Sequence[float], q: float) -> float | None:
    return round(rising[min(len(rising) - 1, int(q * len(rising)))], 6) if rising else None


def _request(trace: Trace, now: float) -> dict[str, Any]:
    return {
        "id": trace.request_id,
        "model": trace.model,
        "route": trace.route,
        "phase": trace.phase,
        "sequences": trace.n_sequences,
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "prefilled_tokens": trace.prefilled_tokens,
        "output_tokens": trace.output_tokens,
        "tokens_per_s": _speed(trace),
        "first_token_s": None if trace.first_token_at is None else round(trace.first_token_at - trace.began, 4),
        "age_s": round(now - trace.began, 3),
    }


def _speed(trace: Trace) -> float | None:
    """Output tokens per second, from the first token to the latest."""
    if trace.first_token_at is None or trace.last_token_at <= trace.first_token_at:
        return None
    return round((trace.output_tokens - 1) / (trace.last_token_at - trace.first_token_at), 2)
