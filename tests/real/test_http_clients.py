"""curl, Node's fetch, requests, urllib and http.client, as they are, against the whole server on the fake backend."""

import http.client
import json
import re
import subprocess
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
import requests

from tests.real.clientkit import ANSWER, CHAT, chat, content_of, deltas, error_of, held, program, served, started
from tests.sockets.apikit import events
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.real

NODE_SCRIPTS = Path(__file__).parent / "node"
# More than curl sends without asking first.
LARGE = 2_000_000


@pytest.fixture(scope="module")
def server():
    with served() as running:
        yield running


def pieces(text: str, n_bytes: int = 7):
    raw = text.encode()
    return (raw[i : i + n_bytes] for i in range(0, len(raw), n_bytes))


# curl


class Curl:
    """One run: what it printed, and what its -v told of the heads that went and came."""

    def __init__(self, *args: object, stdin: str = "") -> None:
        command = [program("curl"), *QUIET, "-v", *map(str, args)]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False, encoding="utf-8"
        )
        self.code, self.out, self.talk = done.returncode, done.stdout, done.stderr
        self.statuses = [int(status) for status in re.findall(r"^< HTTP/1\.1 (\d+)", self.talk, re.MULTILINE)]

    def says(self, line: str) -> bool:
        return line.lower() in self.talk.lower()


# Neither the user's settings nor a proxy; and it waits for a 100 as long as it takes.
QUIET = ("-q", "-sS", "--noproxy", "*", "--expect100-timeout", str(DEADLINE_S))
EXPECT = ("-H", "Expect: 100-continue")
NO_EXPECT = ("-H", "Expect:")
CHUNKED = ("-H", "Transfer-Encoding: chunked")
N_SENT = ("-o", "/dev/null", "-w", "%{size_upload}")


def test_curl_with_a_length(server):
    curl = Curl(server.url(), "-d", chat("né 🐉"))
    assert content_of(json.loads(curl.out)) == "user: né 🐉\n"
    assert curl.says("> Content-Length: ")


def test_curl_from_a_file(server, tmp_path):
    file = tmp_path / "body.json"
    file.write_text(chat(n_padding=LARGE))
    curl = Curl(server.url(), "--data-binary", f"@{file}")
    assert content_of(json.loads(curl.out)) == ANSWER
    assert server.requests[-1].headers["content-length"] == str(file.stat().st_size)


@pytest.mark.parametrize("how", [("-X", "POST", "-T", "-"), (*CHUNKED, "--data-binary", "@-")], ids=["-T", "--data"])
@pytest.mark.parametrize("n_padding", [0, LARGE])
def test_curl_chunked_from_a_pipe(server, how, n_padding):
    curl = Curl(server.url(), *how, stdin=chat(n_padding=n_padding))
    assert content_of(json.loads(curl.out)) == ANSWER
    headers = server.requests[-1].headers
    assert (headers["transfer-encoding"], headers.get("content-length")) == ("chunked", None)


@pytest.mark.parametrize("framing", [(), CHUNKED], ids=["length", "chunked"])
def test_curl_is_told_to_go_on(server, framing):
    curl = Curl(server.url(), *EXPECT, *framing, "--data-binary", "@-", stdin=chat(n_padding=LARGE))
    assert curl.statuses == [100, 200]
    assert content_of(json.loads(curl.out)) == ANSWER


@pytest.mark.parametrize(("path", "framing", "status"), [(CHAT, (), 413), ("/nope", (), 404), ("/nope", CHUNKED, 404)])
def test_curl_is_refused_before_it_sends(path, framing, status):
    with served(max_body_bytes=LARGE) as server:
        sending = ("--data-binary", "@-", *EXPECT, *framing, *N_SENT)
        curl = Curl(server.url(path), *sending, stdin=chat(n_padding=LARGE))
    assert (curl.code, curl.statuses, curl.out) == (0, [status], "0")


@pytest.mark.parametrize("framing", [(), CHUNKED], ids=["length", "chunked"])
def test_curl_that_sends_at_once_reads_the_refusal(framing):
    with served(max_body_bytes=LARGE) as server:
        sending = ("--data-binary", "@-", *NO_EXPECT, *framing)
        curl = Curl(server.url(), *sending, stdin=chat(n_padding=LARGE + LARGE // 2))
    assert curl.statuses == [413]
    assert error_of(json.loads(curl.out))["code"] == "request_too_large"


def test_curl_is_refused_when_it_gives_two_lengths(server):
    curl = Curl(server.url(), *CHUNKED, "-H", "Content-Length: 5", "--data-binary", "@-", stdin=chat())
    assert curl.statuses == [400]
    assert curl.says("Connection: close")


def test_curl_keeps_its_connection():
    """Through answers, a stream, and refusals of requests whose bodies were read."""
    counting = ("-o", "/dev/null", "-w", r"%{num_connects} %{http_code}\n")
    with served() as server:
        runs = [
            ("/v1/models",),
            (CHAT, "-d", chat()),
            (CHAT, "-d", "no json"),
            ("/nope", "-d", "{}"),
            (CHAT, "-d", chat(stream=True)),
            (CHAT, *CHUNKED, "-d", chat()),
        ]
        args = [arg for path, *data in runs for arg in ("--next", *QUIET[1:], server.url(path), *data, *counting)]
        curl = Curl(*args)
    statuses = [200, 200, 400, 404, 200, 200]
    assert curl.out.splitlines() == [f"{int(i == 0)} {status}" for i, status in enumerate(statuses)]


def test_curl_speaks_http_1_0(server):
    curl = Curl("-0", server.url(), "-d", chat(stream=True))
    assert (curl.code, "".join(deltas(curl.out.splitlines()))) == (0, ANSWER)
    assert not curl.says("< Transfer-Encoding")
    assert content_of(json.loads(Curl("-0", server.url(), "-d", chat()).out)) == ANSWER


def test_curl_through_a_unix_socket(tmp_path):
    uds = str(tmp_path / "s")
    with served(uds=uds):
        for framing in ((), CHUNKED):
            curl = Curl("--unix-socket", uds, f"http://localhost{CHAT}", *framing, "-d", chat())
            assert content_of(json.loads(curl.out)) == ANSWER


def test_curl_that_dies_in_its_upload():
    with served() as server:
        with started(program("curl"), *QUIET, "-v", "-N", "-X", "POST", "-T", "-", server.url()) as curl:
            assert any("100 Continue" in line for line in curl.stdout)
            curl.stdin.write(chat()[:-1])
            curl.stdin.flush()
            assert server.server.n_connections == 1
        until(lambda: server.server.n_connections == 0, "the connection's end")
        assert server.requests == []
        assert content_of(json.loads(Curl(server.url(), "-d", chat()).out)) == ANSWER


@pytest.mark.parametrize("stream", [True, False])
def test_curl_that_dies_frees_its_place(stream):
    with held(endless=True) as (server, gate):
        body = chat(stream=stream, max_tokens=10**9)
        with started(program("curl"), *QUIET, "-N", server.url(), "-d", body):
            until(lambda: server.n_running() == 1, "a running request")
        server.frees_its_place(gate)


# Node


def test_node_posts_a_stream(server):
    body = chat("né 🐉")
    with started(program("node"), NODE_SCRIPTS / "post_chunked.mjs", server.url(), body[:20], body[20:]) as node:
        status, answer = node.communicate()[0].splitlines()
    assert (status, content_of(json.loads(answer))) == ("200", "user: né 🐉\n")
    assert server.requests[-1].headers["transfer-encoding"] == "chunked"


def test_node_reads_a_refusal(server):
    with started(program("node"), NODE_SCRIPTS / "post_chunked.mjs", server.url(), "no ", "json") as node:
        status, answer = node.communicate()[0].splitlines()
    assert status == "400"
    error_of(json.loads(answer))


def test_node_reads_events_as_they_come():
    with held() as (server, gate):
        with started(program("node"), NODE_SCRIPTS / "read_stream.mjs", server.url(), chat(stream=True)) as node:
            received = deltas(node.stdout)
            for character in ANSWER:
                gate.let(1)
                assert next(received) == character
            gate.let(1)
            assert list(received) == []


@pytest.mark.parametrize("stream", [True, False])
def test_node_that_aborts_frees_its_place(stream):
    with held(endless=True) as (server, gate):
        body = chat(stream=stream, max_tokens=10**9)
        with started(program("node"), NODE_SCRIPTS / "read_stream.mjs", server.url(), body) as node:
            until(lambda: server.n_running() == 1, "a running request")
            if stream:
                gate.let(1)
                assert next(deltas(node.stdout)) == "x"
            node.stdin.write("abort\n")
            node.stdin.flush()
            assert "AbortError\n" in node.stdout
            server.frees_its_place(gate)
            assert node.poll() is None


# requests


@pytest.fixture
def session():
    with requests.Session() as session:
        session.trust_env = False
        yield session


def test_requests_posts_a_generator(server, session):
    response = session.post(server.url(), data=pieces(chat("né 🐉")), timeout=DEADLINE_S)
    assert content_of(response.json()) == "user: né 🐉\n"
    assert server.requests[-1].headers["transfer-encoding"] == "chunked"


def test_requests_uses_a_session_for_good_and_bad():
    with served() as server, requests.Session() as session:
        session.trust_env = False
        for _ in range(3):
            for path, body, status in [
                (CHAT, chat(), 200),
                (CHAT, "no json", 400),
                (CHAT, pieces(chat()), 200),
                (CHAT, pieces(chat(temperature="hot")), 400),
                (CHAT, chat(stream=True), 200),
            ]:
                response = session.post(server.url(path), data=body, timeout=DEADLINE_S)
                assert response.status_code == status
                assert "Connection" not in response.headers
        assert server.server.n_connections == 1
        # A route that is not there is told before the body has come; the connection may end with that.
        assert session.post(server.url("/nope"), data=chat(), timeout=DEADLINE_S).status_code == 404


def test_requests_reads_lines_as_they_come(session):
    with held() as (server, gate):
        gate.let(1)
        with session.post(server.url(), data=chat(stream=True), stream=True, timeout=DEADLINE_S) as response:
            received = deltas(response.iter_lines(chunk_size=None))
            assert next(received) == ANSWER[0]
            gate.open()
            assert "".join(received) == ANSWER[1:]


def test_requests_that_leaves_a_stream_frees_its_place(session):
    with held(endless=True) as (server, gate):
        gate.let(1)
        body = chat(stream=True, max_tokens=10**9)
        with session.post(server.url(), data=body, stream=True, timeout=DEADLINE_S) as response:
            assert next(deltas(response.iter_lines(chunk_size=None))) == "x"
        server.frees_its_place(gate)


def test_requests_reads_the_refusal_of_a_large_generator(session):
    with served(max_body_bytes=LARGE) as server:
        body = pieces(chat(n_padding=LARGE + LARGE // 2), n_bytes=65536)
        response = session.post(server.url(), data=body, timeout=DEADLINE_S)
    assert response.status_code == 413
    assert error_of(response.json())["code"] == "request_too_large"


# urllib.request


def opened(url: str, body):
    headers = {"Content-Type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, body, headers), timeout=DEADLINE_S)


@pytest.mark.parametrize("cut", [str.encode, pieces], ids=["length", "chunked"])
def test_urllib(server, cut):
    with opened(server.url(), cut(chat())) as response:
        assert content_of(json.load(response)) == ANSWER
    with opened(server.url(), cut(chat(stream=True))) as response:
        assert "".join(deltas(response)) == ANSWER
    with pytest.raises(urllib.error.HTTPError) as caught:
        opened(server.url(), cut("no json"))
    with caught.value as response:
        assert response.status == 400
        error_of(json.load(response))


# http.client


def test_http_client_chunks_what_it_iterates(server):
    """On one connection, answers and streams in turn."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)) as connection:
        for _ in range(3):
            connection.request("POST", CHAT, pieces(chat(), n_bytes=1), encode_chunked=True)
            assert content_of(json.load(connection.getresponse())) == ANSWER
            sock = connection.sock
            headers = {"Transfer-Encoding": "chunked"}
            connection.request("POST", CHAT, pieces(chat(stream=True)), headers, encode_chunked=True)
            assert len(events(connection.getresponse().read().decode())) == len(ANSWER) + 2
            assert connection.sock is sock
    assert server.requests[-1].headers["transfer-encoding"] == "chunked"
