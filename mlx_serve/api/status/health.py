"""How the server is: for routers and launchd (/health, /ready), for the page (/stats), for Prometheus (/metrics)."""

from __future__ import annotations

from mlx_serve.api.routes import Route
from mlx_serve.api.serving import Services
from mlx_serve.api.shapes import json_response
from mlx_serve.api.status import prometheus, stats
from mlx_serve.engine.schedule.scheduler import Health
from mlx_serve.values import RawRequest, Response


def health(services: Services, request: RawRequest) -> Response:
    """GET /health: 200 when requests are served, 503 with the reason when they are not."""
    state = services.scheduler.health()
    status = "draining" if services.draining() else state.status
    body = {
        "status": status,
        "model": state.models[-1] if state.models else None,
        "models": list(state.models),
        "waiting": state.waiting,
        "running": state.running,
    }
    if state.reason:
        body["reason"] = state.reason
    return json_response(body, status=200 if status == "ok" else 503)


def ready(services: Services, request: RawRequest) -> Response:
    """GET /ready: 200 when a request would be taken now, 503 with the reason when it would not."""
    reason = _not_ready(services, services.scheduler.health())
    return json_response({"status": reason or "ready"}, status=503 if reason else 200)


def _not_ready(services: Services, state: Health) -> str:
    if services.draining():
        return "draining"
    if state.status != "ok":
        return state.status
    # Not whether a model is in memory now: one that --model-ttl unloaded comes back with the next request alone.
    if not services.started():
        return "loading"
    is_full = services.max_queue is not None and state.waiting >= services.max_queue
    return "queue_full" if is_full else ""


def live_stats(services: Services, request: RawRequest) -> Response:
    """GET /stats: what runs, how fast, and in how much memory, at this moment."""
    status = "draining" if services.draining() else services.scheduler.health().status
    return json_response(stats.as_object(services.metrics, services.scheduler.stats(), status, services.version))


def prometheus_metrics(services: Services, request: RawRequest) -> Response:
    """GET /metrics, in Prometheus's text format. Raises ApiError 501 without prometheus-client."""
    status = services.scheduler.health().status
    return prometheus.respond(services.metrics, services.scheduler.stats(), status, services.version)


ROUTES = (
    # Routers, the page and Prometheus ask every few seconds.
    Route("GET", "/health", health, is_open=True, is_quiet=True),
    Route("GET", "/ready", ready, is_open=True, is_quiet=True),
    Route("GET", "/stats", live_stats, is_quiet=True),
    Route("GET", "/metrics", prometheus_metrics, is_quiet=True),
)
