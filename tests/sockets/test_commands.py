"""The sub-commands that talk to a server, against the whole server."""

import http.server
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from mlx_serve import __version__, cli
from mlx_serve.client.place import place
from mlx_serve.commands import chat, models
from mlx_serve.engine.catalog import Catalog
from mlx_serve.testing import EOS, FakeBackend, tokens_of
from tests.sockets.apikit import serving
from tests.waiting import DEADLINE_S, until


class Terminal(io.StringIO):
    def isatty(self):
        return True


@dataclass
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a sub-command's main with something on stdin."""

    def run(module, *argv, stdin=""):
        monkeypatch.setattr(sys, "stdin", stdin if isinstance(stdin, io.StringIO) else io.StringIO(stdin))
        status = module.main([str(word) for word in argv])
        return Result(status, *capsys.readouterr())

    return run


def saying(text):
    return lambda _: FakeBackend(answer=lambda job: [*tokens_of(text), EOS])


def url(server):
    return f"http://127.0.0.1:{server.port}/v1"


# chat


def test_a_piped_question_gets_its_answer_alone(command):
    with serving() as server:
        done = command(chat, "--url", url(server), stdin="Say hello.\nTwice.\n")
    assert done.status == 0
    assert done.out == "user: Say hello.\nTwice.\n\n"
    assert "tokens, " in done.err
    assert "\x1b" not in done.out + done.err


def test_arguments_come_before_what_is_piped(command):
    with serving() as server:
        done = command(chat, "--url", url(server), "--system", "Be brief.", "Sum", "up:", stdin="text")
    assert done.out == "system: Be brief.\nuser: Sum up:\n\ntext\n\n"


def test_a_conversation_remembers(command, monkeypatch):
    lines = iter(["one", "", KeyboardInterrupt, "two", EOFError])

    def typed(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typed)
    with serving() as server:
        done = command(chat, "--url", url(server), stdin=Terminal())
    assert done.status == 0
    first = "user: one\n"
    assert done.out == f"{first}\n{first}assistant: {first}\nuser: two\n\n"


def test_reasoning_is_a_note_and_dimmed_on_a_terminal(monkeypatch):
    out, notes = io.StringIO(), Terminal()
    with serving(saying("<think>Hm.</think>Yes.")) as server:
        talk = chat.Chat(place(url(server)), "fake", {}, out, notes)
        assert talk.ask("Sure?")
    assert out.getvalue() == "Yes.\n"
    assert "".join(notes.getvalue().split("\x1b[2m")).replace("\x1b[0m", "").startswith("Hm.\n\n(")
    assert talk.messages[-1] == {"role": "assistant", "content": "Yes."}


def test_no_color_is_no_dimming(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    notes = Terminal()
    with serving() as server:
        assert chat.Chat(place(url(server)), "fake", {}, io.StringIO(), notes).ask("hi")
    assert "tokens" in notes.getvalue()
    assert "\x1b" not in notes.getvalue()


def test_what_a_terminal_would_obey_is_left_out(command):
    with serving(saying("a\x1b]0;title\x07b\x9bc\r\td\n")) as server:
        done = command(chat, "--url", url(server), "hi")
    assert done.out == "a]0;titlebc\td\n\n"


def test_ctrl_c_stops_the_answer_and_frees_its_place(monkeypatch):
    class Pressed(io.StringIO):
        def write(self, text):
            if text == "x":
                raise KeyboardInterrupt
            return super().write(text)

    def endless(job):
        while True:
            yield ord("x")

    with serving(lambda _: FakeBackend(answer=endless)) as server:
        notes = io.StringIO()
        talk = chat.Chat(place(url(server)), "fake", {"max_tokens": 4000}, Pressed(), notes)
        assert talk.ask("Go on.", stoppable=True)
        until(lambda: server.scheduler.health().running == 0, "a free place")
    assert "(stopped)" in notes.getvalue()
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


def test_a_refusal_is_told_and_forgotten():
    with serving() as server:
        notes = io.StringIO()
        talk = chat.Chat(place(url(server)), "fake", {}, io.StringIO(), notes)
        assert not talk.ask("x" * 5000)
        assert talk.messages == []
        assert talk.ask("short")
    assert "answered 400: " in notes.getvalue()
    assert "context" in notes.getvalue()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "Is the server running?"),
        (["--url", "ftp://host"], "not a URL"),
        (["--url", "http://127.0.0.1:port"], "not a URL"),
        (["--url", "http://a..b"], "not a URL"),
        (["--url", "http://127.0.0.1:1/ü v1"], "Is the server running?"),
        (["--url", "http://[::1]:1"], "no answer from http://[::1]:1/v1: "),
        (["--api-key", "\x07"], "not printable"),
    ],
)
def test_what_cannot_be_asked_is_one_line(command, argv, says):
    done = command(chat, *argv, "hi")
    assert done.status == 1
    assert says in done.err
    assert len(done.err.splitlines()) == 1


def test_nothing_asked_is_no_question(command):
    with serving() as server:
        assert command(chat, "--url", url(server), stdin=" \n").status == 1


def test_a_server_without_models(command):
    with serving(catalog=Catalog()) as server:
        done = command(chat, "--url", url(server), "hi")
        assert (done.status, "lists no models" in done.err) == (1, True)


# models


def test_what_a_server_has(command):
    with serving() as server:
        assert server.chat()[0] == 200
        done = command(models, "--url", url(server))
        assert done.status == 0
        assert done.out.splitlines()[:2] == ["NAME  STATE", "fake  loaded"]
        assert "ok, 0 running, 0 waiting" in done.out
        told = json.loads(command(models, "--url", url(server), "--json").out)
        assert [model["id"] for model in told["models"]] == ["fake"]


def test_a_url_may_lack_what_is_plain(command):
    with serving() as server:
        for form in ("http://127.0.0.1:{}", "127.0.0.1:{}", "http://127.0.0.1:{}/v1/", "http://localhost:{}"):
            assert command(models, "--url", form.format(server.port)).status == 0


def test_no_server_is_one_line(command):
    done = command(models, "--url", "http://127.0.0.1:1")
    assert (done.status, len(done.err.splitlines())) == (1, 1)


# A server that answers rubbish


@contextmanager
def answering(get="{}", post="", status=200):
    """The URL of a server that gives the same to whatever is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self._answer(get)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(f"data: {post}\n\ndata: [DONE]\n\n")

        def _answer(self, text):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "text",
    ["no JSON", "5", '{"data": 5}', '{"data": "abc"}', '{"data": [1]}', '{"data": [{}], "models": 7}', "[" * 100_000],
)
def test_no_list_of_models_is_no_fault_of_ours(command, text):
    with answering(get=text) as place:
        assert command(models, "--url", place).status in (0, 1)
        done = command(chat, "--url", place, "hi")
    assert (done.status, len(done.err.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    "event",
    [
        '{"choices": 1}',
        '{"choices": [1]}',
        '{"choices": [{"delta": "x"}]}',
        '{"choices": [{"delta": {"content": 5}}]}',
        '{"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": "9"}}',
    ],
)
def test_no_event_of_a_chat_is_no_fault_of_ours(command, event):
    with answering(post=event) as place:
        assert command(chat, "--url", place, "--model", "m", "hi").out in ("\n", "x\n")


def test_what_a_server_says_cannot_act_on_the_terminal(command):
    with answering(json.dumps({"error": {"message": "no\x1b[2J\nway"}}), status=400) as place:
        assert command(models, "--url", place).err.endswith("answered 400: no[2J way\n")
    with answering(json.dumps({"data": [{"id": "a\x1b[2J"}], "status": "\x1b[2J"})) as place:
        assert "\x1b" not in command(models, "--url", place).out


def test_what_the_terminal_cannot_show_ends_nothing():
    command = [sys.executable, "-m", "mlx_serve", "chat", "--model", "m", "--url"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    with answering(post=json.dumps({"choices": [{"delta": {"content": "a\ud800é"}}]})) as place:
        done = subprocess.run([*command, place], input=b"\xff", capture_output=True, env=environ, check=True)
    assert done.stdout == b"a??\n"


def test_who_reads_no_further_ends_it_quietly():
    command = [sys.executable, "-m", "mlx_serve", "--help"]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False)
    with answering(post=json.dumps({"choices": [{"delta": {"content": "a"}}]})) as place:
        command[-1:] = ["chat", "--model", "m", "--url", place, "hi"]
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.stderr, asked.stderr) == (b"", b"")


def test_an_output_that_is_closed_ends_nothing():
    command = ["sh", "-c", 'exec "$0" -m mlx_serve models --help >&-', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("word", "says"), [("modls", "(did you mean models?)"), ("Qwen3-4B", "`mlx-serve serve Qwen3-4B` serves a model")]
)
def test_no_such_command(capsys, word, says):
    assert cli.main([word]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["/no/such/model"], ["serve", "/no/such/model"], ["big=/no/such/model"]])
def test_a_model_may_come_first(words):
    command = [sys.executable, "-m", "mlx_serve", *words, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert (done.returncode, "/no/such/model" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["help"], "Serve MLX language models"),
        (["help", "models"], "List the models"),
        (["version"], f"mlx-serve {__version__}"),
        (["serve", "--version"], f"mlx-serve {__version__}"),
    ],
)
def test_help_and_version_are_words_too(capsys, words, says):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    assert says in capsys.readouterr().out


def test_the_server_s_address_is_one_flag_in_all_commands(capsys):
    assert cli.main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


# chat on a terminal


class Typist:
    """A program on a pseudo-terminal: what is typed, and what is waited for on its screen."""

    def __init__(self, *command):
        self._ours, theirs = pty.openpty()
        environ = {**os.environ, "TERM": "dumb", "MLX_SERVE_API_KEY": "", "OPENAI_API_KEY": ""}
        # A session of its own, so that Ctrl-C reaches this program alone.
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environ
        )
        os.close(theirs)
        self._screen = b""

    def type(self, text):
        os.write(self._ours, text.encode())

    def sees(self, text):
        """Wait for it, and forget what came up to there."""
        wanted = text.encode()
        while wanted not in self._screen:
            ready, _, _ = select.select([self._ours], [], [], DEADLINE_S)
            assert ready, f"never came: {text!r}; there is {self._screen!r}"
            self._screen += os.read(self._ours, 4096)
        self._screen = self._screen.partition(wanted)[2]

    def close(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._ours)


# Makes the terminal the program's own first: signals of its keys go nowhere else.
CHAT = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from mlx_serve.cli import run; run()"


@contextmanager
def typing(server):
    typist = Typist(sys.executable, "-c", CHAT, "chat", "--url", url(server))
    try:
        yield typist
    finally:
        typist.close()


def test_a_conversation_on_a_terminal():
    with serving() as server, typing(server) as typist:
        typist.sees("> ")
        typist.type("hello\n")
        typist.sees("user: hello\r\n")
        # Reasoning and figures are dimmed.
        typist.sees("\x1b[2m(")
        typist.sees("> ")
        typist.type("\x04")
        assert typist.process.wait(DEADLINE_S) == 0


def test_ctrl_c_on_a_terminal_stops_the_answer_and_not_the_chat():
    def endless(job):
        while True:
            yield ord("x")

    with serving(lambda _: FakeBackend(answer=endless)) as server, typing(server) as typist:
        typist.sees("> ")
        typist.type("go on\n")
        typist.sees("xxx")
        typist.type("\x03")
        typist.sees("(stopped)")
        until(lambda: server.scheduler.health().running == 0, "a free place")
        typist.sees("> ")
        typist.type("\x03")
        typist.sees("> ")
        typist.type("\x04")
        assert typist.process.wait(DEADLINE_S) == 0
