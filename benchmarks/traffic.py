"""Good clients of one server: they ask in every dialect, streamed or whole, and now and then one leaves.

Each thread asks again and again until it is told to stop, and notes what a user would have seen. Knows no statistics.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from threading import Event, Thread
from typing import Any, Literal

from benchmarks.children import HOST
from benchmarks.prompts import Prompts

Body = dict[str, Any]

_TIMEOUT_S = 300.0
# Of all visits: those that stream, whose client leaves on the way, whose prompt is long, whose chat is structured.
_STREAMED, _LEAVING, _LONG, _STRUCTURED = 0.75, 0.1, 0.05, 0.1
_SHORT_WORDS, _LONG_WORDS = (5, 40), (300, 600)
_TOKENS = (4, 32)
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: how it ended, when its first text came, and the gaps between its texts. ``status`` 0: no reply."""

    dialect: str
    outcome: Literal["answered", "left", "failed"]
    status: int
    reason: str = ""
    first_s: float | None = None
    gaps_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API is asked; ``text`` is what an event adds to the answer, ``is_end`` whether it is the last one."""

    path: str
    body: Callable[[str, int], Body]
    text: Callable[[Mapping[str, Any]], str]
    is_end: Callable[[Mapping[str, Any]], bool] = lambda event: False


def _chat_text(event: Mapping[str, Any]) -> str:
    return "".join(str(choice.get("delta", {}).get("content") or "") for choice in event.get("choices", ()))


def _completion_text(event: Mapping[str, Any]) -> str:
    return "".join(str(choice.get("text") or "") for choice in event.get("choices", ()))


def _typed(kind: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    def text(event: Mapping[str, Any]) -> str:
        delta = event.get("delta", "") if event.get("type") == kind else ""
        return str(delta.get(key, "")) if isinstance(delta, dict) else str(delta)

    return text


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        lambda text, n: {"messages": [{"role": "user", "content": text}], "max_tokens": n},
        _chat_text,
    ),
    "completions": Dialect("/v1/completions", lambda text, n: {"prompt": text, "max_tokens": n}, _completion_text),
    "responses": Dialect(
        "/v1/responses",
        lambda text, n: {"input": text, "max_output_tokens": n},
        _typed("response.output_text.delta", ""),
        lambda event: event.get("type") in ("response.completed", "response.incomplete"),
    ),
    "messages": Dialect(
        "/v1/messages",
        lambda text, n: {"messages": [{"role": "user", "content": text}], "max_tokens": n},
        _typed("content_block_delta", "text"),
        lambda event: event.get("type") == "message_stop",
    ),
}


class Traffic:
    """So many clients at a time, until ``stop``."""

    def __init__(self, port: int, key: str, n_clients: int, seed: int) -> None:
        self.visits: list[Visit] = []
        self._stop = Event()
        self._threads = [
            Thread(target=self._run, args=(Client(port, key, seed * 1000 + i),), daemon=True) for i in range(n_clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Until the requests that are on their way have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: Client) -> None:
        while not self._stop.wait(client.dice.uniform(0, _PAUSE_S)):
            self.visits.append(client.visit())


class Client:
    """One user of the server, whose choices follow from ``seed``."""

    def __init__(self, port: int, key: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self._prompts = Prompts(seed)
        self._port = port
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._has_grammars = find_spec("llguidance") is not None

    def visit(self) -> Visit:
        """One request."""
        name = self.dice.choice(list(DIALECTS))
        streams, leaves = self.dice.random() < _STREAMED, self.dice.random() < _LEAVING
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_TIMEOUT_S)
        try:
            start = time.monotonic()
            connection.request(
                "POST", DIALECTS[name].path, json.dumps(self._body(name, streams=streams)), self._headers
            )
            response = connection.getresponse()
            if response.status != 200:
                return Visit(name, "failed", response.status, response.read(2000).decode(errors="replace"))
            if not streams:
                response.read()
                return Visit(name, "answered", 200)
            return self._follow(name, response, start, self.dice.randint(1, 6) if leaves else None)
        except (OSError, http.client.HTTPException) as error:
            return Visit(name, "failed", 0, repr(error))
        finally:
            connection.close()

    def _body(self, name: str, *, streams: bool) -> Body:
        n_words = self.dice.randint(*(_LONG_WORDS if self.dice.random() < _LONG else _SHORT_WORDS))
        text = f"{self._prompts.serial()}: tell a story about {self._prompts.words(n_words)}."
        body = {**DIALECTS[name].body(text, self.dice.randint(*_TOKENS)), "stream": streams}
        if name == "chat" and self._has_grammars and self.dice.random() < _STRUCTURED:
            # A name that was not there before: a grammar that nobody has compiled.
            key = f"k{self._prompts.serial()}"
            schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return body

    def _follow(self, name: str, response: http.client.HTTPResponse, start: float, n_texts: int | None) -> Visit:
        """Read a stream, to its end or to so many texts."""
        dialect, times, reason, has_ended = DIALECTS[name], list[float](), "the stream has no end", False
        for now, event in _events(response):
            if event.get("error") or event.get("type") in ("error", "response.failed"):
                reason = json.dumps(event)[:300]
                break
            has_ended = has_ended or event.get("done") is True or dialect.is_end(event)
            if dialect.text(event):
                times.append(now)
            if n_texts is not None and len(times) >= n_texts:
                break
        gaps = tuple(later - earlier for earlier, later in pairwise(times))
        first_s = times[0] - start if times else None
        if n_texts is not None and len(times) >= n_texts:
            return Visit(name, "left", 200, "", first_s, gaps)
        return Visit(name, "answered" if has_ended else "failed", 200, "" if has_ended else reason, first_s, gaps)


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[float, Body]]:
    """A stream's events, with the time at which each came; [DONE] is one that says so."""
    for line in response:
        now = time.monotonic()
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            yield now, {"done": True}
        elif line.startswith(b"data: "):
            yield now, json.loads(data)
