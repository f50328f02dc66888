"""Log lines: one a record, whatever is in it."""

import json
import logging
import sys

import pytest

from mlx_serve.logs import JsonFormatter, TextFormatter, escape

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
