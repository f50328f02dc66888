"""Items of the Responses dialect: as messages, as free text, and sealed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from mlx_serve.api.responses.freetext import FreeText
from mlx_serve.api.responses.history import as_messages
from mlx_serve.api.responses.items import Item, listed, new_id, seal, unseal

ITEMS = TypeAdapter(list[Item])
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def messages(*items):
    return as_messages(ITEMS.validate_python(list(items)))


def read(pieces) -> str:
    reader = FreeText()
    return "".join([*map(reader.feed, pieces), reader.flush()])


# Free text


@given(ANY_TEXT, st.booleans(), st.integers(1, 5))
def test_free_text_comes_out_as_it_went_in(text, ascii_only, size):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    assert read([arguments]) == read(pieces) == text


@given(ANY_TEXT, st.data())
def test_free_text_that_was_cut_off_is_a_beginning(text, data):
    arguments = json.dumps({"input": text})
    cut = data.draw(st.integers(len('{"input": "'), len(arguments)))
    assert text.startswith(read(arguments[:cut]))


def test_free_text_goes_out_as_it_comes():
    reader = FreeText()
    assert reader.feed('{"in') == ""
    assert reader.feed('put": "one ') == "one "
    assert reader.feed("two\\") == "two"
    assert reader.feed("n\\ud83d") == "\n"
    assert reader.feed("\\udc09 end") == "🐉 end".replace("🐉", "\U0001f409")
    assert reader.feed('"}') == ""
    assert reader.feed("more") == ""
    assert reader.flush() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x\\ny"}', "x\ny"),
        ('{"input": "a\\d\\\'b"}', "a\\d\\'b"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "\\ud800x"}', "\ufffdx"),
        ('"plain"', "plain"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
        ("no json", "no json"),
        ('{"patch": "\\ud800"}', "\ufffd"),
    ],
)
def test_what_a_model_writes_otherwise_is_read_as_well_as_it_goes(arguments, text):
    assert read([arguments]) == read(arguments) == text


# Reasoning, sealed


@given(ANY_TEXT)
def test_sealed_text_comes_back(text):
    assert unseal(seal(text)) == text


@pytest.mark.parametrize("text", ["", "gAAAAABnoise", "mlx-serve.1.%%%", "mlx-serve.1./w==", seal("abc")[:-1]])
def test_what_was_not_sealed_here_is_nothing(text):
    assert unseal(text) == ""


# Messages

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
SAID = {"role": "assistant", "content": "a"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}


def shape(*items) -> list[str]:
    """Each message as letters: r(easoning), c(ontent), f(unction calls)."""
    out = []
    for message in messages(*items):
        marks = [("r", "reasoning_content"), ("c", "content"), ("f", "tool_calls")]
        out.append(message["role"][0] + "".join(mark * len(message.get(key, "")) for mark, key in marks))
    return out


def test_what_an_assistant_does_at_a_time_is_one_message():
    assert shape(THOUGHT, SAID, CALL, CALL, OUTPUT) == ["arcff", "tc"]
    assert shape(CALL, OUTPUT, CALL, OUTPUT) == ["af", "tc", "af", "tc"]
    assert shape(CALL, SAID, OUTPUT) == ["acf", "tc"]


def test_thoughts_and_a_second_text_begin_a_message():
    assert shape(SAID, SAID) == ["ac", "ac"]
    assert shape(SAID, THOUGHT, SAID) == ["ac", "arc"]
    assert shape(THOUGHT, THOUGHT)[0].startswith("arr")


def test_reasoning_is_taken_from_where_there_is_most_of_it():
    summary = [{"type": "summary_text", "text": "s"}]
    every = {"type": "reasoning", "summary": summary, "content": THOUGHT["content"], "encrypted_content": seal("e")}
    assert messages(every)[0]["reasoning_content"] == "t"
    assert messages(every | {"content": None})[0]["reasoning_content"] == "e"
    assert messages(every | {"content": None, "encrypted_content": "gAAA"})[0]["reasoning_content"] == "s"
    assert messages({"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}) == []


# Items as they are given back


def test_a_kept_item_gets_what_is_missing():
    kept = listed({"role": "user", "content": "a", "phase": None})
    assert kept.pop("id").startswith("msg_")
    part = {"type": "input_text", "text": "a"}
    assert kept == {"role": "user", "content": [part], "type": "message", "status": "completed"}
    assert listed(OUTPUT | {"id": "mine", "status": "incomplete"}) == OUTPUT | {"id": "mine", "status": "incomplete"}
    assert messages(listed(SAID)) == messages(SAID)


def test_an_id_that_is_none_is_replaced():
    for ids in ({}, {"id": None}, {"id": ""}, {"id": 5}):
        assert listed(SAID | ids)["id"].startswith("msg_")
    assert listed({"type": "", "content": 5})["type"] == ""


def test_ids_tell_their_kind():
    kinds = ["response", "message", "reasoning", "function_call", "custom_tool_call", "web_search_call"]
    assert [new_id(kind).partition("_")[0] for kind in kinds] == ["resp", "msg", "rs", "fc", "ctc", "item"]
