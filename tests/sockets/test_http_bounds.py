"""Clients that are slow, gone, or too many: what each may cost, and for how long."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import pytest

from mlx_serve.wire import channel
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.options import ServerOptions
from mlx_serve.wire.server import Server
from tests.sockets.wirekit import Client, FakeApp, Running, chunked, eventually, get, post, post_head, serving

# A client that is gone


def wait_for_a_running_request(running: Running) -> None:
    assert running.app.waiting.acquire(timeout=10)


@pytest.fixture(params=["poll", "peek"])
def detection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The second is for systems whose poll cannot tell the end of the peer's sending."""
    if request.param == "peek":
        monkeypatch.delattr(channel.select, "POLLRDHUP", raising=False)
        monkeypatch.setattr(channel, "_EOF", 0)
    return str(request.param)


@pytest.mark.usefixtures("detection")
@pytest.mark.parametrize("raw", [post(b"/wait"), chunked(b"/wait", b"{}"), post(b"/wait", version=b"1.0")])
def test_a_request_whose_client_closes_is_cancelled(raw: bytes) -> None:
    with serving() as running:
        with running.connect() as client:
            client.send(raw)
            wait_for_a_running_request(running)
        assert running.app.gone.wait(10)
        assert running.empty()


@pytest.mark.usefixtures("detection")
def test_a_request_whose_client_resets_is_cancelled() -> None:
    with serving() as running:
        client = running.connect().send(post(b"/wait"))
        wait_for_a_running_request(running)
        client.reset()
        assert running.app.gone.wait(10)


def test_a_client_that_closes_behind_pipelined_bytes_is_noticed() -> None:
    with serving() as running:
        with running.connect() as client:
            client.send(post(b"/wait"))
            wait_for_a_running_request(running)
            client.send(get() * 3)
        assert running.app.gone.wait(10)
        assert running.empty()
        assert [request.path for request in running.app.requests] == ["/wait"]


@pytest.mark.usefixtures("detection")
def test_a_client_that_half_closes_while_it_waits_gets_its_reply() -> None:
    with serving() as running, running.connect() as client:
        client.send(post(b"/wait"))
        wait_for_a_running_request(running)
        client.half_close()
        # The interim response is how the server finds out that somebody still reads.
        assert client.interim() == 100
        running.app.release.set()
        assert client.reply().body == b'{"waited": true}'
        assert client.at_end()


@pytest.mark.usefixtures("detection")
def test_a_stream_whose_client_leaves_is_closed_between_two_pieces() -> None:
    with serving() as running:
        with running.connect() as client:
            client.send(post(b"/stream"))
            pieces = running.app.streams.get()
            pieces.put(b"data: 1\n\n")
            client.begun()
            assert client.chunk() == b"data: 1\n\n"
        # At most one more write succeeds after a hang-up.
        pieces.put(b"data: 2\n\n", b"data: 3\n\n")
        assert pieces.closed.wait(10)
        assert running.empty()


def test_a_stream_goes_on_for_a_client_that_half_closed() -> None:
    with serving() as running, running.connect() as client:
        client.send(post(b"/stream"))
        pieces = running.app.streams.get()
        pieces.put(b"1")
        client.begun()
        assert client.chunk() == b"1"
        client.half_close()
        pieces.put(b"2", None)
        assert (client.chunk(), client.chunk()) == (b"2", b"")


def test_a_client_that_left_is_499_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlx_serve.access")
    with serving() as running:
        running.connect().send(post(b"/wait")).reset()
        assert eventually(lambda: "status=499" in caplog.text)
    assert "path=/wait status=499" in caplog.text


# A client that is slow


def test_a_reader_that_takes_nothing_is_cut() -> None:
    with serving(write_timeout_s=0.2) as running, running.connect() as client:
        client.send(post(b"/flood"))
        assert running.app.gone.wait(10)
        assert running.empty()
        assert client.cut()


@pytest.mark.parametrize("raw", [b"GET /hello HTTP/1.1\r\nX-A: b\r\n", b"G", post_head(b"/echo")[:-2]])
def test_an_unfinished_head_times_out(raw: bytes) -> None:
    with serving(head_timeout_s=0.1) as running, running.connect() as client:
        reply = client.send(raw).reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert client.at_end()


def test_a_head_that_trickles_in_has_one_deadline_for_all_of_it() -> None:
    stop = threading.Event()
    with serving(head_timeout_s=0.3) as running, running.connect() as client:
        client.send(b"GET /hello HTTP/1.1\r\n")

        def trickle() -> None:
            while not stop.wait(0.05):
                try:
                    client.send(b"X-A: b\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert client.reply().status == 408
        stop.set()
        thread.join()


@pytest.mark.parametrize("raw", [
    post_head(b"/echo", b"Content-Length: 1000") + b"{",
    post_head(b"/echo", b"Transfer-Encoding: chunked") + b"ff\r\n{",
    post_head(b"/nope", b"Content-Length: 1000") + b"{",
])  # fmt: skip
def test_an_unfinished_body_times_out(raw: bytes) -> None:
    with serving(head_timeout_s=0.1, body_timeout_s=5) as running, running.connect() as client:
        reply = client.send(raw).reply()
        assert reply.status in (408, 404)
        assert client.at_end()
        assert running.app.requests == []


def test_a_body_has_a_deadline_however_fast_it_comes() -> None:
    with serving(head_timeout_s=5, body_timeout_s=0.1) as running, running.connect() as client:
        client.send(post_head(b"/echo", b"Content-Length: 200000") + b"x" * 100000)
        assert client.reply().status == 408


def test_an_idle_connection_is_closed_without_a_word() -> None:
    with serving(head_timeout_s=0.1, idle_timeout_s=0.1) as running:
        with running.connect() as fresh:
            assert fresh.at_end()
        with running.connect() as kept:
            assert kept.send(get()).reply().status == 200
            assert kept.at_end()


def test_slow_clients_delay_nobody() -> None:
    with serving() as running, ExitStack() as stack:
        for raw in (b"", b"GET /he", post_head(b"/echo", b"Content-Length: 9") + b"{", post(b"/wait")) * 10:
            stack.enter_context(running.connect()).send(raw)
        assert running.ask(post(b"/echo", b"x")).body == b"x"


def test_lingering_is_bounded() -> None:
    with serving(linger_s=0.1) as running, running.connect() as client:
        client.send(post_head(b"/nope", b"Content-Length: 9000000"))
        assert client.reply().status == 404
        # The client neither sends nor closes.
        assert running.empty()


# Too many


def busy(running: Running, stack: ExitStack) -> Client:
    client = stack.enter_context(running.connect()).send(post(b"/wait"))
    wait_for_a_running_request(running)
    return client


def test_beyond_the_limit_there_is_a_quick_503() -> None:
    with serving(max_connections=3) as running, ExitStack() as stack:
        working = [busy(running, stack) for _ in range(3)]
        for _ in range(3):
            with running.connect() as client:
                reply = client.send(get()).reply()
                assert (reply.status, reply.error()["code"]) == (503, "too_many_connections")
                assert reply.headers["retry-after"].isdigit()
                assert reply.headers["connection"] == "close"
                assert reply.headers["openai-version"] == "2020-10-01"
        running.app.release.set()
        assert [client.reply().status for client in working] == [200, 200, 200]
        for client in working:
            client.sock.close()
        assert running.empty()
        assert running.ask(get()).status == 200


def test_a_crowd_that_is_turned_away_leaves_no_descriptors() -> None:
    with serving(max_connections=1, linger_s=0.1) as running, ExitStack() as stack:
        client = busy(running, stack)
        crowd = [stack.enter_context(running.connect()) for _ in range(150)]
        assert all(each.cut() for each in crowd)
        running.app.release.set()
        assert client.reply().status == 200


def test_an_idle_connection_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_serve.wire.roster._MIN_IDLE_S", 0.0)
    with serving(max_connections=2) as running, ExitStack() as stack:
        working = busy(running, stack)
        idle = stack.enter_context(running.connect())
        assert idle.send(get()).reply().status == 200
        # It may not be resting yet when its reply has been read.
        assert eventually(lambda: running.ask(get()).status == 200)
        assert idle.at_end()
        running.app.release.set()
        assert working.reply().status == 200


def test_a_head_that_never_ends_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_serve.wire.roster._MIN_IDLE_S", 0.0)
    with serving(max_connections=1) as running, running.connect() as slow:
        slow.send(b"GET /hello HTTP/1.1\r\nX-A: ")
        assert eventually(lambda: running.server.n_connections == 1)
        assert running.ask(get()).status == 200
        assert slow.cut()


def test_a_connection_that_just_came_does_not() -> None:
    with serving(max_connections=1) as running, running.connect() as first:
        assert eventually(lambda: running.server.n_connections == 1)
        assert running.ask(get()).status == 503
        assert first.send(get()).reply().status == 200


# Draining


def test_drain_waits_for_what_runs_and_refuses_what_comes() -> None:
    policy = AccessPolicy(open_paths=frozenset({"/health"}))
    with serving(access=policy) as running, ExitStack() as stack:
        idle = stack.enter_context(running.connect())
        assert idle.send(get()).reply().status == 200
        working = busy(running, stack)
        assert running.server.drain(0.05) is False
        assert idle.at_end()
        refused = running.ask(post(b"/echo", b"x"))
        assert (refused.status, refused.error()["type"]) == (503, "server_error")
        assert refused.headers["retry-after"].isdigit()
        assert refused.headers["connection"] == "close"
        assert running.ask(get(b"/health")).status == 200
        running.app.release.set()
        assert running.server.drain(10) is True
        reply = working.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert working.at_end()


def test_drain_of_an_idle_server_is_immediate() -> None:
    with serving() as running:
        assert running.server.drain(10) is True


def test_close_ends_what_still_runs() -> None:
    with serving() as running, ExitStack() as stack:
        clients = [busy(running, stack), stack.enter_context(running.connect()).send(post(b"/stream"))]
        stream = running.app.streams.get()
        running.server.close()
        assert running.app.gone.is_set()
        assert stream.closed.is_set()
        assert all(client.cut() for client in clients)
        assert isinstance(running.server.address, tuple)
        with pytest.raises(ConnectionError):
            socket.create_connection(running.server.address)


def test_close_before_serving_and_twice() -> None:
    server = Server(FakeApp(), ServerOptions(address=("127.0.0.1", 0)))
    server.close()
    server.serve_forever()
    server.close()


def test_the_loop_does_not_wait_for_itself() -> None:
    """A signal handler runs on the thread of the loop, if that is the main one: better an error than a standstill."""
    raised: list[BaseException] = []
    with serving() as running:
        server = running.server

        def full() -> bytes:
            with pytest.raises(RuntimeError, match="its own end") as info:
                server.close()
            raised.append(info.value)
            return b""

        server._listener._full = full
        server._roster._max_connections = 0
        with running.connect() as client:
            assert client.cut()
    assert len(raised) == 1


# Too many bytes


def test_the_bodies_of_all_requests_are_bounded_together() -> None:
    with serving(max_total_body_bytes=100) as running:
        bodies = running.server._setting.bodies
        with running.connect() as client:
            client.send(post_head(b"/echo", b"Content-Length: 80") + b"x" * 60)
            assert eventually(lambda: bodies.n_held == 60)
            refused = running.ask(post(b"/echo", b"y" * 60))
            assert refused.status == 503
            assert b"--max-total-body-bytes" in refused.body
            assert client.send(b"x" * 20).reply().body == b"x" * 80
        assert running.ask(post(b"/echo", b"y" * 60)).body == b"y" * 60
        assert eventually(lambda: bodies.n_held == 0)
