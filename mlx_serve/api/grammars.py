"""Compiles clients' grammars: first in another process under limits, then here, where masks are made.

Compiling may take any time and memory, and may crash. So ``grammar_child.py`` is a separate process, started when the
first grammar comes and restarted when it has ended. It compiles each grammar in a process of its own, which ends when
the client leaves. Other grammars are not affected.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from threading import BoundedSemaphore, Lock
from typing import Any, Protocol

from mlx_serve.api.grammar_child import GrammarLimits
from mlx_serve.api.grammar_messages import TASK, VOCABULARY, send
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.generate.grammars import Tokens
from mlx_serve.text.grammar import Function, Rule, check_installed, refused
from mlx_serve.text.grammar_task import task_param, task_text
from mlx_serve.values import ApiError, ClientGone, Grammar, internal_error

log = logging.getLogger(__name__)

# The most requests whose grammars are being compiled or wait for it.
MAX_WAITING = 64
# How often a waiting request checks that its client is connected.
_LOOK_S = 0.05
# The child reads messages at once, except for the seconds in which it loads a large vocabulary.
_SEND_S = 30.0
# The most models whose tokens one child holds: as many as the server has tokenizers.
_MAX_VOCABULARIES = 16
# The child imports its modules from the same place as this process.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import mlx_serve.api.grammar_child as c; c.main()"


class CompilerVocabulary(Protocol):
    """A model's tokens and kept grammars: ``engine.generate.grammars.Vocabulary``."""

    number: int

    def tokens(self) -> Tokens:
        """The tokens for another process."""

    def prepare(self) -> Any:
        """Prepare the tokens for compiling in this process."""

    def kept(self, key: str) -> Grammar | None:
        """The grammar that ``keep`` stored under this key."""

    def keep(self, key: str, text: str, n_bytes: int) -> Grammar:
        """Compile a grammar here. Raises ApiError."""


class GrammarCompiler:
    """Compiles the grammars of requests. Any thread."""

    def __init__(
        self, vocabulary_of: Callable[[ModelEntry], CompilerVocabulary], limits: GrammarLimits | None = None
    ) -> None:
        self._vocabulary_of = vocabulary_of
        self._limits = limits or GrammarLimits()
        self._child: _Child | None = None
        self._closed = False
        self._lock = Lock()
        self._places = BoundedSemaphore(MAX_WAITING)

    def compile(
        self, entry: ModelEntry, rule: Rule | None, functions: Sequence[Function], alive: Callable[[], bool]
    ) -> Grammar:
        """The grammar of a call of one of ``functions``, if there are any, or else of ``rule``.

        Raises ApiError 400 that names the request's field, 429 when too many wait, ClientGone when ``alive`` says so.
        """
        param = task_param(rule, functions)
        check_installed(param)
        task = task_text(rule, functions)
        vocabulary = self._vocabulary_of(entry)
        if (kept := vocabulary.kept(task)) is not None:
            return kept
        if not self._places.acquire(blocking=False):
            raise _too_many()
        try:
            answer = self._ask(vocabulary, task, alive)
        finally:
            self._places.release()
        return self._taken(vocabulary, task, answer, param)

    def close(self) -> None:
        """End the child. No grammar is compiled any more."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(self, vocabulary: CompilerVocabulary, task: str, alive: Callable[[], bool]) -> dict[str, Any]:
        for _ in range(2):
            child = self._started()
            try:
                return child.ask(vocabulary, task, alive)
            except _ChildLostError as error:
                log.warning("the process that compiles grammars has ended (%s); it is started again", error)
                self._give_up(child)
        raise _not_now()

    def _started(self) -> _Child:
        with self._lock:
            if self._closed:
                raise _not_now()
            if self._child is not None and self._child.is_full:
                self._child.close()
                self._child = None
            if self._child is None:
                self._child = _Child(self._limits)
            return self._child

    def _give_up(self, child: _Child) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
        child.close()

    def _taken(self, vocabulary: CompilerVocabulary, task: str, answer: dict[str, Any], param: str) -> Grammar:
        if "grammar" in answer:
            return vocabulary.keep(task, answer["grammar"], answer["n_bytes"])
        if "refusal" in answer:
            raise ApiError(400, answer["refusal"], param=answer["param"])
        if "too_complex" in answer:
            raise refused(param, f"it cannot be compiled: {answer['too_complex']}")
        if "ended" in answer:
            raise self._ended(answer["ended"], param)
        log.error("compiling a grammar failed: %s", answer["fault"])
        raise internal_error()

    def _ended(self, why: str, param: str) -> ApiError:
        reasons = {
            "time": f"that takes more than {self._limits.cpu_s} s of CPU time.",
            "memory": f"that takes more than {self._limits.memory_bytes // 2**20} MB of memory.",
            "depth": "its parts lead too deeply into each other.",
        }
        if why in reasons:
            return refused(param, f"it cannot be compiled: {reasons[why]}")
        log.warning("the process that compiled a grammar has ended: %s", why)
        return _not_now()


class _ChildLostError(Exception):
    """The child ended, or does not read."""


class _Child:
    """One run of ``grammar_child.py``."""

    def __init__(self, limits: GrammarLimits) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_SEND_S)
        command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), json.dumps(asdict(limits))]
        with theirs:
            # The child has its own session, so Ctrl-C goes to the server alone, which then ends the child.
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and our own module
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self._known: set[int] = set()
        self._lock = Lock()

    @property
    def is_full(self) -> bool:
        """Whether the child holds tokens of the most models allowed."""
        return len(self._known) >= _MAX_VOCABULARIES

    def ask(self, vocabulary: CompilerVocabulary, task: str, alive: Callable[[], bool]) -> dict[str, Any]:
        """The answer to a task. Raises _ChildLostError, or ClientGone: closing the socket ends the task's process."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(vocabulary, task, theirs)
            # For a model's first grammar, this process prepares while the child compiles.
            vocabulary.prepare()
            return _answer(ours, alive)

    def close(self) -> None:
        """End the child and all its compilations."""
        self._control.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, vocabulary: CompilerVocabulary, task: str, reply: socket.socket) -> None:
        try:
            with self._lock:
                if vocabulary.number not in self._known:
                    send(self._control, VOCABULARY, vocabulary.number, pickle.dumps(vocabulary.tokens()))
                    self._known.add(vocabulary.number)
                send(self._control, TASK, vocabulary.number, task.encode(), [reply.fileno()])
        except OSError as error:
            raise _ChildLostError(str(error)) from error


def _answer(source: socket.socket, alive: Callable[[], bool]) -> dict[str, Any]:
    """The last line that arrives. A process that crashed may have written part of a line before it."""
    source.settimeout(_LOOK_S)
    data = bytearray()
    while True:
        try:
            piece = source.recv(2**16)
        except TimeoutError:
            if not alive():
                raise ClientGone from None
            continue
        except OSError as error:
            raise _ChildLostError(str(error)) from error
        if not piece:
            raise _ChildLostError("it gave no answer")
        data += piece
        if (answer := _read_answer(data)) is not None:
            return answer


def _read_answer(data: bytearray) -> dict[str, Any] | None:
    if not data.endswith(b"\n"):
        return None
    try:
        answer: dict[str, Any] = json.loads(data[:-1].rpartition(b"\n")[2])
    except ValueError:
        return None
    return answer


def _not_now() -> ApiError:
    return ApiError(503, "The grammar could not be compiled now. Try again.", type="server_error")


def _too_many() -> ApiError:
    message = f"The server is busy: it compiles the grammars of {MAX_WAITING} requests already. Try again soon."
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=(("Retry-After", "1"),))
