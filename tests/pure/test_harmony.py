"""gpt-oss's format: answers of several messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.text.formats import formats
from tests.pure.formatkit import HARMONY, TOOLS, Answer, each_way, gpt_oss, model, split

ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
ADD = ("add", '{"a": 1}')
CASES = [
    ("<|channel|>final<|message|>Hi.", Answer("Hi.")),
    (ANALYSIS + "<|channel|>final<|message|>Hi.<|return|>", Answer("Hi.", "Let me see.")),
    # The recipient behind the channel and before it; with and without the type.
    (
        ANALYSIS + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        Answer("", "Let me see.", [ADD]),
    ),
    (
        ANALYSIS + '<|channel|>commentary to=functions.add<|constrain|>json<|message|>{"a": 1}',
        Answer("", "Let me see.", [ADD]),
    ),
    (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', Answer("", "", [ADD])),
    ('<|channel|>analysis to=functions.add code<|message|>{"a": 1}', Answer("", "", [ADD])),
    ('<|channel|>commentary to=add<|message|>{"a": 1}\n', Answer("", "", [ADD])),
    # Several messages.
    (
        "<|channel|>commentary<|message|>First this.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"b": "x"}<|call|>',
        Answer("First this.", "", [ADD, ("add", '{"b": "x"}')]),
    ),
    (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.",
        Answer("", "One.\nTwo."),
    ),
    ("<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", Answer("a\nb")),
    # A message that has no end, and one without a channel.
    ("<|channel|>analysis<|message|>One.<|start|>assistant<|channel|>final<|message|>b", Answer("b", "One.")),
    ("<|channel|>analysis<|message|>One.<|channel|>final<|message|>b", Answer("b", "One.")),
    ("<|message|>b<|end|>", Answer("b")),
    # An answer without any header, and one that a grammar began.
    ("Just text.", Answer("Just text.")),
    ('{"x": 1}<|end|>', Answer('{"x": 1}')),
    # Nobody was asked: the tools of ChatGPT are not ours.
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", Answer("", "print(1)")),
    ("<|channel|>commentary to=functions.add<|message|><|call|>", Answer("", "", [("add", "{}")])),
    # Malformed.
    ("<|channel|>commentary to=functions.add<|message|>a = 1<|call|>", Answer("a = 1")),
    ("<|channel|>commentary to=functions.add<|message|>{bad}<|call|>", Answer("{bad}")),
    ('<|channel|>commentary to=functions.add<|message|>{"a": 1} and<|call|>', Answer(" and", "", [ADD])),
    # Markers as text are text.
    ("<|channel|>final<|message|>`<|channe` and <|message|>x", Answer("`<|channe` and x")),
]


@pytest.mark.parametrize(("written", "want"), CASES)
def test_messages(written, want):
    assert each_way(gpt_oss(), written) == want


def test_a_marker_that_is_written_as_text_is_text():
    found = formats(gpt_oss())
    symbols = found.symbols(TOOLS)
    splitter = found.splitter(symbols, TOOLS, in_reasoning=False)
    splitter.feed(symbols.marker("<|channel|>final<|message|>"))
    assert [p.text for p in splitter.feed("`<|end|>` <|call|>")] == ["`<|end|>` <|call|>"]


def test_without_tools_there_are_no_calls():
    written = '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'
    assert each_way(gpt_oss(), written, ()) == Answer('{"a": 1}')


@pytest.mark.parametrize("written", [case[0] for case in CASES if "functions.add" in case[0] or "final" in case[0]])
def test_cut_off_anywhere_nothing_of_a_header_shows(written):
    tokens = list(HARMONY)
    at = 0
    while at < len(written):
        at += next((len(token) for token in tokens if written.startswith(token, at)), 1)
        got = split(gpt_oss(), written[:at], cut=True)
        assert not any(
            mark in got.content + got.reasoning for mark in ("<|e", "<|s", "<|m", "to=", "assist", "commentary")
        )


def test_a_call_that_was_cut_off_keeps_what_there_is():
    written = '<|channel|>commentary to=functions.add<|message|>{"a": '
    assert each_way(gpt_oss(), written, cut=True) == Answer("", "", [("add", '{"a": ')])
    start = written[:-5]
    assert each_way(gpt_oss(), start, cut=True) == Answer("", "", [("add", "{")])
    assert each_way(gpt_oss(), start[:-1], cut=True) == Answer("", "", [("add", "")])
    # Where nothing was cut off, it is no call.
    assert each_way(gpt_oss(), start) == Answer("{")


def test_a_forced_call_comes_behind_the_reasoning():
    call = '{"name": "add", "arguments": {"a": 1}}'
    for written in (ANALYSIS + "<|channel|>final<|message|>" + call, call):
        got = each_way(gpt_oss(), written, forced_call=True)
        assert got.calls == [ADD]
        assert not got.content


def test_a_forced_call_may_come_in_the_model_s_own_way():
    written = '<|channel|>commentary to=functions.add<|message|>{"a": 1}'
    assert each_way(gpt_oss(), written, forced_call=True) == Answer("", "", [ADD])


def test_a_grammar_waits_for_the_final_message():
    tokenizer = gpt_oss()
    gate = formats(tokenizer).gate(in_reasoning=False, with_calls=True)
    assert gate.waiting
    assert tokenizer.decode(gate.until) == "<|channel|>final<|message|>"


PARTS = [
    *HARMONY,
    "analysis",
    "commentary",
    "final",
    " to=functions.add",
    "assistant",
    "{",
    '"a": 1',
    "}",
    "text",
    "\n",
]


@given(
    st.lists(st.sampled_from(PARTS), max_size=16), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans()
)
def test_any_rubbish_gives_the_same_however_it_comes(parts, sizes, cut):
    written = "".join(parts)
    assert split(gpt_oss(), written, sizes=sizes, cut=cut) == split(gpt_oss(), written, sizes=(10_000,), cut=cut)


def test_only_gpt_oss_is_harmony():
    assert formats(gpt_oss()).is_harmony
    assert not formats(model(special=("<|start|>", "<|message|>"))).is_harmony
