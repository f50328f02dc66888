"""The whole server with the fake backend, on a real port, for the tests of the API."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_serve.api.endpoints import Api
from mlx_serve.api.grammars import GrammarCompiler
from mlx_serve.api.serving import Services
from mlx_serve.engine.catalog import Catalog, ModelEntry
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.engine.schedule.worker import Worker
from mlx_serve.testing import FakeBackend, FakeModels
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.framing import FramingLimits
from mlx_serve.wire.server import Server
from mlx_serve.wire.server_options import ServerOptions

DEADLINE_S = 20
ENTRY = ModelEntry("fake", Path("fake"), 1_700_000_000, context_tokens=4096, vocab_size=262)


class Running:
    """A server and how to talk to it."""

    def __init__(self, server: Server, scheduler: Scheduler) -> None:
        self.server = server
        self.scheduler = scheduler
        self.port = server.address[1]

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)

    def request(self, method: str, path: str, body=None, headers=None, **kwargs):
        """Status, headers and JSON (or text) of one request on a connection of its own."""
        connection = self.connection()
        try:
            data = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, data, headers or {}, **kwargs)
            return read(connection.getresponse())
        finally:
            connection.close()

    def chat(self, content: str = "hi", **fields):
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def complete(self, prompt="hi", **fields):
        return self.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1000, **fields})


def read(response: http.client.HTTPResponse):
    raw = response.read().decode()
    kind = response.headers.get_content_type()
    return response.status, response.headers, json.loads(raw) if raw and kind == "application/json" else raw


def events(text: str) -> list:
    """The JSON of a stream's data lines; checks that each event is one line and that [DONE] ends it."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


@contextmanager
def serving(
    make_backend=lambda _: FakeBackend(),
    *,
    max_queue=128,
    catalog=None,
    limits=None,
    tokenizer=None,
    access=None,
    grammar_limits=None,
    **services,
) -> Iterator[Running]:
    """A server that is up, and after the block down with nothing left."""
    catalog = catalog if catalog is not None else Catalog(ENTRY, ["fake"])
    models = FakeModels(make_backend, tokenizer)
    scheduler = Scheduler(models, Limits(max_queue=max_queue))
    worker = Worker(scheduler, None, models.close)
    grammars = GrammarCompiler(models.vocabulary, grammar_limits)
    app = Api(Services(scheduler, catalog, models, "fp_test", grammars, max_queue=max_queue, **services))
    options = ServerOptions(
        address=("127.0.0.1", 0), limits=limits or FramingLimits(), access=access or AccessPolicy(), on_end=app.observe
    )
    server = Server(app, options)
    accepting = threading.Thread(target=server.serve_forever)
    worker.start()
    accepting.start()
    try:
        yield Running(server, scheduler)
    finally:
        worker.stop()
        server.close()
        grammars.close()
        accepting.join(DEADLINE_S)
        assert not accepting.is_alive()


def until(condition, what: str) -> None:
    """Wait for something that another thread brings about."""
    gate = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        gate.wait(0.01)
    raise AssertionError(f"never came: {what}")
