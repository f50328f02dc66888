"""What ``mlx_serve.testing`` offers to others' tests, used as its first lines say."""

import http.client
import threading

import pytest

from mlx_serve import testing
from mlx_serve.engine.backend import EngineLost
from mlx_serve.testing import FakeBackend, saying
from mlx_serve.values import StartError
from mlx_serve.wire.server_options import ServerOptions
from tests.waiting import DEADLINE_S, until

openai = pytest.importorskip("openai")


class Panic(BaseException):
    """What no Python code raises: as a panic in Rust."""


def test_a_client_gets_the_text_that_the_test_says():
    with (
        testing.serving(lambda name: FakeBackend(answer=saying(f"<think>Who?</think>I am {name}."))) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "I am fake."


def test_nothing_is_left_of_a_server_that_ended():
    before = set(threading.enumerate())
    with testing.serving() as server:
        host, port = server.http.address
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(host, port, timeout=DEADLINE_S).request("GET", "/health")


def test_an_address_that_is_taken_is_told_and_nothing_is_left():
    with testing.serving() as server:
        before = set(threading.enumerate())
        with (
            pytest.raises(StartError, match=r"cannot listen on 127\.0\.0\.1 port"),
            testing.serving(options=ServerOptions(address=server.http.address)),
        ):
            pass
        assert set(threading.enumerate()) <= before


def test_an_mlx_thread_that_failed_is_told_at_the_end():
    def panic(_):
        raise Panic("index out of bounds")

    def ends_with_a_fault():
        with testing.serving(lambda _: FakeBackend(on_step=panic)) as server:
            connection = http.client.HTTPConnection(*server.http.address, timeout=DEADLINE_S)
            connection.request("POST", "/v1/completions", '{"prompt": "hi"}')
            assert connection.getresponse().status == 500
            connection.close()
            until(lambda: server.worker.fault is not None, "the fault")

    with pytest.raises(EngineLost, match="index out of bounds"):
        ends_with_a_fault()
