"""``mlx-serve chat``: chats with a running server in the terminal.

Answers go to stdout; reasoning, statistics and errors go to stderr. A pipe or a file thus receives only the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from mlx_serve.client.answer import error_message, parse_object
from mlx_serve.client.connection import Client, objects, one_line, string
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import Place, add_options, given_place
from mlx_serve.commands.terminal import printable

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if a question from arguments or stdin got no answer."""
    given = parser().parse_args(argv)
    try:
        where = given_place(given)
        chat = Chat(where, given.model or _first_model(where), _fields(given), sys.stdout, sys.stderr)
    except (ValueError, Failure) as error:
        print(f"mlx-serve chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    if given.system:
        chat.messages.append({"role": "system", "content": given.system})
    if given.question or not sys.stdin.isatty():
        return _once(chat, " ".join(given.question))
    return _converse(chat)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    top = argparse.ArgumentParser(
        prog="mlx-serve chat",
        description="Chat with a running server. Ctrl-C stops an answer, Ctrl-D ends the chat. "
        "If the question is given as arguments or on stdin, print one answer and exit.",
    )
    top.add_argument("question", nargs="*", help="question to ask; text from stdin is appended to it")
    add_options(top)
    top.add_argument("--model", help="model to ask (default: the first that the server lists)")
    top.add_argument("--system", help="system message")
    top.add_argument("--temp", type=float, metavar="TEMP", help="temperature (default: the server's)")
    top.add_argument(
        "--max-tokens", type=int, metavar="TOKENS", help="maximum tokens per answer (default: the server's)"
    )
    return top


def _fields(given: argparse.Namespace) -> dict[str, Any]:
    wanted = {"temperature": given.temp, "max_tokens": given.max_tokens}
    return {name: value for name, value in wanted.items() if value is not None}


def _first_model(where: Place) -> str:
    with Client(where) as client:
        return client.first_model()


def _once(chat: Chat, question: str) -> int:
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    question = "\n\n".join(part for part in (question, piped) if part)
    if not question:
        print("mlx-serve chat: no question was given", file=sys.stderr)
        return 1
    try:
        return 0 if chat.ask(question) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _converse(chat: Chat) -> int:
    with suppress(ImportError):  # line editing, if this Python has it
        import readline  # noqa: F401
    print(f"{printable(chat.model)} at {chat.where}. Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if question:
            with suppress(KeyboardInterrupt):  # Ctrl-C between the end of the answer and the next prompt
                chat.ask(question, stoppable=True)


@dataclass(slots=True)
class _Answer:
    """An answer that is being received. Times are seconds of the monotonic clock."""

    began: float
    first: float | None = None
    reasoned: bool = False
    text: list[str] = field(default_factory=list)
    n_tokens: int | None = None


class Chat:
    """A conversation: its messages, and the streams that answers and notes are written to."""

    def __init__(self, where: Place, model: str, fields: dict[str, Any], out: TextIO, notes: TextIO) -> None:
        self.where = where
        self.model = model
        self.messages: list[dict[str, str]] = []
        self._fields = fields
        self._out = out
        self._notes = notes

    def ask(self, question: str, *, stoppable: bool = False) -> bool:
        """Asks, prints and stores the answer. Returns whether there was one; a failed turn is removed.

        ``stoppable``: KeyboardInterrupt ends only the answer, and the text so far is stored.
        """
        self.messages.append({"role": "user", "content": question})
        answer = _Answer(time.monotonic())
        try:
            self._stream(answer)
        except Failure as error:
            self.messages.pop()
            self._note(f"{error}\n")
            return False
        except KeyboardInterrupt:
            if not stoppable:
                raise
            self._note("\n(stopped)\n")
        self.messages.append({"role": "assistant", "content": "".join(answer.text)})
        return True

    def _stream(self, answer: _Answer) -> None:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self._fields}
        body["stream_options"] = {"include_usage": True}
        with Client(self.where) as client:
            for data, _ in client.events("/chat/completions", json.dumps(body).encode()):
                if data != b"[DONE]":
                    self._take(answer, parse_object(data))
        self._out.write("\n")
        self._out.flush()
        self._note(_figures(answer, time.monotonic()))

    def _take(self, answer: _Answer, event: dict[str, Any]) -> None:
        if event.get("error") is not None:
            raise Failure("error in the stream", one_line(error_message(event)))
        usage = event.get("usage")
        if isinstance(usage, dict):
            n_tokens = usage.get("completion_tokens")
            answer.n_tokens = n_tokens if isinstance(n_tokens, int) else None
        for choice in objects(event.get("choices")):
            for delta in objects([choice.get("delta")]):
                self._take_delta(answer, delta)

    def _take_delta(self, answer: _Answer, delta: dict[str, Any]) -> None:
        reasoning = string(delta.get("reasoning_content")) or string(delta.get("reasoning"))
        content = string(delta.get("content"))
        if (reasoning or content) and answer.first is None:
            answer.first = time.monotonic()
        if reasoning:
            answer.reasoned = True
            self._note(printable(reasoning))
        if content:
            self._say(answer, content)

    def _say(self, answer: _Answer, content: str) -> None:
        if answer.reasoned and not answer.text:
            self._note("\n\n")
        answer.text.append(content)
        self._out.write(printable(content))
        self._out.flush()

    def _note(self, text: str) -> None:
        dim = self._notes.isatty() and not os.environ.get("NO_COLOR")
        self._notes.write(f"{_DIM}{text}{_PLAIN}" if dim else text)
        self._notes.flush()


def _figures(answer: _Answer, now: float) -> str:
    """An answer's tokens, rate and time. The rate excludes the first token: its time includes the prompt's prefill."""
    if answer.first is None or not answer.n_tokens:
        return "(no text)\n" if not answer.text else ""
    first_s, rest_s = answer.first - answer.began, now - answer.first
    rate = f", {(answer.n_tokens - 1) / rest_s:.1f} token/s" if answer.n_tokens > 1 and rest_s > 0 else ""
    return f"({answer.n_tokens} tokens{rate}, the first after {first_s:.2f} s)\n"
