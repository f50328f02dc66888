"""Log lines on stderr, as text or as JSON, one a record. Nothing that a client sent can end a line or begin one.

With a path in $MLX_SERVE_LOG_FILE they go there instead, and the file may be moved away while the server runs. Whoever
logs never waits: a thread writes the lines, and when nobody reads them they are dropped and counted.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from mlx_serve.values import ACCESS_LOG

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Libraries that log each of their own requests and lock files at INFO.
_CHATTY = ("httpx", "httpcore", "httpx2", "httpcore2", "urllib3", "filelock", "transformers", "huggingface_hub")
# Lines that wait to be written; beyond it they are dropped.
_MAX_WAITING = 4096
# How long the end of the process waits for the last lines to be written.
_LAST_LINES_S = 1.0
# A log tells who asked for what and, at DEBUG, prompts.
_FILE_MODE = 0o600

# Writes one line, or raises OSError.
Sink: TypeAlias = Callable[[str], None]


def configure(
    level: str,
    form: Literal["text", "json"],
    environ: Mapping[str, str] = os.environ,
    copy: Callable[[str], None] | None = None,
) -> None:
    """Set up logging for the whole process. ``copy`` gets each line too."""
    sink, fault = _sink(environ.get("MLX_SERVE_LOG_FILE", ""))
    if copy is not None:
        sink = _copying(sink, copy)
    handler = PatientHandler(sink)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Otherwise a warning would be written to stderr directly, and its thread could block there.
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if fault:
        logging.getLogger("mlx_serve").warning("%s", fault)


def say(text: str) -> None:
    """A plain line on stderr, behind all log lines, for whoever started the process. It waits for no reader either."""
    for each in logging.getLogger().handlers:
        each.flush()
    handler = PatientHandler(_stderr())
    handler.put(text)
    handler.close()


def _sink(path: str) -> tuple[Sink, str]:
    """Where lines go, and why not to the file. A log that can't be written is no reason not to serve."""
    if path:
        try:
            return MovableFile(path).write, ""
        except OSError as error:
            return _stderr(), f"cannot write the log to {path}: {error.strerror}"
    return _stderr(), ""


def _copying(sink: Sink, copy: Callable[[str], None]) -> Sink:
    def write(line: str) -> None:
        copy(line)
        sink(line)

    return write


def _stderr() -> Sink:
    """Past ``sys.stderr`` where it is a file: a write that waits for a reader would keep its lock from all others."""
    stream = sys.stderr
    if stream is None:  # it was closed from the start
        return lambda line: None
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # an object in memory
        return lambda line: print(line, file=stream, flush=True)
    return lambda line: _write(descriptor, line)


def _write(descriptor: int, line: str) -> None:
    unwritten = line.encode(errors="backslashreplace") + b"\n"
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]


class MovableFile:
    """A file that only its owner reads, opened again once something else (newsyslog, logrotate) has moved it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = self._open()

    def write(self, line: str) -> None:
        """Raises OSError when there is no such file any more and none can be made."""
        if not self._is_in_place():
            descriptor = self._open()
            os.close(self._descriptor)
            self._descriptor = descriptor
        _write(self._descriptor, line)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


class PatientHandler(logging.Handler):
    """Has a thread of its own write the lines, so that nobody who logs waits for whoever reads them.

    A pipe that nobody empties, or a disk that is full, costs lines and no time. How many were lost is told by the next
    line for which there is room.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink
        self._changed = threading.Condition()
        # With each line, how many are lost when it can't be written.
        self._lines: deque[tuple[str, int]] = deque()
        self._n_lost = 0
        self._is_writing = False
        self._is_closed = False
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Formats it here: what it tells of may change later."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  # logging's own rule: a line that can't be formatted must fail nobody
            self.handleError(record)
        else:
            self.put(line)

    def put(self, line: str) -> None:
        """Have a line written as it is, or lose it."""
        with self._changed:
            if len(self._lines) < _MAX_WAITING:
                self._tell_loss()
                self._lines.append((line, 1))
            else:
                self._n_lost += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, _LAST_LINES_S)

    def close(self) -> None:
        """Waits as ``flush`` does, and accepts no more lines."""
        with self._changed:
            self._tell_loss()
            self._changed.notify_all()
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _write_all(self) -> None:
        while (entry := self._next()) is not None:
            line, n_lines = entry
            try:
                self._sink(line)
            except OSError:
                with self._changed:
                    self._n_lost += n_lines

    def _next(self) -> tuple[str, int] | None:
        """The next line; None: it was closed, and there is none left."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            if not self._lines:
                return None
            self._is_writing = True
            return self._lines.popleft()

    def _tell_loss(self) -> None:
        """How many lines should have stood between the last one and the next."""
        if self._n_lost:
            text = "%d log lines were lost: nobody read them, or they could not be written"
            record = logging.LogRecord("mlx_serve", logging.WARNING, "", 0, text, (self._n_lost,), None)
            self._lines.append((self.format(record), self._n_lost))
            self._n_lost = 0


class TextFormatter(logging.Formatter):
    """Time, level, message; a traceback follows on lines of its own, indented: none can be taken for a record."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record)} {record.levelname} {escape(record.getMessage())}"
        return line + _indented(self._traceback(record))

    def _traceback(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonFormatter(logging.Formatter):
    """One object a record. A request's line is an object already; the others get ``message`` and ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {"time": _iso(record.created), "level": record.levelname}
        message = record.getMessage()
        if record.name == ACCESS_LOG:
            fields |= json.loads(message)
        else:
            fields["message"] = message
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields).replace("\x7f", "\\u007f")


def escape(text: str) -> str:
    """Control characters and line separators as Python would write them."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _indented(text: str) -> str:
    return "".join(f"\n    {escape(line)}" for line in text.splitlines())


def _iso(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"
