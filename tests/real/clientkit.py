"""The whole server on the fake backend, and programs that talk to it: started, fed, and surely ended."""

import json
import math
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat

import pytest

from mlx_serve import serve, testing
from mlx_serve.api.endpoints import Api
from mlx_serve.engine.catalog import Catalog
from mlx_serve.engine.schedule.scheduler import Limits
from mlx_serve.testing import FakeBackend, echo
from mlx_serve.wire.framing import FramingLimits
from mlx_serve.wire.server_options import ServerOptions
from tests.waiting import DEADLINE_S, until

# Of no bounded length: an endless answer ends only by being let go.
ENTRY = replace(testing.ENTRY, context_tokens=None)
CHAT = "/v1/chat/completions"
ANSWER = "user: hi\n"


class Gate:
    """A backend's steps in the test's hands: each waits until it is let."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_let = 0.0

    def let(self, n_steps: float) -> None:
        with self._changed:
            self._n_let += n_steps
            self._changed.notify_all()

    def open(self) -> None:
        self.let(math.inf)

    def backend(self, *, endless: bool = False, capacity: int = 32) -> FakeBackend:
        return FakeBackend(capacity=capacity, answer=_endless if endless else echo, on_step=self.wait)

    def wait(self, _jobs: object) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._n_let >= 1, 2 * DEADLINE_S), "nobody let this step"
            self._n_let -= 1


def _endless(_job: object) -> Iterator[int]:
    return repeat(ord("x"))


class Recorder:
    """An application that remembers which requests reached it."""

    def __init__(self, app: Api) -> None:
        self.requests = []
        self._app = app

    def find(self, path):
        target = self._app.find(path)
        return replace(target, answer=partial(self._answer, target))

    def _answer(self, target, request):
        self.requests.append(request)
        return target.answer(request)


class Served:
    def __init__(self, server: serve.Running) -> None:
        self.server = server.http
        self.scheduler = server.scheduler
        self.requests = server.app.requests

    @property
    def port(self) -> int:
        return self.server.address[1]

    def url(self, path: str = CHAT) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def n_running(self) -> int:
        return self.scheduler.health().running

    def n_waiting(self) -> int:
        return self.scheduler.health().waiting

    def frees_its_place(self, gate: Gate) -> None:
        """Steps go on, since places are freed between two of them and it is writing that finds a reader gone."""

        def freed() -> bool:
            gate.let(1)
            return self.n_running() == 0

        until(freed, "a free place")


@contextmanager
def served(make_backend=FakeBackend, *, max_queue=128, max_body_bytes=32 * 2**20, uds=None) -> Iterator[Served]:
    options = ServerOptions(address=("127.0.0.1", 0), uds=uds, limits=FramingLimits(max_body_bytes=max_body_bytes))
    with testing.serving(
        lambda _: make_backend(),
        catalog=Catalog(ENTRY, [ENTRY.name]),
        options=options,
        limits=Limits(max_queue=max_queue),
        wrap=Recorder,
    ) as server:
        yield Served(server)


@contextmanager
def held(*, max_queue=128, **backend) -> Iterator[tuple[Served, Gate]]:
    """A server whose backend makes no step that is not let."""
    gate = Gate()
    with served(lambda: gate.backend(**backend), max_queue=max_queue) as server:
        try:
            yield server, gate
        finally:
            gate.open()


def program(name: str, *more_folders: str) -> str:
    """Where it is; skips the test when it is nowhere."""
    found = shutil.which(name) or shutil.which(name, path=":".join(more_folders))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextmanager
def started(*command: object) -> Iterator[subprocess.Popen]:
    """A program with pipes; killed at the deadline, so that reading them ends, and in any case after the block."""
    with subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    ) as process:
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def chat(content: str = "hi", n_padding: int = 0, **fields) -> str:
    """A request's body; the padding is a field that the server ignores."""
    padding = {"padding": "x" * n_padding} if n_padding else {}
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields, **padding})


def content_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def error_of(answer: dict) -> dict:
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


def deltas(lines) -> Iterator[str]:
    """The content of a stream's events, each as soon as its line is there; checks that [DONE] ends it."""
    for line in lines:
        text = (line.decode() if isinstance(line, bytes) else line).strip()
        if text == "data: [DONE]":
            return
        if text.startswith("data: "):
            for choice in json.loads(text.removeprefix("data: "))["choices"]:
                if content := choice["delta"].get("content"):
                    yield content
    raise AssertionError("the stream has no end")
