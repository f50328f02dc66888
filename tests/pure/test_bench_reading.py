"""Chunks of a stream to an answer, with hand-made times."""

import json

import pytest

from mlx_serve.client.answer import Reading
from mlx_serve.client.errors import Failure

USAGE = {"prompt_tokens": 7, "completion_tokens": 5}


def chunk(finish=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def text(piece, finish=None):
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def usage(**details):
    return {"choices": [], "usage": {**USAGE, **details}}


def read(*timed, start=10.0, done=True):
    reading = Reading(start)
    for now, body in timed:
        reading.take(json.dumps(body).encode(), now)
    if done:
        reading.take(b"[DONE]", 99.0)
    return reading


def test_times_are_taken_at_text_and_at_the_finish_reason():
    answer = read(
        (11.0, chunk(role="assistant", content="")),
        (12.0, chunk(content="Hel")),
        (12.5, chunk(content="lo")),
        (14.0, chunk(content="!")),
        (15.0, chunk(finish="stop")),
        (16.0, usage(prompt_tokens_details={"cached_tokens": 3})),
    ).answer()
    assert answer.ttft_s == 2.0
    assert answer.gaps_s == (0.5, 1.5)
    assert answer.e2e_s == 5.0
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (7, 3, 5)
    assert (answer.text, answer.finish) == ("Hello!", "stop")


def test_each_text_is_told_of_when_it_comes():
    heard = []
    reading = Reading(10.0, heard.append)
    for now, body in ((11.0, chunk(content="")), (12.0, chunk(content="a")), (13.0, chunk(reasoning="b"))):
        reading.take(json.dumps(body).encode(), now)
    assert heard == [12.0, 13.0]


def test_the_text_of_completions():
    answer = read((11.0, text("")), (12.0, text("a")), (13.0, text("b", "length")), (13.0, usage())).answer()
    assert (answer.ttft_s, answer.gaps_s, answer.e2e_s, answer.text) == (2.0, (1.0,), 3.0, "ab")
    assert answer.cached_tokens is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "refusal"])
def test_reasoning_is_timed_and_is_no_part_of_the_text(name):
    answer = read((11.0, chunk(**{name: "hm"})), (13.0, chunk(content="a", finish="stop")), (13.0, usage())).answer()
    assert (answer.ttft_s, answer.gaps_s, answer.text) == (1.0, (2.0,), "a")


def test_a_tool_call_is_timed():
    call = {"index": 0, "function": {"arguments": "{}"}}
    answer = read((11.0, chunk(tool_calls=[call])), (12.0, chunk(finish="tool_calls")), (12.0, usage())).answer()
    assert (answer.ttft_s, answer.e2e_s, answer.text) == (1.0, 2.0, "")


def test_an_answer_without_text_has_no_time_of_the_first():
    answer = read((11.0, chunk(finish="stop")), (11.0, usage())).answer()
    assert (answer.ttft_s, answer.e2e_s, answer.gaps_s) == (None, 1.0, ())


def test_usage_in_every_chunk_counts_once():
    last = usage() | {"usage": USAGE | {"completion_tokens": 9}}
    assert read((11.0, usage()), (12.0, text("a", "stop")), (12.0, last)).answer().output_tokens == 9


def test_other_choices_are_not_mixed_in():
    other = {"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}]}
    assert read((11.0, text("a", "stop")), (12.0, other), (12.0, usage())).answer().text == "a"


@pytest.mark.parametrize(
    ("bodies", "kind", "words"),
    [
        ([chunk(content="a"), usage()], "malformed stream", "no finish_reason"),
        ([chunk(content="a", finish="stop")], "no usage", "include_usage"),
        ([chunk(finish="stop"), {"usage": {"prompt_tokens": 1}}], "no usage", "completion_tokens is None"),
        ([chunk(finish="stop"), {"usage": {"completion_tokens": 1, "prompt_tokens": -1}}], "no usage", "-1"),
        ([{"error": {"message": "out of memory"}}], "error in the stream", "out of memory"),
        ([{"error": "out of memory"}], "error in the stream", "out of memory"),
        ([[]], "malformed stream", "no JSON object"),
        ([{"choices": [5]}], "malformed stream", "attribute"),
        ([{"choices": [{"delta": "a"}]}], "malformed stream", "attribute"),
        ([{"choices": [{}]}], "malformed stream", "text"),
    ],
)
def test_what_is_missing_or_wrong_is_told(bodies, kind, words):
    with pytest.raises(Failure, match=words) as caught:
        read(*((11.0, body) for body in bodies)).answer()
    assert caught.value.kind == kind


@pytest.mark.parametrize("raw", [b"{", b"\xff", b"null", b""])
def test_what_is_no_json_object_is_told(raw):
    with pytest.raises(Failure) as caught:
        Reading(0.0).take(raw, 1.0)
    assert caught.value.kind == "malformed stream"


def test_nothing_may_follow_the_end():
    with pytest.raises(Failure, match=r"after \[DONE\]"):
        read((11.0, usage())).take(b"{}", 100.0)
