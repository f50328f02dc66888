"""The programs that are compared, as child processes: how each is started, asked, and ended whatever happens.

Every child loads OpenBLAS in the same way before it imports mlx, so all three compute alike. Knows no load and no
statistics.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer.

    ``ttft_s``: from sending the request to the first text; ``arrivals_s``: when each text came (perf_counter).
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish: str
    ttft_s: float
    text: str
    arrivals_s: tuple[float, ...]


def our_command(model: Path, port: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "mlx_serve", "--model", str(model), "--port", str(port), *flags]


def their_command(model: Path, port: int, *flags: str) -> list[str]:
    code = _PRELOAD + "from mlx_lm.server import main; main()"
    return [sys.executable, "-c", code, "--model", str(model), "--port", str(port), *flags]


def demo_model() -> Path:
    """The demo model, which another process makes, so that this one never imports mlx."""
    code = "from mlx_serve.demo import ensure_demo_model; print(ensure_demo_model())"
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


def spawn(command: Sequence[str], **pipes: Any) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, and make it end."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_well(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that ends by itself. Raises BenchmarkError when it fails."""
    try:
        status = process.wait(_START_TIMEOUT_S)
    except BaseException:
        end(process)
        raise
    if status:
        raise BenchmarkError(f"a child ended with status {status}; its error is above")


@contextmanager
def running(name: str, command: Sequence[str], model: Path, port: int, **pipes: Any) -> Iterator[Server]:
    """The server, from when its /health says yes until the block ends."""
    with tempfile.TemporaryFile() as log:
        process = spawn(command, **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log} | pipes)
        try:
            server = Server(name, port, str(model), process, log)
            wait_healthy(server)
            yield server
        finally:
            end(process)


def both(stack: ExitStack, model: Path, *flags: str) -> dict[str, Server]:
    """This server, with ``flags``, and mlx_lm.server, until the stack is closed."""
    servers = {}
    for name, command, more in ((OURS, our_command, flags), (THEIRS, their_command, ())):
        port = free_port()
        servers[name] = stack.enter_context(running(name, command(model, port, *more), model, port))
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


def health(port: int) -> dict[str, Any]:
    """What /health says of this server. Raises OSError and HTTPException."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    try:
        connection.request("GET", "/health")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def connect(port: int) -> http.client.HTTPConnection:
    """A connection that is kept open between requests, where the server allows it."""
    return http.client.HTTPConnection(HOST, port, timeout=600)


def ask(
    connection: http.client.HTTPConnection,
    model: str,
    messages: list[dict[str, str]],
    max_tokens: int,
    heard: Callable[[], None] = lambda: None,
) -> Answer:
    """Send one chat request and read its stream to the end; ``heard`` is called at each text."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise BenchmarkError(f"HTTP {response.status}: {response.read()[:500]!r}")
    return _read(response, start, heard)


def ask_once(
    server: Server, messages: list[dict[str, str]], max_tokens: int, heard: Callable[[], None] = lambda: None
) -> Answer:
    """``ask`` on a connection of its own."""
    connection = connect(server.port)
    try:
        return ask(connection, server.model, messages, max_tokens, heard)
    finally:
        connection.close()


def ask_together(server: Server, prompts: Sequence[list[dict[str, str]]], max_tokens: int) -> list[Answer]:
    """All at the same time, each on a connection of its own."""
    clients = ThreadPoolExecutor(len(prompts))
    try:
        return list(clients.map(lambda messages: ask_once(server, messages, max_tokens), prompts))
    finally:
        clients.shutdown(wait=False)  # on Ctrl-C the server is ended next, and its clients with it


def _read(response: http.client.HTTPResponse, start: float, heard: Callable[[], None]) -> Answer:
    usage: dict[str, Any] = {}
    finish = ""
    texts: list[str] = []
    arrivals_s: list[float] = []
    for chunk in _chunks(response):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            if text := choice["delta"].get("content"):
                arrivals_s.append(time.perf_counter())
                texts.append(text)
                heard()
            finish = choice.get("finish_reason") or finish
    if not usage or not finish:
        raise BenchmarkError("the stream ended without usage or finish_reason")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    ttft_s = arrivals_s[0] - start if arrivals_s else float("nan")
    return Answer(
        usage["prompt_tokens"], cached, usage["completion_tokens"], finish, ttft_s, "".join(texts), tuple(arrivals_s)
    )


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    # To the very end of the body, as the connection can be used again only then.
    while line := response.readline():
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise BenchmarkError(f"error in the stream: {chunk['error']}")
            yield chunk


def note(text: str) -> None:
    """Tell how far it has got, where no table is."""
    print(text, file=sys.stderr, flush=True)


def offline_command(model: Path) -> list[str]:
    return [sys.executable, "-c", _PRELOAD + "from benchmarks.offline import main; main()", str(model)]


class Offline:
    """mlx-lm without a server: batch_generate in a child that takes one JSON line per task."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def run(self, prompts: list[list[dict[str, str]]], batch_size: int, max_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = {"prompts": prompts, "batch_size": batch_size, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("the offline child ended; its error is above")
        result: dict[str, Any] = json.loads(line)
        return result


@contextmanager
def offline(model: Path) -> Iterator[Offline]:
    process = spawn(offline_command(model), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Offline(process)
    finally:
        end(process)
