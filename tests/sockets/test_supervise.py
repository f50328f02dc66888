"""A server process that dies or hangs under its parent: what clients see, and what is left."""

import json
import os
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from mlx_serve import signals
from mlx_serve.settings import config
from mlx_serve.supervise.parent import Parent
from mlx_serve.wire.sockets import Listening
from tests.sockets.supervisekit import STREAM, is_alive, received, supervised
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


def test_no_connection_is_refused_whatever_kills_the_server(tmp_path):
    with supervised(tmp_path) as server, ThreadPoolExecutor(20) as pool:
        assert server.ask()[0] == 200
        n_descriptors = server.descriptors()
        for n, number in enumerate([signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV], start=1):
            streams = [server.begin(STREAM, stream=True) for _ in range(4)]
            for stream in streams:
                assert stream.recv(100).startswith(b"HTTP/1.1 200")
            old = server.child
            server.kill(number)
            assert all(pool.map(lambda _: server.answered(), range(20)))
            for stream in streams:
                with stream:
                    assert b"[DONE]" not in received(stream)
            assert not is_alive(old)
            server.wait_for("ready:", n + 1)
            assert server.children() == ["S"]
            assert server.descriptors() == n_descriptors
        assert [report["ended"] for report in server.reports()] == [
            "signal SIGKILL",
            "signal SIGABRT",
            "signal SIGSEGV",
        ]
        # The streams, and what the dying process had accepted since.
        assert all(len(report["requests"]) >= 4 for report in server.reports())
        # The stack of the process that aborted is in the log.
        assert server.logged("Fatal Python error: Aborted")
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        assert int(status.partition("VmRSS:")[2].split()[0]) < 40_000  # kB


def test_a_process_that_hangs_is_replaced(tmp_path):
    with supervised(tmp_path, "--hang-timeout", 1, "--host", "::1") as server:
        # The first one is stopped; in the next one a step hangs.
        for n, hangs in enumerate([lambda: server.kill(signal.SIGSTOP), lambda: server.ask("please hang")], start=1):
            old = server.child
            hangs()
            assert server.answered()
            assert not is_alive(old)
            server.wait_for("ready:", n + 1)
        stopped, hung = server.reports()
        assert "has said nothing" in stopped["hang"]
        assert "busy with a step of fake" in hung["hang"]
        assert any("supervisekit.py" in line for line in hung["stray"])


def test_a_request_that_runs_at_two_deaths_in_a_row_is_named_without_its_text(tmp_path):
    with supervised(tmp_path) as server:
        assert server.ask("abort, and a secret")[0] == 0
        assert server.ask("abort, and a secret")[0] == 0
        server.wait_for("running at the death before, too: id=req_\\w+ model=fake prompt_tokens=19 max_tokens=1000")
        assert "secret" not in json.dumps(server.reports())


@pytest.mark.parametrize("death_signal", [True, False])
def test_a_parent_that_is_gone_takes_the_server_with_it(tmp_path, death_signal):
    with supervised(tmp_path, death_signal=death_signal) as server:
        pid = server.child
        server.process.kill()
        until(lambda: not is_alive(pid), "the end of the server process")


def test_a_death_while_it_ends_is_reported_too(tmp_path):
    with supervised(tmp_path, "--drain-timeout", 60) as server:
        stream = server.begin("please hang", stream=True)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("ending: no new requests")
        server.kill(signal.SIGABRT)
        assert server.process.wait(DEADLINE_S) == -signal.SIGABRT % 256
        assert [report["ended"] for report in server.reports()] == ["signal SIGABRT"]
        stream.close()


def test_while_no_process_serves_the_parent_answers_and_then_gives_up(tmp_path):
    with supervised(tmp_path, "--restart-grace", 0.1, quick_s=60, mute=True) as server:
        for n in range(1, 4):
            server.wait_for("the server process is", n)
            # Its reply: the parent's, since no process accepts.
            status, raw = server.ask()
            assert status == 503
            head, _, body = raw.partition(b"\r\n\r\n")
            assert b"Retry-After: 5" in head
            assert json.loads(body)["error"]["code"] == "restarting"
            server.kill(signal.SIGKILL)
        assert server.process.wait(DEADLINE_S) == 1
        server.wait_for("died 3 times within a minute of its start: giving up")


def test_a_second_signal_ends_all_at_once(tmp_path):
    with supervised(tmp_path, "--drain-timeout", 60) as server:
        stream = server.begin("please hang", stream=True)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("ending: no new requests")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(DEADLINE_S) == 128 + signal.SIGINT
        stream.close()
        until(lambda: not is_alive(server.child), "the end of the server process")


def test_a_unix_socket_outlives_the_server_and_ends_in_order_with_the_parent(tmp_path):
    path = tmp_path / "s"
    with supervised(tmp_path, "--uds", path, "--drain-timeout", 60) as server:
        server.kill(signal.SIGKILL)
        assert server.ask()[0] == 200
        stream = server.begin("x" * 100, stream=True)
        assert stream.recv(100)
        server.process.send_signal(signal.SIGTERM)
        with stream:
            assert b"[DONE]" in received(stream)
        assert server.process.wait(DEADLINE_S) == 0
    assert not os.path.exists(path)


def test_a_program_that_cannot_be_started_is_tried_again(monkeypatch, caplog):
    # As while it is replaced by a new version, or while the system has no room for a process.
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(signals, "deliveries", lambda: ours)
    listening = Listening(("127.0.0.1", 0), None, 5)
    descriptors = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        parent = Parent(config.from_args([]), listening, ["/nowhere/python"], clock=count().__next__)
        assert parent.run() == 1
    assert len(re.findall("cannot start a server process: .*No such file", caplog.text)) == 3
    assert len(os.listdir("/proc/self/fd")) <= descriptors
