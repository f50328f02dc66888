"""The ``mlx-serve`` command: reads the flags, sets up the log and the signals, and runs a server until it must end.

A start-up fault is one line on stderr and a non-zero exit status. This module must not import MLX before OpenBLAS is
loaded. It must not know how a server is assembled: ``serve`` does.
"""

from __future__ import annotations

import io
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NoReturn, cast

from mlx_serve import blas, logs, neighbours, serve, signals
from mlx_serve.awake import KeepAwake
from mlx_serve.commands import COMMANDS, WORDS, server_flags
from mlx_serve.commands.terminal import bytes_text
from mlx_serve.demo import model as demo
from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.catalog import Catalog, NotAModelError, context_limit
from mlx_serve.engine.ranks.leader import Leader
from mlx_serve.reload import Reload
from mlx_serve.settings import config, http
from mlx_serve.settings import ranks as ranked
from mlx_serve.settings.config import Config
from mlx_serve.settings.flags import did_you_mean
from mlx_serve.supervise.child import Supervisor
from mlx_serve.values import StartError

if TYPE_CHECKING:
    from mlx_serve.engine.models.store import ModelStore
    from mlx_serve.engine.ranks.group import Ranks

log = logging.getLogger("mlx_serve")

# File descriptors besides connections: models, libraries, the log.
_OTHER_DESCRIPTORS = 256


def run(supervisor: Supervisor | None = None) -> NoReturn:
    """The console script: runs ``main``, then exits without the interpreter's finalization.

    Before Python 3.13, a join can return while its thread is still ending. MLX then frees the thread's data, for which
    it takes the GIL. If that happens during finalization, the process aborts.
    """
    for stream in (sys.stdin, sys.stdout):
        # A file name or a model's answer may have characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        # Shells start background jobs with SIGINT ignored. The default handler lets SIGINT end the sub-commands.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main(supervisor=supervisor)
    except SystemExit as usage:  # argparse's --help, --version and usage errors; SIGTERM during start-up
        status = usage.code if isinstance(usage.code, int) else 1
    except KeyboardInterrupt:  # before ``signals`` installs its handler: while a model is downloaded or built
        status = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output (such as ``head``) has closed the pipe
        status = 128 + signal.SIGPIPE
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: the stream was closed when the process started
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None, supervisor: Supervisor | None = None) -> int:
    """Run the ``mlx-serve`` command and return the exit status. ``supervisor``: the parent that holds the port."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if argv and argv[0] in COMMANDS:
        return int(import_module(COMMANDS[argv[0]]).main(argv[1:]))
    if mistyped := _no_command(argv):
        print(f"mlx-serve: {mistyped}", file=sys.stderr)
        return 2
    read = partial(config.from_args, server_flags(argv))
    try:
        settings = read()
    except StartError as error:
        return _refuse(error)
    copy = supervisor.logged if supervisor is not None else None
    logs.configure(settings.log_level, cast('Literal["text", "json"]', settings.log_format), copy=copy)
    library = blas.preload_openblas()
    if library is not None:
        log.info("MLX's CPU backend uses OpenBLAS (%s)", library)
    try:
        ranks = ranked.join()
        catalog, store = serve.open_models(settings, ranks)
        if ranks is None:
            reload = Reload(settings, catalog, read, serve.make_catalog)
            serve_until(threading.Event(), settings, catalog, store, reload, supervisor=supervisor)
        elif supervisor is not None:
            # The other ranks would wait for the old process of this one.
            raise StartError("--supervise does not work with several ranks: start them all again when one has ended")
        else:
            # The other ranks would not read their settings again.
            _serve_or_follow(settings, catalog, store, ranks, Reload(settings, catalog, read, None))
    except (StartError, EngineLost, demo.DemoError, NotAModelError) as error:
        return _refuse(error)
    return 0


def _no_command(argv: Sequence[str]) -> str:
    """The error for a first word that is no command, and does not look like a model (a path, a repository); or ""."""
    word = argv[0] if argv else "-"
    if not word or word in WORDS or word[0] == "-" or "/" in word or "=" in word:
        return ""
    return f"no command {word!r}" + (
        did_you_mean(word, WORDS) or f": there are {', '.join(WORDS)}; `mlx-serve serve {word}` serves a model"
    )


def _refuse(error: Exception) -> int:
    """Print why the server ended or did not start, and return the exit status."""
    logs.say(f"mlx-serve: {error}")
    return 1


def _serve_or_follow(settings: Config, catalog: Catalog, store: ModelStore, ranks: Ranks, reload: Reload) -> None:
    ranked.watch(ranks, settings.rank_timeout)
    if ranks.rank == 0:
        stop = threading.Event()
        leader = Leader(store, ranks, stop.set, settings.prompt_cache_bytes)
        serve_until(stop, settings, catalog, leader, reload, peers=leader)
    else:
        signals.stop_on_signals(ranks.leaving, lambda: log.info("SIGHUP: rank 0 holds the keys and certificates"))
        ranked.follow(store, ranks)


def serve_until(
    stop: threading.Event,
    settings: Config,
    catalog: Catalog,
    models: serve.Models,
    reload: Reload,
    peers: Leader | None = None,
    supervisor: Supervisor | None = None,
) -> None:
    """Serve until ``stop`` is set, by a signal or otherwise.

    Raises StartError when the port is taken or the first model can't be loaded, EngineLost when another rank is gone.
    """
    _raise_descriptor_limit(settings.max_connections)
    signals.stop_on_signals(stop, reload)
    listening = supervisor.listening if supervisor is not None else None
    with (
        _kept_awake(settings) as awake,
        serve.configured(
            settings,
            catalog,
            models,
            peers=peers,
            on_fault=stop.set,
            listening=listening,
            observers=[each for each in (supervisor, awake) if each is not None],
        ) as server,
    ):
        reload.server = server
        if supervisor is not None:
            supervisor.serving(server.scheduler)
        _warn_of_strangers(settings)
        _warn_of_neighbours()
        server.wait_until_ready(stop)
        if not stop.is_set():
            log.info("%s", ready_line(settings, catalog, server.url, server.scheduler.stats().wired_limit_bytes))
            if supervisor is not None:
                supervisor.ready()
            _warn_of_nothing(catalog)
        stop.wait()
        server.drain(settings.drain_timeout)


@contextmanager
def _kept_awake(settings: Config) -> Iterator[KeepAwake | None]:
    """On a Mac, what keeps it awake while the block runs, unless the operator wants none."""
    if sys.platform != "darwin" or settings.keep_awake == "never":
        yield None
        return
    with closing(KeepAwake(always=settings.keep_awake == "always")) as awake:
        yield awake


def _warn_of_strangers(settings: Config) -> None:
    if not http.is_loopback(settings) and not http.api_keys(settings):
        log.warning("anyone who can reach %s may use this server: set --api-key-file", settings.host)


def _warn_of_neighbours() -> None:
    for neighbour in neighbours.running() if sys.platform == "darwin" else ():
        log.warning("%s may use the GPU too: together they may run out of memory, or make the Mac panic", neighbour)


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


def ready_line(settings: Config, catalog: Catalog, url: str, wired_bytes: int = 0) -> str:
    """The start-up line for the operator: the address, the models and the limits in force."""
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
        f"body {bytes_text(settings.max_body_bytes)}",
        f"{settings.max_connections} connections",
    ]
    if wired_bytes:
        limits.append(f"wired memory {bytes_text(wired_bytes)}")
    # A browser can't open the address of all interfaces.
    root = url.removesuffix("v1").replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    page = f" | page: {root}" if settings.ui and url.startswith("http") else ""
    return f"ready: {url}{page} | model: {model} | {', '.join(limits)}"
