"""Log lines: one a record, whatever is in it."""

import json
import logging
import os
import stat
import sys
import warnings
from contextlib import suppress

import pytest

from mlx_serve import logs
from mlx_serve.logs import JsonFormatter, MovableFile, PatientHandler, TextFormatter, configure, escape

EVIL = "a\nb\r\x1b[31m\x00\u2028\x85"


def record(message, *args, name="x", exc_info=None):
    return logging.LogRecord(name, logging.INFO, "file", 1, message, args, exc_info)


def failure():
    try:
        raise ValueError(EVIL + "\n2026-01-01 INFO forged")
    except ValueError:
        return sys.exc_info()


def test_a_text_record_is_one_line():
    line = TextFormatter().format(record("got %s", EVIL))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert "a\\nb\\r\\x1b[31m\\x00\\u2028\\x85" in line


def test_no_line_of_a_traceback_begins_as_a_record():
    first, *rest = TextFormatter().format(record("failed", exc_info=failure())).split("\n")
    assert first.endswith("INFO failed")
    assert rest
    assert all(line.startswith("    ") and "\x1b" not in line for line in rest)


@pytest.mark.parametrize("exc_info", [None, failure()])
def test_a_json_record_is_one_object(exc_info):
    line = JsonFormatter().format(record("got %s", EVIL, exc_info=exc_info))
    assert line.isascii()
    assert line.isprintable()
    fields = json.loads(line)
    assert (fields["message"], fields["level"]) == (f"got {EVIL}", "INFO")
    assert ("traceback" in fields) == (exc_info is not None)


def test_a_request_s_line_keeps_its_fields():
    fields = json.loads(JsonFormatter().format(record('{"status": 200}', name="mlx_serve.access")))
    assert fields.keys() == {"time", "level", "status"}


def test_harmless_text_is_left_as_it_is():
    assert escape("né 🐉 \\ 'x'") == "né 🐉 \\ 'x'"


# A file


@pytest.fixture
def root_logger():
    """Left as it was found."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logging.captureWarnings(False)


def written(logger):
    """Waits until all lines are."""
    for handler in logger.handlers:
        handler.flush()


def test_a_log_that_is_moved_away_is_begun_again(tmp_path, root_logger):
    path = tmp_path / "log"
    configure("INFO", "text", {"MLX_SERVE_LOG_FILE": str(path)})
    root_logger.info("one")
    written(root_logger)
    path.rename(tmp_path / "log.0")
    root_logger.info("two")
    written(root_logger)
    assert (tmp_path / "log.0").read_text().endswith("INFO one\n")
    assert path.read_text().endswith("INFO two\n")
    assert len(path.read_text().splitlines()) == 1


def test_a_log_that_cannot_be_written_does_not_stop_the_server(tmp_path, root_logger, capsys):
    configure("INFO", "text", {"MLX_SERVE_LOG_FILE": str(tmp_path / "none" / "log")})
    root_logger.info("still here")
    written(root_logger)
    first, second = capsys.readouterr().err.splitlines()
    assert "WARNING cannot write the log to" in first
    assert second.endswith("INFO still here")


def test_a_log_whose_folder_goes_costs_the_lines_and_tells_how_many(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    handler = PatientHandler(MovableFile(str(folder / "log")).write)
    (folder / "log").unlink()
    folder.rmdir()
    for _ in range(3):
        handler.emit(record("lost"))
        handler.flush()
    folder.mkdir()
    handler.emit(record("found"))
    handler.close()
    told, line = (folder / "log").read_text().splitlines()
    assert told.startswith("3 log lines were lost")
    assert line == "found"


def test_a_log_is_its_owner_s_alone(tmp_path):
    path = tmp_path / "log"
    MovableFile(str(path)).write("a prompt")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def full_pipe():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    n_bytes = 0
    with suppress(BlockingIOError):
        while True:
            n_bytes += os.write(writer, b"-" * 4096)
    os.set_blocking(writer, True)
    return reader, writer, n_bytes


def test_a_reader_that_stops_costs_lines_and_no_time(monkeypatch):
    """Were anything to wait, the test would not end: the pipe is read when all is logged."""
    monkeypatch.setattr(logs, "_MAX_WAITING", 5)
    monkeypatch.setattr(logs, "_LAST_LINES_S", 0.0)
    reader, writer, n_bytes = full_pipe()
    handler = PatientHandler(lambda line: logs._write(writer, line))
    for n in range(100):
        handler.emit(record("line %d", n))
    handler.flush()
    monkeypatch.setattr(logs, "_LAST_LINES_S", 10.0)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read(n_bytes) == b"-" * n_bytes
        handler.flush()
        handler.emit(record("again"))
        handler.close()
        os.close(writer)
        *lines, told, last = pipe.read().decode().splitlines()
    # The one that was being written, and those that waited.
    assert lines == [f"line {n}" for n in range(len(lines))]
    assert 5 <= len(lines) <= 6
    assert told.startswith(f"{100 - len(lines)} log lines were lost")
    assert last == "again"


def test_a_line_that_cannot_be_formatted_fails_nobody(capsys):
    lines = []
    handler = PatientHandler(lines.append)
    handler.emit(record("%d", "no number"))
    handler.emit(record("next"))
    handler.close()
    assert lines == ["next"]
    assert "TypeError" in capsys.readouterr().err


def test_a_plain_line_comes_behind_the_log_s(root_logger, capfd):
    configure("INFO", "json", {})
    root_logger.info("first")
    logs.say("mlx-serve: last words")
    first, last = capfd.readouterr().err.splitlines()
    assert json.loads(first)["message"] == "first"
    assert last == "mlx-serve: last words"


def test_warnings_are_log_lines(root_logger, capfd):
    configure("INFO", "json", {})
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    written(root_logger)
    assert "careful" in json.loads(capfd.readouterr().err)["message"]


@pytest.mark.parametrize("name", ["httpx", "httpx2", "urllib3", "filelock", "huggingface_hub"])
def test_libraries_do_not_tell_of_each_of_their_requests(name, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        configure("DEBUG", "text", {})
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)
        assert logging.getLogger("mlx_serve").isEnabledFor(logging.DEBUG)
    finally:
        root.setLevel(level)
        logging.captureWarnings(False)
