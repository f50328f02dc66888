"""Clients that are slow, gone, or too many: what each may cost, and for how long."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import pytest

from mlx_serve.wire import channel
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.server import Server
from mlx_serve.wire.server_options import ServerOptions
from tests.sockets.wirekit import Client, FakeApp, Running, chunked, get, post, post_head, serving
from tests.waiting import until

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
        running.empty()


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
        running.empty()
        assert [request.path for request in running.app.requests] == ["/wait"]


@pytest.mark.usefixtures("detection")
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_half_closes_while_it_waits_gets_its_reply(version: bytes) -> None:
    with serving() as running, running.connect() as client:
        client.send(post(b"/wait", version=version))
        wait_for_a_running_request(running)
        client.half_close()
        # Writing the beginning of the reply is how the server finds out that somebody still reads.
        assert client.peek(1) == b"H"
        running.app.release.set()
        reply = client.reply()
        assert (reply.body, reply.interim) == (b'{"waited": true}', [])
        assert client.at_end()


def test_a_request_that_fails_after_a_half_close_still_gets_its_own_status() -> None:
    with serving() as running, running.connect() as client:
        client.send(post(b"/stream"))
        pieces = running.app.streams.get()
        client.half_close()
        assert client.peek(1) == b"H"
        pieces.put(RuntimeError("late"))
        assert client.reply().status == 500
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
        running.empty()


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
        until(lambda: "status=499" in caplog.text, "a line with status 499")
    assert "path=/wait status=499" in caplog.text


# A client that is slow


def test_a_reader_that_takes_nothing_is_cut() -> None:
    with serving(write_timeout_s=0.2) as running, running.connect() as client:
        client.send(post(b"/flood"))
        assert running.app.gone.wait(10)
        running.empty()
        assert client.cut()


def test_a_reader_that_is_slow_but_reads_is_not_cut() -> None:
    """The time-out is for silence: it is shorter than the whole of this reply takes."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    with ours, theirs:
        reader = threading.Thread(target=read_slowly, args=(theirs, 64))
        reader.start()
        written = channel.Channel(ours, write_timeout_s=2.0)
        written.write(b"x" * (4 << 20))
        reader.join()
        assert written.n_written == 4 << 20


def read_slowly(sock: socket.socket, n_pieces: int) -> None:
    """In three seconds."""
    for _ in range(n_pieces):
        threading.Event().wait(3 / n_pieces)
        left = (4 << 20) // n_pieces
        while left:
            left -= len(sock.recv(left))


def test_what_a_client_took_before_it_left_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlx_serve.access")
    with serving(write_timeout_s=0.2) as running, running.connect() as client:
        client.send(post(b"/flood"))
        until(lambda: "status=499" in caplog.text, "a line with status 499")
        match = re.search(r"bytes_out=(\d+)", caplog.text)
        assert match
        got = b""
        with suppress(ConnectionError):
            while raw := client.sock.recv(1 << 20):
                got += raw
        assert 0 < len(got) <= int(match[1])


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


@pytest.mark.parametrize("bounds", [{"linger_silence_s": 0.1}, {"linger_silence_s": 60, "linger_s": 0.1}])
def test_lingering_is_bounded(bounds: dict[str, float]) -> None:
    with serving(**bounds) as running, running.connect() as client:
        client.send(post_head(b"/nope", b"Content-Length: 9000000"))
        assert client.reply().status == 404
        # The client neither sends nor closes.
        running.empty()


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
        running.empty()
        assert running.ask(get()).status == 200


def test_a_crowd_that_is_turned_away_leaves_no_descriptors() -> None:
    with serving(max_connections=1, linger_silence_s=0.1) as running, ExitStack() as stack:
        client = busy(running, stack)
        crowd = [stack.enter_context(running.connect()) for _ in range(150)]
        assert all(each.cut() for each in crowd)
        running.app.release.set()
        assert client.reply().status == 200


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes the server wait can be evicted at once."""
    monkeypatch.setattr("mlx_serve.wire.connections._MIN_WAIT_S", 0.0)
    monkeypatch.setattr("mlx_serve.wire.connections._MIN_WRITE_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_an_idle_connection_gives_way() -> None:
    with serving(max_connections=2) as running, ExitStack() as stack:
        working = busy(running, stack)
        idle = stack.enter_context(running.connect())
        assert idle.send(get()).reply().status == 200
        # It may not be resting yet when its reply has been read.
        until(lambda: running.ask(get()).status == 200, "an answer")
        assert idle.at_end()
        running.app.release.set()
        assert working.reply().status == 200


def in_state(running: Running, *states: str) -> None:
    """Waits until the server's connections are in these states."""

    def reached() -> bool:
        return sorted(place.state for place in running.server._roster._places.values()) == sorted(states)

    until(reached, f"connections in the states {states}")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("raw", "state"), [
    (b"GET /hello HTTP/1.1\r\nX-A: ", "head"),
    (post_head(b"/echo", b"Content-Length: 1000") + b"{", "body"),
    (post_head(b"/echo", b"Transfer-Encoding: chunked") + b"ff\r\n{", "body"),
    (b"X\r\n\r\n", "lingering"),
    (post_head(b"/nope", b"Content-Length: 1000") + b"{", "lingering"),
])  # fmt: skip
def test_what_waits_for_its_client_gives_way(raw: bytes, state: str) -> None:
    with serving(max_connections=1, linger_silence_s=60) as running, running.connect() as slow:
        slow.send(raw)
        in_state(running, state)
        assert running.ask(get()).status == 200
        assert slow.cut()
        assert all(request.path == "/hello" for request in running.app.requests)


@pytest.mark.usefixtures("impatient")
def test_a_reply_that_nobody_takes_gives_way() -> None:
    with serving(max_connections=1) as running, running.connect() as deaf:
        deaf.send(post(b"/flood"))
        in_state(running, "running")
        until(lambda: running.ask(get()).status == 200, "an answer")
        assert running.app.gone.wait(10)


@pytest.mark.usefixtures("impatient")
def test_the_slowest_body_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlx_serve.access")
    head = post_head(b"/echo", b"Content-Length: 100001")
    with serving(max_connections=2) as running, ExitStack() as stack:
        quick, slow = (stack.enter_context(running.connect()).send(head) for _ in range(2))
        in_state(running, "body", "body")
        quick.send(b"x" * 100_000)
        slow.send(b"x")
        until(lambda: running.server._setting.bodies.n_held == 100_001, "the body's bytes")
        assert running.ask(get()).status == 200
        assert slow.cut()
        assert quick.send(b"x").reply().status == 200
        until(lambda: "gone=evicted" in caplog.text, "a line of an eviction")


def test_a_refusal_does_not_wait_for_its_body() -> None:
    """With a time-out that would be noticed."""
    with serving(head_timeout_s=3600, access=AccessPolicy(api_keys=("k",))) as running, running.connect() as client:
        reply = client.send(post_head(b"/echo", b"Content-Length: 1000") + b"{").reply()
        assert (reply.status, reply.headers["connection"]) == (401, "close")
        assert client.at_end()


def test_a_connection_that_just_came_does_not() -> None:
    with serving(max_connections=1) as running, running.connect() as first:
        until(lambda: running.server.n_connections == 1, "one connection")
        assert running.ask(get()).status == 503
        assert first.send(get()).reply().status == 200


# Run with few descriptors, and less patience than a server has.
FEW_DESCRIPTORS = """
import logging, resource
from mlx_serve.wire import connections
from mlx_serve.wire.server_options import ServerOptions
from mlx_serve.wire.server import Server
from tests.sockets.wirekit import FakeApp
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
logging.basicConfig()
connections._MIN_WAIT_S = 0.2
server = Server(FakeApp(), ServerOptions(address=("127.0.0.1", 0)))
print(server.address[1], flush=True)
server.serve_forever()
"""


def test_without_descriptors_the_slowest_give_way_and_the_log_says_so_once() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FEW_DESCRIPTORS], **pipes) as process, ExitStack() as stack:
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        try:
            for _ in range(56):
                slow = stack.enter_context(socket.create_connection(address, 10))
                slow.sendall(b"GET /hello HTTP/1.1\r\nX-A: ")
            for _ in range(5):
                with Client(socket.create_connection(address, 10)) as client:
                    assert client.send(get()).reply().status == 200
        finally:
            process.kill()
        _, log = process.communicate(timeout=10)
        assert log.count(b"no file descriptors for another connection") == 1
        assert len(log.splitlines()) == 1


# Draining


def test_drain_waits_for_what_runs_and_refuses_what_comes() -> None:
    with serving() as running, ExitStack() as stack:
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
            until(lambda: bodies.n_held == 60, "60 bytes held")
            refused = running.ask(post(b"/echo", b"y" * 60))
            assert refused.status == 503
            assert b"--max-total-body-bytes" in refused.body
            assert client.send(b"x" * 20).reply().body == b"x" * 80
        # Given back when the reply is out, which its client may have read a little earlier.
        until(lambda: bodies.n_held == 0, "no byte held")
        assert running.ask(post(b"/echo", b"y" * 60)).body == b"y" * 60
        until(lambda: bodies.n_held == 0, "no byte held")
