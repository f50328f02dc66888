"""The whole server with the fake backend, on a real port, for the tests of the API."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_serve import serve, testing
from mlx_serve.engine.schedule.scheduler import Limits
from mlx_serve.testing import FakeBackend
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.framing import FramingLimits
from mlx_serve.wire.server_options import ServerOptions
from tests.waiting import DEADLINE_S


class Running:
    """A server and how to talk to it."""

    def __init__(self, server: serve.Running) -> None:
        self.server = server.http
        self.scheduler = server.scheduler
        self.port = self.server.address[1]

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
    make_backend=lambda _: FakeBackend(), *, max_queue=128, limits=None, access=None, **options
) -> Iterator[Running]:
    """A server that is up, and after the block down with nothing left. ``options`` are those of ``testing.serving``."""
    http_options = ServerOptions(
        address=("127.0.0.1", 0), limits=limits or FramingLimits(), access=access or AccessPolicy()
    )
    with testing.serving(make_backend, options=http_options, limits=Limits(max_queue=max_queue), **options) as server:
        yield Running(server)
