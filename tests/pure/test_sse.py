from __future__ import annotations

import pytest

from mlx_serve.wire import sse


def test_an_event_is_one_line_of_data() -> None:
    assert sse.event('{"a": "\u00e9"}') == 'data: {"a": "\u00e9"}\n\n'.encode()
    assert sse.event("[DONE]") == sse.DONE


def test_an_event_may_have_a_name() -> None:
    assert sse.event("{}", "ping") == b"event: ping\ndata: {}\n\n"


def test_a_comment() -> None:
    assert sse.comment("waiting") == b": waiting\n\n"


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "\n"])
def test_a_line_break_would_forge_a_field(text: str) -> None:
    with pytest.raises(ValueError, match="one line"):
        sse.event(text)
    with pytest.raises(ValueError, match="one line"):
        sse.event("{}", text)
    with pytest.raises(ValueError, match="one line"):
        sse.comment(text)
