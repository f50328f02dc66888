"""The server with its fake backend, as a program; or, with ``--bare``, a loop that writes the same bytes and no more.

    python -m benchmarks.fakeserver --port PORT [--streams 64] [--tokens 400] [--step-ms 0] [--bare BYTES]

Needs no MLX. Ends at SIGTERM.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import replace

from benchmarks.children import HOST, end_on_sigterm
from mlx_serve import logs
from mlx_serve.engine.catalog import Catalog
from mlx_serve.testing import ENTRY, FakeBackend, serving
from mlx_serve.values import Job
from mlx_serve.wire.server_options import ServerOptions

# No end token is among these bytes.
_TEXT = b"the quick brown fox jumps over the lazy dog, and "


def endless(job: Job) -> list[int]:
    """Plain text, to ``max_tokens``."""
    n = job.sampling.max_tokens
    return list((_TEXT * (n // len(_TEXT) + 1))[:n])


def serve(port: int, n_streams: int, step_s: float) -> None:
    def pause(_: Collection[Job]) -> None:
        if step_s:
            time.sleep(step_s)

    with serving(
        lambda _: FakeBackend(capacity=n_streams, answer=endless, on_step=pause),
        catalog=Catalog(replace(ENTRY, context_tokens=None), [ENTRY.name]),
        options=ServerOptions(address=(HOST, port)),
    ):
        threading.Event().wait()


def serve_bare(port: int, n_bytes: int, n_events: int, step_s: float) -> None:
    """A thread for each connection, which sends its events one by one as chunks."""
    data = b"data: {" + b"x" * max(1, n_bytes - 20) + b"}\n\n"
    event = b"%x\r\n%s\r\n" % (len(data), data)
    with socket.create_server((HOST, port), backlog=512) as listener:
        while True:
            client, _ = listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_write, args=(client, event, n_events, step_s), daemon=True).start()


def _write(client: socket.socket, event: bytes, n_events: int, step_s: float) -> None:
    with client:
        if client.recv(65536).startswith(b"GET"):
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for _ in range(n_events):
            if step_s:
                time.sleep(step_s)
            client.sendall(event)
        client.sendall(b"0\r\n\r\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fakeserver", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, default=64, help="decoded together (default: 64)")
    parser.add_argument("--tokens", type=int, default=400, help="events of a stream with --bare (default: 400)")
    parser.add_argument("--step-ms", type=float, default=0, help="what a step takes besides (default: 0)")
    parser.add_argument("--bare", type=int, metavar="BYTES", help="only write events of so many bytes")
    options = parser.parse_args()
    end_on_sigterm()
    if options.bare:
        serve_bare(options.port, options.bare, options.tokens, options.step_ms / 1000)
    else:
        logs.configure("INFO", "text")
        serve(options.port, options.streams, options.step_ms / 1000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
