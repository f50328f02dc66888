"""Text between tags becomes JSON as the tool's schema says; what does not fit stays the text."""

import pytest

from mlx_serve.text.calls.literals import Value
from mlx_serve.text.calls.shapes import shape
from mlx_serve.text.calls.values import Conversion, Schema
from tests.pure.formatkit import Answer, each_way, model, split, tool

INTEGER, NULL = {"type": "integer"}, {"type": "null"}
ROOT = {"$defs": {"Size": INTEGER, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, NULL]}, "a/b": {"type": "array"}}}
CASES = [
    (INTEGER, "1234567890123456789", "1234567890123456789"),
    (INTEGER, "-007", "-7"),
    (INTEGER, "3.0", "3"),
    (INTEGER, "3.5", '"3.5"'),
    (INTEGER, "2026-01-15", '"2026-01-15"'),
    (INTEGER, "half", '"half"'),
    (INTEGER, "", '""'),
    (INTEGER, " 5\n", "5"),
    ({"type": "number"}, "0.10", "0.10"),
    ({"type": "number"}, "1e5", "1e5"),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "boolean"}, "yes", '"yes"'),
    ({"anyOf": [INTEGER, NULL]}, "5", "5"),
    ({"anyOf": [INTEGER, NULL]}, "null", "null"),
    ({"anyOf": [INTEGER, NULL]}, "None", "null"),
    ({"anyOf": [{"type": "boolean"}, NULL]}, "true", "true"),
    ({"type": ["string", "null"]}, "123", '"123"'),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": "string"}, "null", '"null"'),
    ({"type": "string"}, "  a\n", '"  a\\n"'),
    ({"type": "string"}, '{"a": 1}', '"{\\"a\\": 1}"'),
    ({"enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": [1, 2]}, "1", "1"),
    ({"enum": [1, "2"]}, "2", '"2"'),
    ({"const": True}, "true", "true"),
    ({"$ref": "#/$defs/Size"}, "7", "7"),
    ({"$ref": "#/$defs/a~1b"}, "[1]", "[1]"),
    ({"$ref": "#/$defs/Loop"}, "null", "null"),
    ({"$ref": "#/nowhere"}, "7", '"7"'),
    ({"type": "object"}, "{'a': True, 'b': None}", '{"a": true, "b": null}'),
    ({"type": "object"}, '{"a": "x\ny"}', '{"a": "x\\ny"}'),
    ({"type": "object"}, "[1]", '"[1]"'),
    ({"type": "array"}, "[12345678901234567890]", "[12345678901234567890]"),
    ({"type": "array"}, "[" * 100_000, '"' + "[" * 100_000 + '"'),
    ({"allOf": [INTEGER]}, "5", "5"),
    # Nothing is said: only what can be nothing else is no text.
    ({}, "5", '"5"'),
    (None, '{"a": 1}', '{"a": 1}'),
    (True, "x", '"x"'),
    ({"type": 5, "enum": 5, "anyOf": 5, "$ref": 5}, "5", '"5"'),
]


@pytest.mark.parametrize(("schema", "text", "want"), CASES)
def test_a_value_gets_the_type_of_its_schema(schema, text, want):
    assert Conversion(Schema(schema, ROOT)).json(text) == want


@pytest.mark.parametrize(
    ("schema", "begun", "want"),
    [
        ({"type": "string"}, "", True),
        ({"type": ["string", "null"]}, "nu", False),
        ({"type": ["string", "null"]}, "numb", True),
        ({"type": ["string", "integer"]}, "12", False),
        ({"type": ["string", "integer"]}, "12 a", True),
        ({"enum": ["a", "b"]}, "c", False),
        ({}, "[", False),
        ({}, "x", True),
    ],
)
def test_a_text_is_known_by_its_beginning(schema, begun, want):
    assert Conversion(Schema(schema, None)).is_surely_text(begun) is want


LITERALS = [
    ('{"a": 1, "b": [true, {"x": "}\\"y"}]} tail', '{"a": 1, "b": [true, {"x": "}\\"y"}]}'),
    ("{'a': 'it\\'s \"q\"', 'b': None}", '{"a": "it\'s \\"q\\"", "b": null}'),
    ("(a='x', n=1_0)", None),
    ("(a='\\x41', n=-3, t=(1, 2))", '{"a": "\\u0041", "n": -3, "t": [1, 2]}'),
    ('{"pattern": "\\d+\n"}', '{"pattern": "\\\\d+\\n"}'),
    ("{}", "{}"),
    ("{bad}", None),
    ('{"a" "b"}', None),
    ('("a")', None),
]


@pytest.mark.parametrize(("written", "want"), LITERALS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_arguments_are_written_as_json(written, want, size):
    value, text, out = Value(), "", ""
    for i in range(0, len(written), size):
        text += written[i : i + size]
        text = text[value.take(text, 0) :]
        out += value.pop()
    assert value.is_broken == (want is None)
    if want is not None:
        assert (out, value.is_done, value.kind) == (want, True, "object")


def test_a_shape_tells_a_beginning_from_a_mismatch():
    header = shape(" «functions.»{name}«:{word}» <|begin|> {json}")
    written = " functions.read:0<|begin|>\n{"
    assert header.match(written, 0)["name"] == "read"
    assert all(header.may_begin(written[:n], 0) for n in range(len(written)))
    assert not header.may_begin(" read a", 0)


# Forms that models write beside those of their templates

GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')


@pytest.mark.parametrize(
    ("written", "want"),
    [
        ('<|tool_call>call:google:mcp:read{path:<|"|>a<|"|>}<tool_call|>', ("google:mcp:read", '{"path": "a"}')),
        ('<|tool_call>call:read(path: "a")<tool_call|>', ("read", '{"path": "a"}')),
    ],
)
def test_gemma(written, want):
    tokenizer = model(special=GEMMA, template="tools tool_calls <|tool_call><tool_call|>")
    assert each_way(tokenizer, written, [tool("read")]) == Answer(calls=[want])


def test_a_call_whose_first_has_no_opening_and_one_that_ends_nowhere():
    tokenizer = model("<tool_call>", "</tool_call>", template="tools tool_calls <tool_call><function=<parameter=")
    tools = [tool("read", path={"type": "string"})]
    call = "<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
    one = ("read", '{"path": "a"}')
    assert each_way(tokenizer, f"Well.\n{call}\n<tool_call>\n{call}", tools) == Answer("Well.", "", [one, one])
    # What closes the value is missing.
    written = "<tool_call>\n<function=read>\n<parameter=path>\na\n</function>\n</tool_call>\nDone."
    assert each_way(tokenizer, written, tools) == Answer("Done.", "", [one])
    # Only what was offered is a call without the marker.
    assert each_way(tokenizer, "Use <function=other> here.", tools) == Answer("Use <function=other> here.")


def test_lists_of_calls_and_markers_that_are_text():
    tokenizer = model(template="tools tool_calls [TOOL_CALLS]")
    written = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}'
    assert each_way(tokenizer, written) == Answer(calls=[("add", '{"a": 1}'), ("add", '{"a": 2}')])
    form = '[{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'
    tokenizer = model(template="tools tool_calls <tool_call>")
    assert split(tokenizer, f"<tool_call>\n{form}\n</tool_call>") == Answer(calls=[("add", '{"a": 1}')])


def test_kimi_k3_may_write_all_arguments_as_json():
    section = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
    special = ("<|open|>", "<|close|>", "<|sep|>")
    tokenizer = model(special=special, template=None, tool_call=section, tool_format="kimi_k3")
    inner = '<|open|>json type="object"<|sep|>{"path": "a"}<|close|>json<|sep|>'
    call = f'<|open|>call tool="read" index="1"<|sep|>{inner}<|close|>call<|sep|>'
    written = f"{section[0]}{call}{call}{section[1]}"
    assert each_way(tokenizer, written, [tool("read")]) == Answer(calls=[("read", '{"path": "a"}')] * 2)
