"""The command: reads the flags, builds every part, hands each what it needs, and ends them in order.

Start-up faults are one line on stderr and a non-zero exit status. MLX is imported only here, late, after OpenBLAS.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import platform
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, cast

from mlx_serve import __version__, blas, logs, progress, signals
from mlx_serve.api.body import Defaults
from mlx_serve.api.endpoints import Api
from mlx_serve.api.grammars import GrammarCompiler, Vocabulary
from mlx_serve.api.response_store import ResponseStore
from mlx_serve.api.serving import Grammars, Services, Tokenizers
from mlx_serve.api.status import page
from mlx_serve.demo import model as demo
from mlx_serve.engine import backend
from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.catalog import Catalog, ModelEntry, NotAModelError, context_limit
from mlx_serve.engine.memory import MemoryBudget
from mlx_serve.engine.ranks.leader import Leader
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.engine.schedule.worker import Peers, Worker
from mlx_serve.settings import config, http
from mlx_serve.settings import models as model_options
from mlx_serve.settings import ranks as ranked
from mlx_serve.settings.config import Config
from mlx_serve.settings.flags import did_you_mean
from mlx_serve.values import ApiError, StartError
from mlx_serve.wire.server import Server

if TYPE_CHECKING:
    from mlx_serve.engine.cache.disk import DiskCache
    from mlx_serve.engine.models.store import ModelStore
    from mlx_serve.engine.ranks.group import Ranks

log = logging.getLogger("mlx_serve")

# The sub-commands: a module with ``main(argv) -> exit status`` for each, imported when it is called.
# Without one of them the server is started.
COMMANDS: dict[str, str] = {
    "bench": "mlx_serve.commands.bench.command",
    "chat": "mlx_serve.commands.chat",
    "doctor": "mlx_serve.commands.doctor.command",
    "install-service": "mlx_serve.commands.service.command",
    "models": "mlx_serve.commands.models",
}
# Models, libraries, the log: files that are open besides connections.
_OTHER_DESCRIPTORS = 256
# Time for the errors of requests that did not end in time to reach their clients.
_LAST_WORDS_S = 2.0
# Time for the MLX thread to end its step and write what it keeps. One that hangs never would.
_WORKER_S = 30.0


class Models(Tokenizers, backend.Models, Protocol):
    """Where tokenizers and backends come from."""

    def vocabulary(self, entry: ModelEntry) -> Vocabulary:
        """A model's tokens, for grammars."""

    def close(self) -> None:
        """Let all models go."""


def run() -> NoReturn:
    """The console script: ``main``, and an end without the interpreter's own.

    Before Python 3.13 a join returns while its thread is still on its way out. What MLX keeps for a thread is let go
    then, with the GIL, and when that falls into the interpreter's finalization the process aborts.
    """
    for stream in (sys.stdin, sys.stdout):
        # A file name or a model's answer may hold what the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        # A shell has what it starts in the background ignore it, and the commands end by it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except SystemExit as usage:  # argparse's --help, --version and usage errors; SIGTERM while something is made
        status = usage.code if isinstance(usage.code, int) else 1
    except KeyboardInterrupt:  # before ``serve`` has its own handler: while a model is fetched or built
        status = 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read the output, as ``head``, has enough
        status = 128 + signal.SIGPIPE
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed from the start
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """The ``mlx-serve`` command; gives the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return int(import_module(COMMANDS[argv[0]]).main(argv[1:]))
    if argv and argv[0] and not argv[0].startswith("-"):
        near = did_you_mean(argv[0], COMMANDS) or f": there are {', '.join(COMMANDS)}; --model names a model"
        print(f"mlx-serve: no command {argv[0]!r}{near}", file=sys.stderr)
        return 2
    try:
        settings = config.from_args(argv)
    except StartError as error:
        return _refuse(error)
    logs.configure(settings.log_level, cast('Literal["text", "json"]', settings.log_format))
    library = blas.preload_openblas()
    if library is not None:
        log.info("MLX's CPU backend uses OpenBLAS (%s)", library)
    try:
        ranks = ranked.join()
        catalog, store = open_models(settings, ranks)
        if ranks is None:
            serve(settings, catalog, store)
        else:
            _serve_or_follow(settings, catalog, store, ranks)
    except (StartError, EngineLost, demo.DemoError, NotAModelError) as error:
        return _refuse(error)
    return 0


def _refuse(error: Exception) -> int:
    """Say why there is no server any more; gives the exit status."""
    logs.say(f"mlx-serve: {error}")
    return 1


def _serve_or_follow(settings: Config, catalog: Catalog, store: ModelStore, ranks: Ranks) -> None:
    ranked.watch(ranks, settings.rank_timeout)
    if ranks.rank == 0:
        stop = threading.Event()
        leader = Leader(store, ranks, stop.set, settings.prompt_cache_bytes)
        serve(settings, catalog, leader, peers=leader, stop=stop)
    else:
        signals.stop_on_signals(ranks.leaving)
        ranked.follow(store, ranks)


def open_models(settings: Config, ranks: Ranks | None = None) -> tuple[Catalog, ModelStore]:
    """The catalog and the store of MLX models that the flags describe. Raises StartError."""
    from mlx_serve.engine.generate.batch import BatchOptions
    from mlx_serve.engine.generate.single import SingleOptions
    from mlx_serve.engine.load_errors import LoadError
    from mlx_serve.engine.models.sharding import Sharding
    from mlx_serve.engine.models.store import ModelStore, device_bytes, locate

    report = progress.printed(sys.stderr) if sys.stderr.isatty() else progress.logged(log)
    # On a terminal the hub draws bars of its own.
    find = locate if sys.stderr.isatty() else partial(locate, bars=partial(progress.hub_bars, report))
    try:
        catalog = model_options.catalog(settings, find, report)
        n_bytes = device_bytes()
        if ranks is not None:
            ranked.check(settings, catalog)
            n_bytes = ranked.greet(ranks, settings, n_bytes)
        draft_path = model_options.draft_path(settings, find)
        tokenizer_config: dict[str, object] = {"trust_remote_code": settings.trust_remote_code}
        if settings.chat_template:
            tokenizer_config["chat_template"] = settings.chat_template
        store = ModelStore(
            catalog,
            tokenizer_config=tokenizer_config,
            use_default_chat_template=settings.use_default_chat_template,
            trust_remote_code=settings.trust_remote_code,
            draft_path=draft_path,
            batch=BatchOptions(settings.decode_concurrency, settings.prompt_concurrency, settings.prefill_step_size),
            single=SingleOptions(
                settings.prefill_step_size, settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start
            ),
            prompt_cache_size=settings.prompt_cache_size,
            prompt_cache_bytes=settings.prompt_cache_bytes,
            budget=memory_budget(settings, n_bytes),
            disk=_disk_cache(settings),
            sharding=Sharding(ranks, settings.pipeline) if ranks is not None else None,
            progress=report,
        )
        if catalog.default is not None:
            store.check(catalog.default)
    except LoadError as error:
        raise StartError(str(error)) from error
    return catalog, store


def _disk_cache(settings: Config) -> DiskCache | None:
    from mlx_serve.engine.cache.disk import DiskCache

    if settings.prompt_cache_dir is None:
        return None
    return DiskCache(Path(settings.prompt_cache_dir), settings.prompt_cache_disk_bytes)


def memory_budget(settings: Config, device_bytes: int) -> MemoryBudget:
    """What may be in memory, of what was set and what the device recommends."""
    # What somebody set is kept in the moments of copying too.
    kv_copies = 1 if settings.memory_bytes is None and settings.kv_cache_bytes is None else 2
    if settings.memory_bytes is not None:
        return MemoryBudget(settings.memory_bytes, settings.kv_cache_bytes, settings.max_loaded_models, kv_copies)
    # Nobody chose this total: it must not refuse a model or a request that might go well.
    least = device_bytes // 8
    return MemoryBudget(device_bytes, settings.kv_cache_bytes, settings.max_loaded_models, kv_copies, least)


def limits(settings: Config) -> Limits:
    """The scheduler's bounds."""
    return Limits(
        max_queue=settings.max_queue,
        max_gap_s=settings.max_itl_ms / 1000,
        queue_timeout_s=settings.queue_timeout,
        request_timeout_s=settings.request_timeout,
        model_ttl_s=settings.model_ttl or 0.0,
    )


def serve(
    settings: Config,
    catalog: Catalog,
    models: Models,
    *,
    peers: Peers | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Serve until ``stop`` is set, by a signal or otherwise.

    Raises StartError when the port is taken or the first model can't be loaded, EngineLost when a peer is gone.
    """
    stop = stop or threading.Event()
    scheduler = Scheduler(models, limits(settings))
    first = catalog.default
    worker = Worker(scheduler, first.name if first is not None else None, models.close, peers=peers, on_fault=stop.set)
    draining = threading.Event()
    grammars = GrammarCompiler(models.vocabulary)
    app = Api(services(settings, catalog, models, scheduler, grammars, draining.is_set, worker.ready.done))
    server = http.bind(settings, app, app.observe)
    _warn_of_strangers(settings)
    _raise_descriptor_limit(settings.max_connections)
    signals.stop_on_signals(stop)
    accepting = threading.Thread(target=server.serve_forever, name="http-accept")
    worker.start()
    accepting.start()
    try:
        _wait_until_ready(worker, stop)
        if not stop.is_set():
            log.info("%s", ready_line(settings, catalog, server))
            _warn_of_nothing(catalog)
        stop.wait()
        draining.set()
        if worker.fault is None:
            _drain(server, settings.drain_timeout)
    finally:
        has_ended = worker.stop(_WORKER_S)
        # Whoever still waited has an error to read now.
        server.drain(_LAST_WORDS_S)
        server.close()
        grammars.close()
        accepting.join()
    if worker.fault is not None:
        said = str(worker.fault) if isinstance(worker.fault, EngineLost) else repr(worker.fault)
        raise EngineLost(f"can't go on: {said}") from worker.fault
    if not has_ended:
        raise EngineLost(f"the MLX thread did not end within {_WORKER_S:g} s")


def _drain(server: Server, timeout_s: float) -> None:
    log.info("ending: no new requests; running ones get %g s", timeout_s)
    if not server.drain(timeout_s):
        log.warning("some requests did not end in time")


def services(
    settings: Config,
    catalog: Catalog,
    models: Models,
    scheduler: Scheduler,
    grammars: Grammars,
    draining: Callable[[], bool] = lambda: False,
    started: Callable[[], bool] = lambda: True,
) -> Services:
    """What the endpoints work with."""
    return Services(
        scheduler=scheduler,
        catalog=catalog,
        tokenizers=models,
        fingerprint=_fingerprint(),
        defaults=Defaults(
            max_tokens=settings.max_tokens,
            temperature=settings.temp,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            n_draft_tokens=settings.num_draft_tokens,
        ),
        template_options=settings.chat_template_args,
        max_model_len=settings.max_model_len,
        adapter=settings.adapter_path,
        draft_model=settings.draft_model,
        draining=draining,
        started=started,
        grammars=grammars,
        share_prefixes=settings.share_prefixes,
        max_queue=settings.max_queue,
        max_json_values=settings.max_json_values,
        page=page.files() if settings.ui else {},
        version=__version__,
        responses=ResponseStore(
            settings.response_store_size, settings.response_store_bytes, settings.response_store_ttl
        ),
    )


def _warn_of_strangers(settings: Config) -> None:
    if not http.is_loopback(settings) and not http.api_keys(settings):
        log.warning("anyone who can reach %s may use this server: set --api-key-file", settings.host)


def _warn_of_nothing(catalog: Catalog) -> None:
    if catalog.default is None and not catalog.entries():
        log.warning("there is no model to serve yet: name one with --model, or try --demo")


def _raise_descriptor_limit(n_connections: int) -> None:
    """macOS gives a process 256 descriptors by default: fewer than --max-connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n_connections + _OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        text = "%d files may be open at a time (ulimit -Hn), which is too few for --max-connections %d: %d are needed"
        log.warning(text, most, n_connections, wanted)


def _wait_until_ready(worker: Worker, stop: threading.Event) -> None:
    """Until the first model is loaded, or a signal came, or the load failed (StartError)."""
    loaded = threading.Event()
    worker.ready.add_done_callback(lambda _: loaded.set())
    while not loaded.wait(0.1):
        if stop.is_set():
            return
    error = worker.ready.exception()
    if error is not None:
        cause = error.__cause__ if isinstance(error, ApiError) and error.__cause__ else error
        raise StartError(str(cause)) from error


def ready_line(settings: Config, catalog: Catalog, server: Server) -> str:
    """What the operator wants to know once: the address, the models, the limits in force."""
    default = catalog.default
    model = default.name if default is not None else "none yet; loaded on request"
    n_more = len(catalog.models()) - 1
    if n_more > 0:
        model += f" and {n_more} more"
    context = context_limit(default, settings.max_model_len) if default is not None else settings.max_model_len
    limits = [
        f"context {'unknown' if context is None else context} tokens",
        f"{settings.decode_concurrency} sequences at a time",
        f"queue {settings.max_queue}",
        f"body {settings.max_body_bytes} bytes",
        f"{settings.max_connections} connections",
    ]
    scheme = "https" if settings.tls_cert else "http"
    return f"ready: {_url(server.address, scheme)} | model: {model} | {', '.join(limits)}"


def _url(address: tuple[str, int] | str, scheme: str) -> str:
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"


def _fingerprint() -> str:
    """OpenAI's system_fingerprint: changes when what generates changes."""
    parts = [__version__, platform.platform(), *(version(name) for name in ("mlx", "mlx-lm"))]
    return "fp_" + hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
