"""Runs one round of load: threads send conversations in a closed or an open loop. Computes no results.

    closed_loop    n clients; each takes the next conversation when its last one has ended
    open_loop      each conversation starts at its time, whether or not others have ended

A conversation ends with its first failed request. Ctrl-C ends the round; the answers received until then are kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from mlx_serve.client.connection import Client, Connections
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import Place
from mlx_serve.commands.bench.stats import Record
from mlx_serve.commands.bench.workload import Conversation, Message

# How often the main thread wakes up, for the progress bar and for a signal that arrived just before it began to wait.
_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server, model and route of all requests. ``fields`` are added to each request; None removes a field."""

    server: Place
    model: str
    chat: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path of the route, relative to the base URL."""
        return "/chat/completions" if self.chat else "/completions"

    def prompt(self, history: Sequence[Message]) -> Sequence[Message] | str:
        """The prompt for the conversation so far: its messages, or for completions its texts, joined by line ends."""
        return list(history) if self.chat else "\n".join(message["content"] for message in history)

    def body(self, prompt: Sequence[Message] | str, output_tokens: int) -> bytes:
        """The body of a request, as JSON."""
        fields = {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


Watch = Callable[[int, int], None]


class Round:
    """Runs one round. ``seconds`` is set when it ends. ``watch`` is called with the numbers of answers and failures."""

    def __init__(self, target: LoadTarget, watch: Watch, clock: Callable[[], float] = time.perf_counter) -> None:
        self.records: list[Record] = []
        self.seconds = 0.0
        self.interrupted = False
        self._target = target
        self._watch = watch
        self._clock = clock
        self._connections = Connections()
        self._began_at = 0.0
        self._n_failed = 0

    def closed_loop(self, conversations: Iterable[Conversation], n_clients: int) -> None:
        """Runs ``n_clients`` at a time, each with its own connection."""
        todo: SimpleQueue[Conversation] = SimpleQueue()
        for conversation in conversations:
            todo.put(conversation)
        self._run(n_clients, lambda threads: [threads.submit(self._client, todo) for _ in range(n_clients)])

    def open_loop(self, conversations: Sequence[Conversation], times: Sequence[float], n_connections: int) -> None:
        """Starts each at its time, in seconds from now, or later while all ``n_connections`` are in use."""
        self._run(n_connections, lambda threads: self._send_in_time(threads, conversations, times))

    def _run(self, n_threads: int, start: Callable[[Executor], Iterable[Future[None]]]) -> None:
        threads = ThreadPoolExecutor(n_threads, "bench")
        self._began_at = self._clock()
        try:
            self._wait(start(threads))
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.seconds = self._clock() - self._began_at
            self._connections.end_all()
            # After Ctrl-C, do not wait for threads that are still connecting.
            threads.shutdown(wait=not self.interrupted, cancel_futures=True)

    def _wait(self, futures: Iterable[Future[None]]) -> None:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            self._watch(len(self.records), self._n_failed)

    def _send_in_time(
        self, threads: Executor, conversations: Sequence[Conversation], times: Sequence[float]
    ) -> list[Future[None]]:
        futures = []
        for conversation, due_s in zip(conversations, times, strict=True):
            while (rest_s := due_s - self._now()) > 0:
                time.sleep(min(rest_s, _TICK_S))
                self._watch(len(self.records), self._n_failed)
            futures.append(threads.submit(self._visitor, conversation, due_s))
        return futures

    def _client(self, todo: SimpleQueue[Conversation]) -> None:
        client = Client(self._target.server, self._connections)
        try:
            while not self._connections.ended:
                self._converse(client, todo.get_nowait(), None)
        except Empty:
            return
        finally:
            client.close()

    def _visitor(self, conversation: Conversation, due_s: float) -> None:
        # A new connection, because the server may be about to close an idle one.
        client = Client(self._target.server, self._connections)
        try:
            self._converse(client, conversation, due_s)
        finally:
            client.close()

    def _converse(self, client: Client, conversation: Conversation, due_s: float | None) -> None:
        history: list[Message] = []
        for turn in conversation.turns:
            if self._connections.ended:
                return
            history += turn.messages
            prompt = self._target.prompt(history)
            body = self._target.body(prompt, turn.output_tokens)
            start_s = self._now()
            late_s = 0.0 if due_s is None else start_s - due_s
            due_s = None  # later turns have no time of their own: they follow the answer
            try:
                answer = client.ask(self._target.path, body, self._clock)
            except Failure as failure:
                self._fail(Record(start_s, turn.output_tokens, prompt, failure=failure, late_s=late_s))
                return
            self.records.append(Record(start_s, turn.output_tokens, prompt, answer, late_s=late_s))
            history.append({"role": "assistant", "content": answer.text})

    def _fail(self, record: Record) -> None:
        if not self._connections.ended:  # a connection that this process closed is no failure
            self._n_failed += 1
            self.records.append(record)

    def _now(self) -> float:
        return self._clock() - self._began_at
