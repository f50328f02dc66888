"""Assembles a server from its parts: scheduler, MLX thread, grammars, API, HTTP server, accept thread.

``running`` starts the parts in order and ends them in order; the command line, the benchmarks and the tests all use it.
``open_models`` and ``configured`` turn the settings into its arguments. This module must not parse flags, handle
signals or set up the log. Only ``open_models`` imports MLX, and late.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mlx_serve import __version__, progress
from mlx_serve.api.endpoints import Api
from mlx_serve.api.grammar_child import GrammarLimits
from mlx_serve.api.grammars import CompilerVocabulary, GrammarCompiler
from mlx_serve.api.response_store import ResponseStore
from mlx_serve.api.serving import Services, Tokenizers
from mlx_serve.api.status import page
from mlx_serve.engine import backend
from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.catalog import Catalog, ModelEntry
from mlx_serve.engine.memory import MemoryBudget
from mlx_serve.engine.ranks.leader import Leader
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.engine.schedule.worker import Worker
from mlx_serve.metrics import Metrics, Observer
from mlx_serve.settings import http
from mlx_serve.settings import models as model_options
from mlx_serve.settings import ranks as ranked
from mlx_serve.settings.config import Config, sampling_defaults
from mlx_serve.values import ApiError, Progress, StartError
from mlx_serve.wire.server import Server
from mlx_serve.wire.server_options import Application, ServerOptions

if TYPE_CHECKING:
    from mlx_serve.engine.cache.disk import DiskCache
    from mlx_serve.engine.models.store import ModelStore
    from mlx_serve.engine.ranks.group import Ranks

log = logging.getLogger("mlx_serve")

# After the worker has stopped, the errors of unfinished requests have this time to reach their clients.
_LAST_WORDS_S = 2.0
# The MLX thread has this time to end its step and write its caches. A thread that hangs would never end.
_WORKER_S = 30.0


class Models(Tokenizers, backend.ModelLoader, Protocol):
    """Where tokenizers and backends come from."""

    def vocabulary(self, entry: ModelEntry) -> CompilerVocabulary:
        """A model's tokens, for grammars."""

    def close(self) -> None:
        """Unload all models."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up. ``url`` is the base URL for OpenAI's clients, or the path of the Unix socket. ``app`` is the
    result of ``wrap``.
    """

    app: Application
    scheduler: Scheduler
    worker: Worker
    http: Server
    url: str
    draining: threading.Event

    def wait_until_ready(self, stop: threading.Event | None = None) -> None:
        """Wait until the first model is loaded or ``stop`` is set. Raises StartError when it cannot be loaded."""
        loaded = threading.Event()
        self.worker.ready.add_done_callback(lambda _: loaded.set())
        while not loaded.wait(0.1):
            if stop is not None and stop.is_set():
                return
        error = self.worker.ready.exception()
        if error is not None:
            cause = error.__cause__ if isinstance(error, ApiError) and error.__cause__ else error
            raise StartError(str(cause)) from error

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and give running ones up to ``timeout_s`` seconds. After a fault, return at once."""
        self.draining.set()
        if self.worker.fault is not None:
            return
        log.info("ending: no new requests; running ones get %g s", timeout_s)
        if not self.http.drain(timeout_s):
            log.warning("some requests did not end in time")


@contextmanager
def running(
    catalog: Catalog,
    models: Models,
    options: ServerOptions,
    *,
    limits: Limits | None = None,
    services: Callable[..., Services] = Services,
    grammar_limits: GrammarLimits | None = None,
    first_model: str | None = None,
    wrap: Callable[[Api], Application] = lambda api: api,
    peers: Leader | None = None,
    on_fault: Callable[[], None] = lambda: None,
) -> Iterator[Running]:
    """A server that answers while the block runs. All its threads and sockets are closed afterwards.

    ``services`` makes the API's Services from the parts that are made here. ``first_model`` is loaded at once.
    ``wrap`` returns the application that the HTTP server calls, given the API. Raises StartError when the address is
    taken, and EngineLost at the end of the block when the MLX thread has failed or does not end.
    """
    limits = limits or Limits()
    scheduler = Scheduler(models, limits)
    worker = Worker(scheduler, first_model, models.close, peers=peers, on_fault=on_fault)
    grammars = GrammarCompiler(models.vocabulary, grammar_limits)
    draining = threading.Event()
    api = Api(
        services(
            scheduler=scheduler,
            catalog=catalog,
            tokenizers=models,
            grammars=grammars,
            max_queue=limits.max_queue,
            draining=draining.is_set,
            started=worker.ready.done,
        )
    )
    app = wrap(api)
    server = http.bind(app, replace(options, on_end=api.observe))
    accepting = threading.Thread(target=server.serve_forever, name="http-accept")
    worker.start()
    accepting.start()
    try:
        yield Running(app, scheduler, worker, server, _url(server.address, options), draining)
    finally:
        has_ended = worker.stop(_WORKER_S)
        # Stopping the worker gave every waiting request an error, which still has to be sent.
        server.drain(_LAST_WORDS_S)
        server.close()
        grammars.close()
        accepting.join()
    _check_end(worker.fault, has_ended=has_ended)


def _check_end(fault: BaseException | None, *, has_ended: bool) -> None:
    if fault is not None:
        said = str(fault) if isinstance(fault, EngineLost) else repr(fault)
        raise EngineLost(f"can't go on: {said}") from fault
    if not has_ended:
        raise EngineLost(f"the MLX thread did not end within {_WORKER_S:g} s")


def _url(address: tuple[str, int] | str, options: ServerOptions) -> str:
    if isinstance(address, str):
        return f"unix:{address}"
    scheme = "https" if options.tls_cert else "http"
    host, port = address
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"


def configured(
    settings: Config,
    catalog: Catalog,
    models: Models,
    *,
    peers: Leader | None = None,
    on_fault: Callable[[], None] = lambda: None,
    listening: socket.socket | None = None,
    observers: Sequence[Observer] = (),
) -> AbstractContextManager[Running]:
    """The server that the settings describe, as ``running`` gives it. Raises StartError.

    ``listening``: the socket that it accepts on, if another process holds it. ``observers`` are told of all requests.
    """
    return running(
        catalog,
        models,
        replace(http.options(settings), listening=listening),
        limits=limits(settings),
        services=partial(services(settings), metrics=Metrics(observers=observers)),
        first_model=catalog.default.name if catalog.default is not None else None,
        peers=peers,
        on_fault=on_fault,
    )


def limits(settings: Config) -> Limits:
    """The scheduler's bounds."""
    return Limits(
        max_queue=settings.max_queue,
        max_gap_s=settings.max_itl_ms / 1000,
        queue_timeout_s=settings.queue_timeout,
        request_timeout_s=settings.request_timeout,
        model_ttl_s=settings.model_ttl or 0.0,
    )


def services(settings: Config) -> Callable[..., Services]:
    """A function that makes the endpoints' Services from the parts that ``running`` makes."""
    return partial(
        Services,
        fingerprint=_fingerprint(),
        defaults=sampling_defaults(settings),
        template_options=settings.chat_template_args,
        max_model_len=settings.max_model_len,
        adapter=settings.adapter_path,
        draft_model=settings.draft_model,
        share_prefixes=settings.share_prefixes,
        max_json_values=settings.max_json_values,
        page=page.files() if settings.ui else {},
        version=__version__,
        responses=ResponseStore(
            settings.response_store_size, settings.response_store_bytes, settings.response_store_ttl
        ),
    )


def _fingerprint() -> str:
    """OpenAI's system_fingerprint. It changes when the software that generates changes."""
    parts = [__version__, platform.platform(), *(version(name) for name in ("mlx", "mlx-lm"))]
    return "fp_" + hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def make_catalog(settings: Config) -> Catalog:
    """The models that the settings describe; those of the hub are downloaded. Raises StartError, NotAModelError."""
    from mlx_serve.engine.load_errors import LoadError

    try:
        return model_options.catalog(settings, *_finding())
    except LoadError as error:
        raise StartError(str(error)) from error


def _finding() -> tuple[model_options.Locate, Progress]:
    """What finds a model's directory, and what reports how far a download has come."""
    from mlx_serve.engine.models.store import locate

    report = progress.printed(sys.stderr) if sys.stderr.isatty() else progress.logged(log)
    # On a terminal, huggingface_hub draws its own progress bars.
    find = locate if sys.stderr.isatty() else partial(locate, bars=partial(progress.hub_bars, report))
    return find, report


def open_models(settings: Config, ranks: Ranks | None = None) -> tuple[Catalog, ModelStore]:
    """The catalog and the store of MLX models that the settings describe. Raises StartError."""
    from mlx_serve.engine.load_errors import LoadError
    from mlx_serve.engine.models.store import device_bytes

    catalog = make_catalog(settings)
    try:
        find, report = _finding()
        n_bytes = device_bytes()
        if ranks is not None:
            ranked.check(settings, catalog)
            n_bytes = ranked.greet(ranks, settings, n_bytes)
        store = _store(settings, catalog, n_bytes, model_options.draft_path(settings, find), ranks, report)
        if catalog.default is not None:
            store.check(catalog.default)
    except LoadError as error:
        raise StartError(str(error)) from error
    return catalog, store


def _store(
    settings: Config, catalog: Catalog, n_bytes: int, draft_path: Path | None, ranks: Ranks | None, report: Progress
) -> ModelStore:
    from mlx_serve.engine.cache.kinds import Quantization
    from mlx_serve.engine.generate.batch import BatchOptions
    from mlx_serve.engine.models.sharding import Sharding
    from mlx_serve.engine.models.store import ModelStore
    from mlx_serve.engine.models.wired import WiredLimit, recommended_bytes

    tokenizer_config: dict[str, object] = {"trust_remote_code": settings.trust_remote_code}
    if settings.chat_template:
        tokenizer_config["chat_template"] = settings.chat_template
    quantization = None
    if settings.kv_bits is not None:
        quantization = Quantization(settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start)
    return ModelStore(
        catalog,
        tokenizer_config=tokenizer_config,
        use_default_chat_template=settings.use_default_chat_template,
        trust_remote_code=settings.trust_remote_code,
        draft_path=draft_path,
        batch=BatchOptions(
            settings.decode_concurrency, settings.prompt_concurrency, settings.prefill_step_size, settings.draft_ngram
        ),
        quantization=quantization,
        prompt_cache_size=settings.prompt_cache_size,
        prompt_cache_bytes=settings.prompt_cache_bytes,
        prompt_cache_bits=settings.prompt_cache_bits,
        budget=memory_budget(settings, n_bytes),
        disk=_disk_cache(settings),
        sharding=Sharding(ranks, settings.pipeline) if ranks is not None else None,
        wired=WiredLimit(settings.wired_limit, recommended_bytes()),
        progress=report,
    )


def _disk_cache(settings: Config) -> DiskCache | None:
    from mlx_serve.engine.cache.disk import DiskCache

    if settings.prompt_cache_dir is None:
        return None
    return DiskCache(Path(settings.prompt_cache_dir), settings.prompt_cache_disk_bytes)


def memory_budget(settings: Config, device_bytes: int) -> MemoryBudget:
    """The memory limits, from the settings and the device's recommendation."""
    if settings.memory_bytes is not None:
        return MemoryBudget(settings.memory_bytes, settings.kv_cache_bytes, settings.max_loaded_models)
    # The operator did not choose this total, so it must not refuse a model or a request that might fit.
    least = device_bytes // 8
    return MemoryBudget(device_bytes, settings.kv_cache_bytes, settings.max_loaded_models, least)
