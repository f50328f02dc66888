"""A supervised server on the fake backend: ``python -m tests.sockets.supervisekit FLAGS`` is parent and, as it starts
itself again, server. Real processes, real signals. What a prompt says happens: see ``_step``.

``--quick-s`` is for this program alone: the deaths that count as quick; 0 lets a test kill as often as it likes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_serve import logs
from mlx_serve.settings import config, http
from mlx_serve.supervise import child
from tests.waiting import DEADLINE_S, until

STREAM = "a long answer " * 40


def _step(jobs: Collection[object]) -> None:
    texts = {bytes(job.prompt.tokens).decode() for job in jobs}  # type: ignore[attr-defined]
    if any("abort" in text for text in texts):
        os.abort()
    if any("hang" in text for text in texts):
        threading.Event().wait()
    # So that a stream lasts for some seconds.
    threading.Event().wait(0.01)


def _serve(argv: Sequence[str]) -> int:
    """The server process: as the command runs it, but for the models."""
    if os.environ.get("KIT_NO_DEATH_SIGNAL"):  # as on macOS, which has none
        child._die_with_parent = lambda: None
    supervisor = child.join()
    from mlx_serve import cli, testing
    from mlx_serve.engine.catalog import Catalog
    from mlx_serve.engine.schedule import scheduler
    from mlx_serve.reload import Reload

    assert supervisor is not None
    settings = config.from_args(argv)
    logs.configure("INFO", "text", copy=supervisor.logged)
    # A step of the fake backend is overdue soon.
    scheduler._STEP_S = (0.5, 0.5)
    models = testing.FakeModels(lambda _: testing.FakeBackend(on_step=_step))
    catalog = Catalog(testing.ENTRY, [testing.ENTRY.name])
    if os.environ.get("KIT_MUTE"):
        signal.pause()
    reload = Reload(settings, catalog, lambda: settings, None)
    cli.serve_until(threading.Event(), settings, catalog, models, reload, supervisor=supervisor)
    return 0


def main(argv: Sequence[str]) -> int:
    quick_s, flags = float(argv[0]), argv[1:]
    if child.VARIABLE in os.environ:
        return _serve(flags)
    from mlx_serve.supervise.parent import Parent
    from mlx_serve.supervise.policy import Restarts
    from mlx_serve.supervise.process import own_command

    settings = config.from_args(flags)
    logs.configure("INFO", "text")
    listening = http.listen(http.options(settings))
    print(listening.sock.getsockname(), file=sys.stderr, flush=True)
    return Parent(settings, listening, own_command(), restarts=Restarts(quick_s)).run()


class SupervisedServer:
    """The running parent. ``log`` has its lines, and those of its server processes."""

    def __init__(self, process: subprocess.Popen[str], deaths: Path) -> None:
        self.process = process
        self._deaths = deaths
        self.log: deque[str] = deque(maxlen=5000)
        self.address: tuple[str, int] | str = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: bool(self.address), "the address")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if not self.address:
                self.address = ast.literal_eval(line)[:2] if line.startswith("(") else line.strip().strip("'")
            self.log.append(line.rstrip())

    def logged(self, pattern: str) -> list[re.Match[str]]:
        return [found for line in list(self.log) if (found := re.search(pattern, line))]

    def wait_for(self, pattern: str, n: int = 1) -> None:
        until(lambda: len(self.logged(pattern)) >= n, f"{pattern} in {list(self.log)}")

    @property
    def child(self) -> int:
        """The id of the last server process that was started."""
        return int(self.logged(r"the server process is (\d+)")[-1][1])

    def kill(self, number: int) -> None:
        os.kill(self.child, number)

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX if isinstance(self.address, str) else _family(self.address))
        sock.settimeout(DEADLINE_S)
        sock.connect(self.address)
        return sock

    def begin(self, prompt: str, *, stream: bool = False) -> socket.socket:
        """A connection on which a completion was asked for."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1000, "stream": stream}).encode()
        sock = self.connect()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        return sock

    def ask(self, prompt: str = "hi") -> tuple[int, bytes]:
        """Status and the whole reply; 0: the connection was cut."""
        with self.begin(prompt) as sock:
            raw = received(sock)
        return (int(raw.split(b" ", 2)[1]) if raw else 0), raw

    def answered(self, prompt: str = "hi") -> bool:
        """Whether it answers; a connection that the dying process had accepted may be cut once. Raises if refused."""
        return 200 in (self.ask(prompt)[0], self.ask(prompt)[0])

    def reports(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(self._deaths.glob("death-*.json"))]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def children(self) -> list[str]:
        """The states of the parent's child processes; Z: a zombie."""
        states = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid:
                states.append(fields[0])
        return states


def _family(address: tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def received(sock: socket.socket) -> bytes:
    """All that comes until the connection ends, or is cut."""
    raw = b""
    with suppress(ConnectionError):
        while piece := sock.recv(65536):
            raw += piece
    return raw


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def supervised(
    tmp_path: Path,
    *flags: object,
    quick_s: float = 0,
    mute: bool = False,
    death_signal: bool = True,
) -> Iterator[SupervisedServer]:
    """A supervised server; all of it is gone afterwards. ``mute``: its processes never serve."""
    root = str(Path(__file__).parents[2])
    given = flags if "--uds" in flags else ("--port", 0, *flags)
    command = [sys.executable, "-m", "tests.sockets.supervisekit", str(quick_s), *map(str, given)]
    environ = {**os.environ, "PYTHONPATH": root, "XDG_STATE_HOME": str(tmp_path), "KIT_MUTE": "1" if mute else ""}
    environ["KIT_NO_DEATH_SIGNAL"] = "" if death_signal else "1"
    environ.pop("MLX_SERVE_LOG_FILE", None)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, cwd=root)
    server = SupervisedServer(process, tmp_path / "mlx-serve" / "mlx-serve-deaths")
    try:
        if not mute:
            server.wait_for("ready:")
        yield server
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        server._reader.join(DEADLINE_S)
        process.stderr.close()  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
