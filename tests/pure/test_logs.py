"""Log lines: one a record, whatever is in it."""

import json
import logging
import sys

import pytest

from mlx_serve.logs import JsonFormatter, RotatedFileHandler, TextFormatter, configure, escape

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


def test_a_log_that_is_moved_away_is_begun_again(tmp_path, root_logger):
    path = tmp_path / "log"
    configure("INFO", "text", {"MLX_SERVE_LOG_FILE": str(path)})
    root_logger.info("one")
    path.rename(tmp_path / "log.0")
    root_logger.info("two")
    assert (tmp_path / "log.0").read_text().endswith("INFO one\n")
    assert path.read_text().endswith("INFO two\n")
    assert len(path.read_text().splitlines()) == 1


def test_a_log_that_cannot_be_written_does_not_stop_the_server(tmp_path, root_logger, capsys):
    configure("INFO", "text", {"MLX_SERVE_LOG_FILE": str(tmp_path / "none" / "log")})
    root_logger.info("still here")
    first, second = capsys.readouterr().err.splitlines()
    assert "WARNING cannot write the log to" in first
    assert second.endswith("INFO still here")


def test_a_log_whose_folder_goes_does_not_raise_into_what_logs(tmp_path, monkeypatch):
    folder = tmp_path / "logs"
    folder.mkdir()
    handler = RotatedFileHandler(folder / "log", encoding="utf-8")
    told = []
    monkeypatch.setattr(handler, "handleError", told.append)
    (folder / "log").unlink()
    folder.rmdir()
    handler.emit(record("lost"))
    assert len(told) == 1
    folder.mkdir()
    handler.emit(record("found"))
    handler.close()
    assert (folder / "log").read_text() == "found\n"


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
