"""The server process's side: the socket that it inherits, and what it tells its parent. See ``messages``.

The parent hands over four descriptors, named in the environment: the listening socket, the socket for messages, stderr
as the parent has it, and, as descriptor 2, a pipe for whatever writes past the log: a C++ exception that nobody caught,
faulthandler's stacks. When the parent is gone, this process ends at once: another parent will want port and memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from array import array
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from threading import Lock, Thread
from typing import Any, Protocol

from mlx_serve.engine.footprint import footprint_bytes
from mlx_serve.metrics import Trace
from mlx_serve.supervise.messages import encode
from mlx_serve.values import EngineStats, Job

_log = logging.getLogger("mlx_serve")

# The environment variable with the descriptors, which only this package sets and reads.
VARIABLE = "MLX_SERVE_CHILD"
BEAT_S = 1.0
# A message about memory comes with every so many beats.
_MEMORY_EVERY = 5
# Messages that the parent has not read. Beyond it they are dropped: nobody here waits for the parent.
_MAX_UNSENT_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
# What a message about memory has of the engine's figures.
_FIGURES = (
    *("active_bytes", "peak_bytes", "cache_bytes", "weights_bytes", "kv_bytes", "prefix_cache_bytes"),
    *("wired_limit_bytes", "running", "waiting"),
)


class Engine(Protocol):
    """What the beats tell of: the scheduler."""

    def overdue(self) -> Any:
        """The MLX thread's work, with ``work`` and ``seconds``, if it takes far longer than usual."""

    def stats(self) -> EngineStats:
        """Figures about memory and requests."""


class Supervisor:
    """The parent, as the server process sees it. Any thread may call any method; none waits for the parent."""

    def __init__(self, listening: socket.socket, link: socket.socket) -> None:
        self.listening = listening
        self._link = link
        self._lock = Lock()
        self._unsent = b""
        # The messages that hold now: the process's states and running requests. Sent again when some were lost.
        self._holds: dict[tuple[str, str], bytes] = {}
        self._is_behind = False
        self._engine: Engine | None = None

    def start(self) -> None:
        """Start to beat, and to watch for the parent's end."""
        Thread(target=self._end_with_parent, name="parent-watch", daemon=True).start()
        Thread(target=self._beat, name="beat", daemon=True).start()

    def serving(self, engine: Engine) -> None:
        """Connections are accepted now."""
        self._engine = engine
        self._send(encode("serving"), begins=("state", "serving"))

    def ready(self) -> None:
        """The first model is loaded."""
        self._send(encode("ready"), begins=("state", "ready"))

    def logged(self, line: str) -> None:
        """A line of the log, for the report of a death."""
        self._send(encode("log", line=line))

    def entered(self, trace: Trace, jobs: Sequence[Job]) -> None:
        """A request's jobs are about to be queued."""
        texts = [tokens for job in jobs for tokens in _token_ids(job)]
        self._send(
            encode(
                "begin",
                id=trace.request_id,
                model=trace.model,
                prompt_tokens=sum(map(len, texts)),
                max_tokens=sum(job.sampling.max_tokens for job in jobs),
                sequences=len(jobs),
                fingerprint=_fingerprint(texts),
            ),
            begins=("request", trace.request_id),
        )

    def left(self, trace: Trace) -> None:
        """A request has ended."""
        self._send(encode("end", id=trace.request_id), ends=("request", trace.request_id))

    def _send(self, message: bytes, begins: tuple[str, str] | None = None, ends: tuple[str, str] | None = None) -> None:
        with self._lock:
            if begins is not None:
                self._holds[begins] = message
            if ends is not None:
                self._holds.pop(ends, None)
            if len(self._unsent) + len(message) > _MAX_UNSENT_BYTES:
                self._is_behind = True
                return
            if self._is_behind and not self._unsent:
                self._is_behind = False
                message = encode("again") + b"".join(self._holds.values())
            self._unsent += message
            # A parent that is gone ends this process elsewhere; one that does not read must not make it wait.
            with suppress(OSError):
                n_sent = self._link.send(self._unsent, socket.MSG_DONTWAIT)
                self._unsent = self._unsent[n_sent:]

    def _beat(self) -> None:
        for n_beats in count():
            overdue = self._engine.overdue() if self._engine is not None else None
            work = {} if overdue is None else {"overdue_s": round(overdue.seconds, 1), "work": overdue.work}
            self._send(encode("beat", **work))
            if n_beats % _MEMORY_EVERY == 0:
                self._send(encode("memory", **self._memory()))
            time.sleep(BEAT_S)

    def _memory(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"footprint_bytes": footprint_bytes()}
        if self._engine is None:
            return figures
        try:
            stats = self._engine.stats()
        except Exception:  # noqa: BLE001  other threads change what it reads; missing figures must not look like a hang
            _log.exception("no figures for the parent")
            return figures
        figures |= {name: getattr(stats, name) for name in _FIGURES}
        return figures | {"models": [model.name for model in stats.models]}

    def _end_with_parent(self) -> None:
        with suppress(OSError):
            while self._link.recv(64):
                pass
        os._exit(1)


def _token_ids(job: Job) -> Sequence[Sequence[int]]:
    """Of its prompt, or of each text that it embeds."""
    return (job.prompt.tokens,) if job.inputs is None else job.inputs.tokens


def _fingerprint(texts: Sequence[Sequence[int]]) -> str:
    """Equal for equal texts. Only the parent gets it, and it writes it nowhere."""
    digest = blake2b(digest_size=8)
    for tokens in {id(tokens): tokens for tokens in texts}.values():  # the samples of a request share their prompt
        digest.update(array("q", tokens).tobytes())
    return digest.hexdigest()


def join(environ: MutableMapping[str, str] = os.environ) -> Supervisor | None:
    """The parent, if there is one, once this process is tied to it. Call it once, before anything is logged."""
    text = environ.pop(VARIABLE, "")
    if not text:
        return None
    listening, link, stderr = map(int, text.split(","))
    for descriptor in (listening, link, stderr):
        os.set_inheritable(descriptor, False)
    sys.stderr = open(stderr, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115  it stays open to the end
    faulthandler.enable(file=2)
    _die_with_parent()
    supervisor = Supervisor(socket.socket(fileno=listening), socket.socket(fileno=link))
    supervisor.start()
    return supervisor


def _die_with_parent() -> None:
    """On Linux the system kills this process when its parent ends, even if no thread of it can run."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
