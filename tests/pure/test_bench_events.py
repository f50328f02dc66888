"""Events out of bytes, whole and in the smallest pieces."""

import pytest

from mlx_serve.client import events
from mlx_serve.client.events import EventError, EventReader

STREAMS = [
    (b"", []),
    (b"data: a\n\n", [b"a"]),
    (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
    (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    (b": waiting\n\ndata: a\n\n", [b"a"]),
    (b"event: message\nid: 7\nretry: 5\ndata: a\n\n", [b"a"]),
    (b"data: a\ndata: b\n\n", [b"a\nb"]),
    (b"data\n\n", [b""]),
    (b"\n\n\ndata: a\n\n\n", [b"a"]),
    (b"data: a\n\ndata: not complete", [b"a"]),
    ("data: é\n\n".encode(), ["é".encode()]),
]


@pytest.mark.parametrize(("raw", "expected"), STREAMS)
def test_events_come_out_the_same_however_the_bytes_are_cut(raw, expected):
    assert EventReader().feed(raw) == expected
    reader = EventReader()
    assert [event for i in range(len(raw)) for event in reader.feed(raw[i : i + 1])] == expected


@pytest.mark.parametrize("raw", [b"<html>\n", b'{"error": 1}\n', b"Data: a\n", b"data : a\n"])
def test_what_is_no_stream_of_events_is_refused(raw):
    with pytest.raises(EventError, match="not a line of an event stream"):
        EventReader().feed(raw)


@pytest.mark.parametrize("ending", [b"", b"\n", b"\ndata: "])
def test_an_event_is_bounded(monkeypatch, ending):
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 100)
    assert EventReader().feed(b"data: " + b"x" * 90 + b"\n\n") == [b"x" * 90]
    with pytest.raises(EventError, match="more than 100 bytes"):
        EventReader().feed(b"data: " + b"x" * 101 + ending)
