"""The whole server on the fake backend, for real client packages. Every answer it gives is checked against the schema.

``served(script)`` serves a model whose answers are scripted: a function from the prompt's text to the answer's, in
which control tokens ("<think>", "<tool_call>") are written out. The fake tokenizer's prompt is a line "role: content"
for each message, and its tool calls are "NAME ARGUMENTS".
"""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat

import pytest

from mlx_serve import serve, testing
from mlx_serve.api.endpoints import Api
from mlx_serve.engine.catalog import Catalog
from mlx_serve.engine.schedule.scheduler import Limits
from mlx_serve.testing import EOS, FakeBackend, FakeTokenizer, tokens_of
from mlx_serve.values import ApiError, Job, RawRequest, Response
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.server_options import ServerOptions, Target
from tests.waiting import DEADLINE_S, until

pytest.importorskip("jsonschema", reason="jsonschema is not installed")

from tests.clients import openaischema as schema

MODEL = "fake"
KEY = "sk-test"
CONTEXT_TOKENS = 4096
EXTRA = "not installed: pip install 'mlx-serve-http[clients]'"

Script = Callable[[str], str]

# What the tests' one tool is called with, and what it then says.
CITY = "Zürich"
ARGUMENTS = json.dumps({"city": CITY}, ensure_ascii=False)
REPORT = "12 °C, 🌧"
WEATHER_CALL = f"<tool_call>get_weather {ARGUMENTS}</tool_call>"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def weather(prompt: str) -> str:
    """Calls the tool; once its result is there, tells it."""
    _, asked, result = prompt.rpartition("tool: ")
    return f"It is {result.strip()}." if asked else WEATHER_CALL


def saying(text: str) -> Script:
    return lambda _: text


def echo(prompt: str) -> str:
    return prompt


class Steps:
    """The backend's steps in the test's hands: once held, each waits until it is let."""

    def __init__(self, *, held: bool) -> None:
        self._changed = threading.Condition()
        self._n_let = 0 if held else None
        self.fault: Exception | None = None

    def let(self, n_steps: int) -> None:
        with self._changed:
            if self._n_let is not None:
                self._n_let += n_steps
                self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._n_let = None
            self._changed.notify_all()

    def __call__(self, _jobs: object) -> None:
        with self._changed:
            free = self._changed.wait_for(lambda: self._n_let is None or self._n_let > 0, 2 * DEADLINE_S)
            assert free, "nobody let this step"
            if self._n_let is not None:
                self._n_let -= 1
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault


class _CheckedStream:
    def __init__(self, pieces: Iterator[bytes], check: schema.StreamCheck, faults: list[Exception]) -> None:
        self._pieces = pieces
        self._check = check
        self._faults = faults

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._try(self._check.finish)
            raise
        self._try(lambda: self._check.take(piece))
        return piece

    def close(self) -> None:
        self._pieces.close()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as fault:  # noqa: BLE001 - for the test, which runs on another thread
            self._faults.append(fault)


class Checked:
    """An application that keeps its requests, and every fault that an answer has against the schema."""

    def __init__(self, app: Api) -> None:
        self.requests: list[RawRequest] = []
        self.faults: list[Exception] = []
        self.n_errors = 0
        self._app = app

    def find(self, path: str) -> Target:
        target = self._app.find(path)
        return replace(target, answer=partial(self._answer, target), error=partial(self._error, target))

    def _answer(self, target: Target, request: RawRequest) -> Response:
        self.requests.append(request)
        response = target.answer(request)
        if _is_anthropic(target) or request.path == "/":
            # Not OpenAI's. Anthropic's own package has the types: test_client_anthropic.py.
            return response
        if isinstance(response.body, bytes):
            self._check(_whole_schema(request.path), response.body)
            return response
        is_chat = "chat" in request.path
        options = json.loads(request.body).get("stream_options") or {}
        check = schema.StreamCheck(
            schema.CHUNK if is_chat else schema.COMPLETION_CHUNK, include_usage=bool(options.get("include_usage"))
        )
        return replace(response, body=_CheckedStream(response.body, check, self.faults))

    def _error(self, target: Target, error: ApiError, request_id: str) -> Response:
        response = target.error(error, request_id)
        if not _is_anthropic(target):
            self._check(schema.ERROR, response.body)
        self.n_errors += 1
        return response

    def _check(self, kind: dict, body: bytes) -> None:
        try:
            schema.check(kind, body.decode())
        except Exception as fault:  # noqa: BLE001 - for the test, which runs on another thread
            self.faults.append(fault)


def _is_anthropic(target: Target) -> bool:
    return target.name.startswith("/messages")


def _whole_schema(path: str) -> dict:
    if path.endswith("/embeddings"):
        return schema.EMBEDDINGS
    if path.endswith("/models"):
        return schema.MODELS
    if "/models/" in path:
        return schema.MODEL
    return schema.CHAT if "chat" in path else schema.COMPLETION


class Served:
    def __init__(self, server: serve.Running, steps: Steps) -> None:
        self.steps = steps
        self.requests = server.app.requests
        self._app = server.app
        self._server = server.http
        self._scheduler = server.scheduler

    @property
    def port(self) -> int:
        return self._server.address[1]

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"

    @property
    def root_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self) -> list[dict]:
        """What clients sent."""
        return [json.loads(request.body) for request in self.requests if request.body]

    def stop_engine(self) -> None:
        """From here on new requests are refused with 503, as in a shutdown."""
        self._scheduler.stop()

    @property
    def n_refused(self) -> int:
        return self._app.n_errors

    def n_running(self) -> int:
        return self._scheduler.health().running

    def n_waiting(self) -> int:
        return self._scheduler.health().waiting

    def refuses(self) -> None:
        """Waits until it has refused a request."""
        until(lambda: self._app.n_errors > 0, "a refusal")

    def frees_its_place(self) -> None:
        """Steps go on, since places are freed between two of them."""

        def freed() -> bool:
            self.steps.let(1)
            return self.n_running() == 0

        until(freed, "a free place")


@contextmanager
def crowded() -> Iterator[Served]:
    """A server whose one place and queue of one are taken by others, until its steps are let."""
    with served(held=True, capacity=1, max_queue=1) as server, ThreadPoolExecutor() as threads:
        for n_waiting in (0, 1):
            threads.submit(_ask, server)
            until(lambda n=n_waiting: (server.n_running(), server.n_waiting()) == (1, n), "a request in its place")
        try:
            yield server
        finally:
            server.steps.open()


def _ask(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=2 * DEADLINE_S)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    connection.getresponse().read()
    connection.close()


def _answer(script: Script) -> Callable[[Job], list[int]]:
    return lambda job: [*tokens_of(script(FakeTokenizer().decode(job.prompt.tokens))), EOS]


def _render(messages, tools, options) -> str:
    """Lines of role and content, with all that a chat template shows of tools and calls."""
    lines = [f"tools: {json.dumps(tools)}"] if tools else []
    for message in messages:
        calls = [f"{call['function']['name']} {_as_text(call['function'])}" for call in message.get("tool_calls", ())]
        lines.append(f"{message['role']}: {message['content']}{''.join(calls)}")
    return "".join(f"{line}\n" for line in lines)


def _as_text(function) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _endless(_job: Job) -> Iterator[int]:
    return repeat(ord("x"))


@contextmanager
def served(
    script: Script | None = echo,
    *,
    held: bool = False,
    capacity: int = 32,
    max_queue: int = 128,
    api_keys: tuple[str, ...] = (),
    context_tokens: int | None = CONTEXT_TOKENS,
) -> Iterator[Served]:
    """A server that is up, and after the block down. Without a script its answers are endless; and a bound context."""
    steps = Steps(held=held)
    answer = _endless if script is None else _answer(script)
    entry = replace(testing.ENTRY, context_tokens=None if script is None else context_tokens)
    with testing.serving(
        lambda _: FakeBackend(capacity=capacity, answer=answer, on_step=steps),
        catalog=Catalog(entry, [MODEL]),
        tokenizer=FakeTokenizer(render=_render),
        options=ServerOptions(address=("127.0.0.1", 0), access=AccessPolicy(api_keys=api_keys)),
        limits=Limits(max_queue=max_queue),
        wrap=Checked,
    ) as server:
        try:
            yield Served(server, steps)
        finally:
            steps.open()
    assert server.app.faults == []
