"""The metrics in Prometheus's text format, by prometheus-client, which is an extra: the counting works without it.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/. Names: docs/metrics.md.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlx_serve.machine import installed
from mlx_serve.metrics import Counter, Histogram, Metrics
from mlx_serve.values import ApiError, EngineStats, Response

PREFIX = "mlx_serve:"
# The format is fixed, since every Prometheus reads it. Do not echo a client's requested version in the response header.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Whose versions build_info tells.
_PACKAGES = ("mlx", "mlx-lm")
_GAUGES = {
    "kv_cache_bytes": ("kv_bytes", "Bytes that the running sequences' KV caches are expected to take."),
    "prefix_cache_bytes": ("prefix_cache_bytes", "Bytes of the KV caches kept for reuse."),
    "prefix_cache_entries": ("prefix_cache_entries", "KV caches kept for reuse."),
    "weights_bytes": ("weights_bytes", "Bytes of the loaded models' weights."),
    "memory_active_bytes": ("active_bytes", "Bytes that MLX's arrays take."),
    "memory_peak_bytes": ("peak_bytes", "The most bytes that MLX's arrays took."),
    "memory_cache_bytes": ("cache_bytes", "Bytes that MLX keeps for its next arrays."),
    "memory_wired_limit_bytes": ("wired_limit_bytes", "Bytes of arrays that Metal keeps resident."),
    "memory_footprint_bytes": ("footprint_bytes", "Bytes that the process holds by the system's count."),
    "memory_soft_mark_bytes": ("soft_mark_bytes", "Bytes from which on nothing new starts; 0: no limit."),
    "memory_hard_mark_bytes": ("hard_mark_bytes", "Bytes from which on running jobs make room; 0: no limit."),
}


def respond(metrics: Metrics, engine: EngineStats, status: str, version: str) -> Response:
    """Everything that is counted, and what is known of the process.

    Raises ApiError 501 when prometheus-client is not installed.
    """
    try:
        from prometheus_client import generate_latest, metrics_core
    except ImportError:
        raise ApiError(
            501,
            "GET /metrics needs the package prometheus-client: pip install 'mlx-serve-http[metrics]'. "
            "GET /stats has the same figures as JSON without it.",
            type="server_error",
            code="metrics_not_installed",
        ) from None
    for model in engine.models:
        metrics.know_model(model.name)
    families = [*_families(metrics_core, metrics, engine, status), *_process(metrics_core, metrics, version)]
    return Response(200, generate_latest(_Collected(families)), CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class _Collected:
    """A registry for prometheus-client. The library's own registry is a global, so it is not used."""

    families: list[Any]

    def collect(self) -> list[Any]:
        return self.families


def _families(core: Any, metrics: Metrics, engine: EngineStats, status: str) -> Iterator[Any]:
    for counter in metrics.counters():
        yield _counter(core, counter)
    for histogram in metrics.histograms():
        yield _histogram(core, histogram)
    yield _per_model(core, "num_requests_waiting", "Sequences that wait.", engine, "waiting")
    yield _per_model(core, "num_requests_running", "Sequences that run.", engine, "running")
    yield _per_model(core, "num_requests_paused", "Sequences that pause for lack of memory.", engine, "paused")
    for name, (attribute, text) in _GAUGES.items():
        yield core.GaugeMetricFamily(PREFIX + name, text, getattr(engine, attribute))
    pauses = "How often a sequence paused for lack of memory."
    yield core.CounterMetricFamily(PREFIX + "num_preemptions", pauses, engine.preemptions)
    yield core.CounterMetricFamily(PREFIX + "prefix_cache_evictions", "KV caches given up for room.", engine.evictions)
    yield core.CounterMetricFamily(PREFIX + "draft_tokens", "Tokens that were drafted.", engine.drafted)
    yield core.CounterMetricFamily(PREFIX + "draft_tokens_accepted", "Drafted tokens that were right.", engine.accepted)
    yield core.GaugeMetricFamily(PREFIX + "engine_up", "1 while the engine's thread lives.", int(status != "stopped"))
    stalled = "1 while a step of the engine's thread takes far longer than steps do."
    yield core.GaugeMetricFamily(PREFIX + "engine_stalled", stalled, int(status == "stalled"))


def _process(core: Any, metrics: Metrics, version: str) -> Iterator[Any]:
    """What Prometheus's clients tell of every process. Their collector knows Linux alone."""
    yield core.CounterMetricFamily("process_cpu_seconds", "Seconds of processor time.", time.process_time())
    yield core.GaugeMetricFamily("process_start_time_seconds", "Start, as Unix time.", metrics.started_at)
    # Listing the folder takes a descriptor of its own.
    yield core.GaugeMetricFamily("process_open_fds", "Open file descriptors.", len(os.listdir("/dev/fd")) - 1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield core.GaugeMetricFamily("process_max_fds", "The most file descriptors that may be open.", most)
    labels = ("version", "python", *(package.replace("-", "_") for package in _PACKAGES))
    build = core.GaugeMetricFamily(PREFIX + "build_info", "1, with versions.", labels=labels)
    build.add_metric((version, platform.python_version(), *map(_version_of, _PACKAGES)), 1)
    yield build


@cache
def _version_of(package: str) -> str:
    """Read once: each reading opens files."""
    return installed(package) or ""


def _counter(core: Any, counter: Counter) -> Any:
    family = core.CounterMetricFamily(PREFIX + counter.name, counter.help, labels=counter.labels)
    for values, total in counter.series().items():
        family.add_metric(values, total)
    return family


def _histogram(core: Any, histogram: Histogram) -> Any:
    family = core.HistogramMetricFamily(PREFIX + histogram.name, histogram.help, labels=histogram.labels)
    for values, buckets in histogram.series().items():
        pairs = [(_le(bound), count) for bound, count in zip(buckets.bounds, buckets.counts, strict=True)]
        family.add_metric(values, pairs, buckets.sum)
    return family


def _le(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)


def _per_model(core: Any, name: str, help: str, engine: EngineStats, attribute: str) -> Any:
    """A series for each loaded model; what belongs to none (it is not loaded yet) has an empty name."""
    family = core.GaugeMetricFamily(PREFIX + name, help, labels=("model_name",))
    rest = getattr(engine, attribute)
    for model in engine.models:
        family.add_metric((model.name,), getattr(model, attribute))
        rest -= getattr(model, attribute)
    if rest > 0 or not engine.models:
        family.add_metric(("",), max(0, rest))
    return family
