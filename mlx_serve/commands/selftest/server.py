"""The server that is tested: a child process with the user's flags, on a port of its own."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mlx_serve.client.place import Place, place
from mlx_serve.commands.bench.ceiling import child_environ
from mlx_serve.settings import config
from mlx_serve.settings.config import Config
from mlx_serve.settings.flags import option_of
from mlx_serve.supervise import report
from mlx_serve.values import StartError

_READY = re.compile(r"ready: (http://\S+)")
# What the parent of a supervised server logs.
_CHILD = re.compile(r"the server process is (\d+)")
_STOP_TIMEOUT_S = 60.0
# These follow the user's flags and win over them, so that the self-test knows the address and finds the log.
_OWN_FLAGS = ("--supervise", "--host", "127.0.0.1", "--port", "0", "--log-level", "INFO", "--log-format", "text")
# Flags of the user that would change where or how the server listens.
_OTHERS_FLAGS = ("uds", "tls_cert")
# How much of a failed server's log is shown.
_MOST_LINES = 20


class ServerError(Exception):
    """The server did not start. The text is the end of its log."""


@dataclass(frozen=True, slots=True)
class TestedServer:
    """A running server: its address with a key, and the process that its parent has started; None: it has none.

    ``reports``: where the reports of its deaths are.
    """

    where: Place
    child: int | None
    reports: Path


def settings_of(flags: Sequence[str]) -> Config:
    """The settings of a server with these flags. A wrong command line ends the process.

    Raises ServerError if it can't be tested.
    """
    try:
        settings = config.from_args(flags)
    except StartError as error:
        raise ServerError(str(error)) from error
    for name in _OTHERS_FLAGS:
        if getattr(settings, name) is not None:
            raise ServerError(f"{option_of(name)}: the server is tested over plain HTTP; leave it out")
    return settings


@contextmanager
def serving(flags: Sequence[str], log: IO[str]) -> Iterator[TestedServer]:
    """Starts a server, and ends it when the block ends. Its log goes to ``log``. Raises ServerError."""
    # In the environment, where no other user can read it.
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="mlx-serve-selftest-") as folder:
        environ = {**child_environ(), "MLX_SERVE_API_KEY": key, "LOGS_DIRECTORY": folder}
        environ.pop("MLX_SERVE_LOG_FILE", None)
        process = subprocess.Popen(  # noqa: S603 - this package's module and the user's flags
            [sys.executable, "-P", "-m", "mlx_serve", *flags, *_OWN_FLAGS],
            stderr=log,
            text=True,
            env=environ,
            process_group=0,  # Ctrl-C interrupts only this process, which then ends the server
        )
        try:
            url, child = _started(process, log)
            # The self-test kills the server. Its report must not go to the user's own folder.
            yield TestedServer(place(url, key), child, report.folder(environ))
        finally:
            _end(process)


def _started(process: subprocess.Popen[str], log: IO[str]) -> tuple[str, int | None]:
    """Waits for the ready line. Returns the address, and the server process. Raises ServerError."""
    with open(log.name, encoding="utf-8", errors="replace") as lines:
        seen: list[str] = []
        while process.poll() is None:
            line = lines.readline()
            if not line:
                wait(process)
                continue
            seen.append(line)
            if found := _READY.search(line):
                child = _CHILD.search("".join(seen))
                return found[1], int(child[1]) if child is not None else None
        raise ServerError("".join([*seen, *lines][-_MOST_LINES:]).strip() or "the server ended without a word")


def wait(process: subprocess.Popen[str], seconds: float = 0.1) -> None:
    """Waits for a process, or for so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
