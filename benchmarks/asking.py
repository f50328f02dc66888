"""What the benchmarks ask a server that they started, with the client of ``mlx-serve bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.children import HOST, BenchmarkError, Server
from benchmarks.prompts import Messages
from mlx_serve.client.answer import Answer
from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import Place, place
from mlx_serve.commands.bench.load import LoadTarget, Round
from mlx_serve.commands.bench.workload import Conversation, PlannedTurn


def ask(
    server: Server,
    messages: Messages,
    max_tokens: int,
    heard: Callable[[float], None] = lambda now: None,
    **fields: Any,
) -> Answer:
    """One chat request on a connection of its own, read to its end; ``heard`` is told when each text came.

    Greedy, unless ``fields`` say otherwise. Raises BenchmarkError.
    """
    target = _target(server, fields)
    try:
        with Client(target.server) as client:
            return client.ask(target.path, target.body(messages, max_tokens), heard=heard)
    except Failure as failure:
        raise _error(server, failure) from failure


def ask_all(
    server: Server, prompts: Sequence[Messages], n_clients: int, max_tokens: int, **fields: Any
) -> tuple[list[Answer], float]:
    """A closed loop of requests: the answers in the order of their ends, and the seconds that all took.

    Greedy, unless ``fields`` say otherwise. Raises BenchmarkError.
    """
    round_ = Round(_target(server, fields), lambda n_done, n_failed: None)
    round_.closed_loop([Conversation((PlannedTurn(tuple(messages), max_tokens),)) for messages in prompts], n_clients)
    if round_.interrupted:
        raise KeyboardInterrupt
    answers = []
    for record in round_.records:
        if record.failure is not None:
            raise _error(server, record.failure) from record.failure
        assert record.answer is not None
        answers.append(record.answer)
    return answers, round_.seconds


def figures(server: Server, path: str) -> dict[str, Any]:
    """What /health or /stats says. Raises Failure."""
    with Client(_place(server)) as client:
        return client.get(path)


def _target(server: Server, fields: dict[str, Any]) -> LoadTarget:
    return LoadTarget(_place(server), server.model, fields={"temperature": 0, **fields})


def _place(server: Server) -> Place:
    return place(f"http://{HOST}:{server.port}/v1")


def _error(server: Server, failure: Failure) -> BenchmarkError:
    return BenchmarkError(f"{server.name}: {failure.kind}: {failure}")


def first_token_s(answer: Answer) -> float:
    """Seconds to the first token. A small model may have nothing to say to many words: then it ends the answer."""
    return answer.e2e_s if answer.ttft_s is None else answer.ttft_s
