"""The program that compiles clients' grammars, each in a process of its own. ``grammars.py`` starts it and asks it.

    server --control socket--> this program --fork--> a process for each grammar, under limits
       ^                                                     |
       +------------------- a socket for each grammar -------+

The program holds llguidance and the models' tokens, so a forked process can compile at once. It may fork, because it
imports no MLX and has one thread. A client that leaves closes its grammar's socket, and the program ends the process.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from mlx_serve.api.grammar_messages import TASK, receive, send
from mlx_serve.engine.generate.grammars import Tokens, compile_matcher
from mlx_serve.text.grammar import Rule, compile_rule
from mlx_serve.text.grammar_task import compile_task
from mlx_serve.values import ApiError

# Deep recursion must end the process here rather than the server, whose threads have at least 2 MB of stack.
_STACK_BYTES = 2**20
_TICK_S = 0.1
# The reason for ending a process whose task starts again later.
_LATER = "later"
# The memory of a small grammar, which fits into memory that the process already has.
_LEAST_BYTES = 64 * 1024
_REASONS: Mapping[int, str] = {
    signal.SIGXCPU: "time",
    signal.SIGABRT: "memory",  # an allocation that fails inside llguidance
    signal.SIGSEGV: "depth",
    signal.SIGBUS: "depth",
}


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling one grammar may take, and how many are compiled at once; more wait in order.

    The same number of grammars that take longer than ``short_s`` may run beside them, so ordinary ones never wait.
    ``bounds``: the system enforces a limit of a process's memory. ``watches``: it does not, so the processes' memory is
    looked at from outside.
    """

    cpu_s: int = 3
    memory_bytes: int = 384 * 2**20
    wall_s: float = 60.0
    short_s: float = 0.3
    at_once: int = max(2, min(4, (os.cpu_count() or 1) // 2))
    bounds: bool = sys.platform == "linux"
    watches: bool = sys.platform != "linux"


@dataclass(slots=True, eq=False)
class _Task:
    """A grammar to compile. ``pid`` is 0 until it has a process; ``ended`` is why this program ends that one.

    ``is_long``: it has taken longer than a short one may.
    """

    reply: socket.socket
    vocabulary: int
    text: bytes
    pid: int = 0
    started_at: float = 0.0
    ended: str = ""
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class _Spare:
    """A forked process that waits for a task, so that no task waits for a fork."""

    pid: int
    task: socket.socket


class _Parent:
    """Runs a process for each task, and ends processes that exceed a limit or whose clients have left."""

    def __init__(self, control: socket.socket, limits: GrammarLimits) -> None:
        self._control = control
        self._limits = limits
        self._tries: dict[int, Any] = {}
        self._waiting: deque[_Task] = deque()
        self._running: list[_Task] = []
        self._spare: _Spare | None = None
        self._serves = True
        self._own_bytes = 0

    def run(self, wake_up: int) -> None:
        """Serve until the control socket is closed."""
        while self._serves:
            self._start_waiting()
            poll = select.poll()
            tasks = {task.reply.fileno(): task for task in (*self._waiting, *self._running) if not task.ended}
            for fd in (self._control.fileno(), wake_up, *tasks):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(1000 * _TICK_S if self._running else None):
                if fd == wake_up:
                    os.read(fd, 4096)
                elif fd in tasks:
                    self._leave(tasks[fd])
                else:
                    self._receive()
            self._reap()
            self._watch()
        for task in self._running:
            self._kill(task, "gone")

    def _receive(self) -> None:
        found = receive(self._control)
        if found is None:
            self._serves = False
            return
        kind, number, data, fds = found
        if kind == TASK:
            self._waiting.append(_Task(socket.socket(fileno=fds[0]), number, data))
            return
        tokens: Tokens = pickle.loads(data)  # noqa: S301 - from the server itself
        self._tries[number] = tokens.trie()
        # Forked processes share these objects, so the garbage collector must not touch their pages.
        gc.freeze()
        self._own_bytes = _peak_bytes()
        if self._spare is not None:
            # The spare process lacks these tokens. It ends when its socket is closed.
            self._spare.task.close()
            os.waitpid(self._spare.pid, 0)
            self._spare = None

    def _start_waiting(self) -> None:
        for task in list(self._waiting):
            if self._has_place(is_long=task.is_long):
                self._waiting.remove(task)
                self._start(task, self._spare or self._fork())
                self._spare = None
        if self._spare is None and self._tries:
            self._spare = self._fork()

    def _has_place(self, *, is_long: bool) -> bool:
        return sum(task.is_long == is_long for task in self._running) < self._limits.at_once

    def _start(self, task: _Task, process: _Spare) -> None:
        task.pid, task.started_at = process.pid, time.monotonic()
        self._running.append(task)
        with process.task:
            try:
                send(process.task, TASK, task.vocabulary, task.text, [task.reply.fileno()])
            except OSError:
                # The process has ended already; _reap handles it.
                return

    def _fork(self) -> _Spare:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            open_sockets = [ours, self._control, *(task.reply for task in (*self._waiting, *self._running))]
            _become(theirs, self._tries, self._limits, open_sockets)
        theirs.close()
        return _Spare(pid, ours)

    def _leave(self, task: _Task) -> None:
        if task in self._running:
            self._kill(task, "gone")
        else:
            self._waiting.remove(task)
            task.reply.close()

    def _watch(self) -> None:
        now = time.monotonic()
        for task in self._running:
            if now - task.started_at > self._limits.wall_s:
                self._kill(task, "time")
            elif now - task.started_at > self._limits.short_s and not (task.is_long or task.ended):
                self._give_way(task)
        if self._limits.watches and self._running:
            held = resident_bytes([task.pid for task in self._running])
            for task in self._running:
                if held.get(task.pid, 0) > self._own_bytes + self._limits.memory_bytes:
                    self._kill(task, "memory")

    def _give_way(self, task: _Task) -> None:
        """Move a task that takes long to a place for long ones. Without a free one, restart it later if others wait."""
        if self._has_place(is_long=True):
            task.is_long = True
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, task.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5))
        elif any(not waiting.is_long for waiting in self._waiting):
            self._kill(task, _LATER)

    def _kill(self, task: _Task, why: str) -> None:
        task.ended = task.ended or why
        os.kill(task.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for task in list(self._running):
            pid, status = os.waitpid(task.pid, os.WNOHANG)
            if pid:
                self._running.remove(task)
                code = os.waitstatus_to_exitcode(status)
                if code and task.ended == _LATER:
                    self._put_off(task)
                else:
                    self._tell_end(task, code)

    def _put_off(self, task: _Task) -> None:
        with suppress(OSError):
            # The process may have begun an answer.
            task.reply.send(b"\n", socket.MSG_DONTWAIT)
        task.is_long, task.ended = True, ""
        self._waiting.append(task)

    def _tell_end(self, task: _Task, code: int) -> None:
        """Answer for a process that ended without an answer."""
        with task.reply:
            if code == 0:
                return
            ended = task.ended or _REASONS.get(-code, f"exit code {code}")
            try:
                # On a line of its own: the process may have begun an answer. A server that does not read must not
                # hold up this program, and takes the socket's end for an answer too.
                task.reply.send(b"\n" + _line({"ended": ended}), socket.MSG_DONTWAIT)
            except OSError:
                return


def _become(
    source: socket.socket, tries: Mapping[int, Any], limits: GrammarLimits, others: Sequence[socket.socket]
) -> NoReturn:
    """What a forked process does: it waits for one task, does it, and ends."""
    code = 1
    try:
        for other in others:
            other.close()
        # llguidance's output about its crash must not appear in the server's log.
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        _bound(limits)
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_work, args=(source, tries))
        thread.start()
        thread.join()
        code = 0
    finally:
        os._exit(code)


def _bound(limits: GrammarLimits) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, limits.cpu_s)
    if limits.bounds:
        with open("/proc/self/statm", encoding="ascii") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, own + limits.memory_bytes)


def _lower(kind: int, limit: int) -> None:
    """Lower a limit of this process; one that is lower already stays."""
    soft, hard = resource.getrlimit(kind)
    others = [other for other in (soft, hard) if other != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([limit, *others]), hard))


def _work(source: socket.socket, tries: Mapping[int, Any]) -> None:
    _warm_up(tries)
    found = receive(source)
    if found is None:
        return
    _, number, data, fds = found
    with socket.socket(fileno=fds[0]) as reply:
        reply.sendall(_line(_answer(data, tries[number])))


def _warm_up(tries: Mapping[int, Any]) -> None:
    """Touch what compiling needs: the pages are copied now, and do not count as the memory of the task."""
    text = compile_rule(Rule("json_schema", {"properties": {"a": {"type": "string"}}}, ""))
    compile_matcher(next(iter(tries.values())), text).compute_bitmask()


def _answer(task: bytes, trie: Any) -> dict[str, Any]:
    try:
        return _compiled(json.loads(task), trie)
    except MemoryError:
        return {"ended": "memory"}
    except Exception:  # noqa: BLE001 - the thread boundary: the server logs it
        return {"fault": traceback.format_exc()}


def _compiled(task: Mapping[str, Any], trie: Any) -> dict[str, Any]:
    before = _peak_bytes()
    try:
        text = compile_task(task)
    except ApiError as error:
        return {"refusal": error.message, "param": error.param}
    matcher = compile_matcher(trie, text)
    if not matcher.is_error():
        # Some grammars show their cost only at the first mask.
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"too_complex": str(matcher.get_error())}
    return {"grammar": text, "n_bytes": _peak_bytes() - before + len(text) + _LEAST_BYTES}


def _line(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _peak_bytes() -> int:
    """This process's peak memory."""
    n = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return n if sys.platform == "darwin" else n * 1024


def resident_bytes(pids: Collection[int]) -> dict[int, int]:
    """The memory that processes hold, by process id, as ``ps`` tells."""
    command = ["/bin/ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    rows = [line.split() for line in done.stdout.splitlines()]
    return {int(pid): int(kilobytes) * 1024 for pid, kilobytes in rows}


def main() -> None:
    """``sys.argv[2]`` has the limits; the control socket is stdin."""
    limits = GrammarLimits(**json.loads(sys.argv[2]))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # The end of a process wakes up the poll.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    _Parent(socket.socket(fileno=os.dup(0)), limits).run(reading)
