"""Tool calls of each format that is read as it comes; each answer is cut in two at every place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.testing import FakeTokenizer
from mlx_serve.text.calls.registry import FAMILIES, HERMES, call_format
from mlx_serve.text.formats import formats
from tests.pure.formatkit import (
    TOOLS,
    Answer,
    deepseek,
    each_way,
    hermes_as_text,
    kimi_k2,
    llama3,
    mistral,
    model,
    qwen3,
    split,
)

ARGUMENTS = '{"city": "Zürich {\\"x\\"} </tool_call>", "days": [1, {"a": "}"}]}'
WEATHER = ("get_weather", ARGUMENTS)
ADD = ("add", '{"a": 1}')


def only(*calls) -> Answer:
    return Answer(calls=list(calls))


def hermes(arguments: str = ARGUMENTS, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = [
    # Qwen3, Hermes: JSON between markers.
    (qwen3, hermes(), only(WEATHER)),
    (
        qwen3,
        f"<think>\nhm\n</think>\n\nSure.\n{hermes()}\n{hermes('{}', 'add')}\n",
        Answer("\n\nSure.", "\nhm\n", [WEATHER, ("add", "{}")]),
    ),
    (qwen3, hermes()[:-12] + "\n" + hermes('{"a": 1}', "add"), only(WEATHER, ADD)),  # the closing marker is missing
    (qwen3, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', only(ADD)),
    (qwen3, '<tool_call>{"name": "add"}</tool_call>', only(("add", "{}"))),
    (qwen3, '<tool_call>{"name": "add", "arguments": null, "id": [1, "}"]}</tool_call>', only(("add", "{}"))),
    (qwen3, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', only(ADD)),
    (qwen3, '<tool_call>{"name": "add", "parameters": {"a": 1}}}</tool_call>', only(ADD)),  # a brace too many
    (
        qwen3,
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]</tool_call>',
        only(ADD, ("add", "{}")),
    ),
    (hermes_as_text, hermes().replace(" </tool_call>\\", "\\"), only(WEATHER)),
    (hermes_as_text, hermes(), only(WEATHER)),  # a marker in a string of the arguments is text
    # Mistral, old and new.
    (
        mistral,
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]',
        only(ADD, ADD),
    ),
    (
        mistral,
        f'Well. [TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[ARGS]{{"a": 1}}',
        Answer("Well.", "", [WEATHER, ADD]),
    ),
    (mistral, f"[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}", only(WEATHER)),
    (mistral, '[TOOL_CALLS]add{"a": 1}', only(ADD)),
    (mistral, "[THINK]hm[/THINK]Yes.", Answer("Yes.", "hm")),
    # Kimi K2.
    (
        kimi_k2,
        f"<think>hm</think><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}"
        '<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        Answer("", "hm", [WEATHER, ADD]),
    ),
    # DeepSeek V3 and R1, then V3.1.
    (
        deepseek,
        f"<think>hm</think>Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Answer("Ok.", "hm", [WEATHER, ADD]),
    ),
    (
        deepseek,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        only(WEATHER, ADD),
    ),
    # Llama 3: with the tag, without any marker, several.
    (llama3, f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}', only(WEATHER)),
    (llama3, f'\n{{"name": "get_weather", "parameters": {ARGUMENTS}}}', only(WEATHER)),
    (
        llama3,
        '{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
        only(ADD, ADD),
    ),
]


@pytest.mark.parametrize(("make", "written", "want"), CASES)
def test_calls_come_whole_however_the_text_comes(make, written, want):
    assert each_way(make(), written) == want


MALFORMED = [
    (qwen3, '<tool_call>{"name": "add", "arguments": {bad}}</tool_call>'),
    (qwen3, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (qwen3, '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
    (qwen3, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (qwen3, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (qwen3, '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
    (qwen3, "<tool_call>add(1)</tool_call> and on"),
    (mistral, "[TOOL_CALLS]what is this"),
    (mistral, "[TOOL_CALLS]two words[ARGS]{}"),
    (
        kimi_k2,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (deepseek, "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    (llama3, '<|python_tag|>print("hi")'),
    (llama3, '{"name": "Alice", "age": 5} is the JSON'),
    (llama3, '{"name": "add"}'),
    (llama3, '{"a": {"b": 1}}'),
    (llama3, 'Like so: {"name": "add", "parameters": {}}'),
]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("make", "written"), MALFORMED)
def test_what_is_no_call_comes_back_as_it_was_written(make, written, cut):
    assert each_way(make(), written, cut=cut) == Answer(written)


@pytest.mark.parametrize("end", ["argum", 'arguments": '])
def test_a_call_without_arguments_is_one_only_if_it_was_cut_off(end):
    written = '<tool_call>{"name": "add", "' + end
    assert each_way(qwen3(), written) == Answer(written)
    assert each_way(qwen3(), written, cut=True) == only(("add", ""))


def test_an_object_that_is_none_in_place_of_a_name_is_no_call():
    written = '<tool_call>{"name": {"add", "a"}, "arguments": {}}</tool_call>'
    assert each_way(qwen3(), written) == Answer(written)


def test_of_markup_that_was_cut_off_nothing_is_left():
    written = '<tool_call>{"name": "add'
    assert each_way(qwen3(), written) == Answer(written)
    for n in range(2, len(written)):
        got = each_way(hermes_as_text(), "So. " + written[:n], cut=True)
        assert (got.content.strip(), got.calls) == ("So.", []), n


def test_a_call_that_was_cut_off_keeps_what_there_is():
    whole = hermes('{"a": 1}', "add")
    assert each_way(qwen3(), whole[: whole.index("1") + 1], cut=True) == only(("add", '{"a": 1'))
    assert each_way(mistral(), '[TOOL_CALLS]add[ARGS]{"a": "x', cut=True) == only(("add", '{"a": "x'))
    # Half a closing marker is no text.
    assert each_way(hermes_as_text(), hermes('{"a": 1}', "add")[:-5], cut=True) == only(ADD)


def test_a_marker_that_is_a_control_token_ends_broken_arguments():
    assert each_way(qwen3(), '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>x') == Answer(
        "x", "", [("add", '{"a": 1')]
    )
    # Inside of a string it is text.
    written = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert each_way(qwen3(), written) == only(("add", '{"a": "</tool_call>"}'))


def test_text_behind_a_call_is_not_lost():
    assert each_way(qwen3(), '<tool_call>{"name": "add", "arguments": {"a": 1}} so</tool_call>') == Answer(
        "so", "", [ADD]
    )


def test_arguments_go_out_while_they_come():
    found = formats(qwen3())
    symbols = found.symbols(TOOLS)
    splitter = found.splitter(symbols, TOOLS, in_reasoning=False)
    opening = symbols.marker("<tool_call>")
    assert splitter.feed(opening + '{"name": "add", "arguments": ') == []
    steps = ['{"a', '": [1', ", 2", "]}"]
    got = [[(piece.kind, piece.text) for piece in splitter.feed(step)] for step in steps]
    assert got[0] == [("call", "add"), ("arguments", '{"a')]
    assert [text for pieces in got[1:] for _, text in pieces] == steps[1:]


def test_without_tools_a_call_is_text():
    assert each_way(qwen3(), "<tool_call>x</tool_call>", ()) == Answer("<tool_call>x</tool_call>")
    # Markers that are never text are not.
    assert each_way(mistral(), "[TOOL_CALLS]x", ()) == Answer("x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([None, 2]),
)
def test_any_arguments_come_through_unchanged(all_arguments, sizes, indent):
    texts = [json.dumps(arguments, ensure_ascii=False, indent=indent) for arguments in all_arguments]
    calls = [("add", text) for text in texts]
    written = "".join(f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call>' for text in texts)
    assert split(qwen3(), written, sizes=sizes) == only(*calls)
    written = "".join(f"[TOOL_CALLS]add[ARGS]{text}" for text in texts)
    assert split(mistral(), written, sizes=sizes) == only(*calls)


FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", ',
    '"arguments": {',
    "}",
    "}}",
    '"',
    "x",
    "\n",
    ":",
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.booleans(),
)
def test_any_rubbish_gives_the_same_however_it_comes(fragments, sizes, cut):
    written = "".join(fragments)
    for make in (qwen3, hermes_as_text, llama3):
        assert split(make(), written, sizes=sizes, cut=cut) == split(make(), written, sizes=(10_000,), cut=cut)


# Forced calls


def test_a_forced_call_is_the_whole_content():
    written = f'<think>hm</think>{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
    assert each_way(qwen3(), written, forced_call=True) == Answer("", "hm", [WEATHER])
    assert each_way(FakeTokenizer(think=None), written.partition("</think>")[2], forced_call=True) == only(WEATHER)


def test_of_a_forced_call_that_was_cut_off_there_is_what_there_is():
    written = '{"name": "add", "arguments": {"a": 1}}'
    for n in range(len(written)):
        got = split(qwen3(), written[:n], forced_call=True, cut=True)
        arguments = written[29 : min(n, len(written) - 1)]
        assert got == (only(("add", arguments if n > 30 else "")) if n >= 14 else Answer()), written[:n]


def test_a_grammar_waits_for_the_end_of_the_reasoning_and_keeps_out_of_calls():
    tokenizer = qwen3()
    ids = {text: token for token, text in tokenizer.controls.items()}
    gate = formats(tokenizer).gate(in_reasoning=True, with_calls=True)
    assert (gate.waiting, gate.until, gate.detours) == (True, (ids["</think>"],), (ids["<think>"],))
    assert gate.exits == (ids["<tool_call>"],)
    # A marker that is text has no token of its own.
    gate = formats(hermes_as_text()).gate(in_reasoning=False, with_calls=True)
    assert (gate.waiting, gate.until, gate.exits) == (False, (), ())


# Which format


def test_formats_are_chosen_by_the_template_or_the_vocabulary():
    assert call_format(llama3()).opening == "<|python_tag|>"
    assert call_format(deepseek()).opening == "<｜tool▁calls▁begin｜>"
    assert call_format(model(template="tools <TOOLCALL>")).closing == "</TOOLCALL>"
    assert call_format(model("｜DSML｜", template=None)).opening == "<｜DSML｜function_calls>"
    assert call_format(model(template="tools")) == HERMES
    # A model that was told of its tools as text writes calls as it was told.
    assert formats(model(template="nothing", tool_call=("[X]", ""), tool_format="mistral")).calls == HERMES


def test_an_answer_may_be_a_call_of_a_tool_that_was_offered():
    written = '{"name": "add", "arguments": {"a": 1}}'
    assert each_way(model(template="nothing"), written) == only(ADD)
    assert each_way(model(template="nothing"), written, ()) == Answer(written)
    assert each_way(qwen3(), written) == Answer(written)


def test_dsml():
    tokenizer = model("｜DSML｜", template=None)
    written = (
        'Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">[1]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">x > 1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    assert each_way(tokenizer, written) == Answer("Ok.", "", [("add", '{"a": [1], "b": "x > 1"}')])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.form.opening)
def test_a_call_as_a_model_is_told_to_write_it_is_read(family):
    """Where the template does not show the tools, the model knows nothing but the example."""
    tokenizer = model(template=" ".join(["tools", "tool_calls", *family.signs]))
    assert formats(tokenizer).calls == family.form
    written = family.form.example.replace("FUNCTION", "add").replace("{ARGUMENTS}", '{"a": 1}')
    answer = split(tokenizer, written)
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [("add", {"a": 1})]
