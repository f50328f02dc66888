"""Log lines on stderr, as text or as JSON, one a record. Nothing that a client sent can end a line or begin one.

With a path in $MLX_SERVE_LOG_FILE they go there instead, and the file may be moved away while the server runs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from logging.handlers import WatchedFileHandler
from typing import Literal

from mlx_serve.core import ACCESS_LOG

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Libraries that tell of each of their own requests and lock files at INFO.
_CHATTY = ("httpx", "httpcore", "httpx2", "httpcore2", "urllib3", "filelock", "transformers", "huggingface_hub")


def configure(level: str, form: Literal["text", "json"], environ: Mapping[str, str] = os.environ) -> None:
    """Set up logging for the whole process."""
    handler, fault = _handler(environ.get("MLX_SERVE_LOG_FILE", ""))
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if fault:
        logging.getLogger("mlx_serve").warning("%s", fault)


def _handler(path: str) -> tuple[logging.Handler, str]:
    """Where lines go, and why not to the file. A log that can't be written is no reason not to serve."""
    if path:
        try:
            return RotatedFileHandler(path, encoding="utf-8"), ""
        except OSError as error:
            return logging.StreamHandler(sys.stderr), f"cannot write the log to {path}: {error.strerror}"
    return logging.StreamHandler(sys.stderr), ""


class RotatedFileHandler(WatchedFileHandler):
    """Opens its file again once something else (newsyslog, logrotate) has moved it."""

    def emit(self, record: logging.LogRecord) -> None:
        # The standard handler lets this error out into whatever was logging, and then writes to a closed file.
        try:
            self.reopenIfNeeded()
        except OSError:
            self.handleError(record)
            return
        logging.FileHandler.emit(self, record)


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
