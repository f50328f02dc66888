"""Exceptions as lines for operators."""

import pytest

from mlx_serve.engine.errors import one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("no such file\nat line 3", "no such file"),
        ("expected one of:\n  (1) a\n\n  (2) b", "expected one of: (1) a (2) b"),
        ("", "ValueError"),
        (" \n", "ValueError"),
        ("x" * 500, "x" * 300),
    ],
)
def test_one_line_of_an_exception(text, line):
    assert one_line(ValueError(text)) == line


def test_a_missing_key_is_called_one():
    assert one_line(KeyError("added_tokens")) == "KeyError: 'added_tokens'"
