"""The programs that are compared, as child processes: how each is started, and ended whatever happens.

Every child loads OpenBLAS in the same way before it imports mlx, so all compute alike. Knows no load and no statistics.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
OURS, THEIRS = "mlx-serve", "mlx_lm.server"

_PRELOAD = "from mlx_serve.blas import preload_openblas; preload_openblas(); "
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 5.0  # mlx-serve would give requests that run half a minute


class BenchmarkError(Exception):
    """The measurement cannot go on; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs. ``log`` is what it wrote, for when it fails."""

    name: str
    port: int
    model: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def our_command(model: Path, port: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "mlx_serve", "--model", str(model), "--port", str(port), *flags]


def their_command(model: Path, port: int) -> list[str]:
    code = _PRELOAD + "from mlx_lm.server import main; main()"
    return [sys.executable, "-c", code, "--model", str(model), "--port", str(port)]


def demo_model() -> Path:
    """The demo model, which another process makes, so that this one never imports mlx."""
    code = "from mlx_serve.demo.model import ensure_demo_model; print(ensure_demo_model())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def end_on_sigterm() -> None:
    """Have SIGTERM unwind the stack as Ctrl-C does, for the children to be ended."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def spawn(command: Sequence[str], root: Path = ROOT, **pipes: Any) -> subprocess.Popen[bytes]:
    """``root``: the checkout whose code runs."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=root, env=environ, **pipes)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, and make it end."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def running(name: str, command: Sequence[str], model: Path, port: int, root: Path = ROOT) -> Iterator[Server]:
    """The server, from when its /health says yes until the block ends. ``root``: the checkout whose code runs."""
    with tempfile.TemporaryFile() as log:
        process = spawn(command, root, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            server = Server(name, port, str(model), process, log)
            wait_healthy(server)
            yield server
        finally:
            end(process)


def ours(stack: ExitStack, model: Path, name: str, *flags: str, root: Path = ROOT) -> Server:
    """This server with these flags, until the stack is closed. ``root``: the checkout whose code runs."""
    port = free_port()
    return stack.enter_context(running(name, our_command(model, port, *flags), model, port, root))


def both(stack: ExitStack, model: Path) -> dict[str, Server]:
    """This server and mlx_lm.server, until the stack is closed."""
    servers = {}
    for name, command in ((OURS, our_command), (THEIRS, their_command)):
        port = free_port()
        servers[name] = stack.enter_context(running(name, command(model, port), model, port))
    return servers


def wait_healthy(server: Server) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not healthy(server.port):
        if server.process.poll() is not None:
            server.log.seek(0)
            raise BenchmarkError(f"{server.name} ended: {server.log.read().decode(errors='replace')[-1000:]}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{server.name} was not ready after {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
