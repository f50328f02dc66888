"""Grammars: what compiles, what is refused and where, and what that may cost."""

import json
import re
import sys

import pytest

from mlx_serve.text.grammar import (
    MAX_CHARS,
    MAX_REGEX_CHARS,
    Function,
    Rule,
    check_installed,
    compile_forced_call,
    compile_rule,
)
from mlx_serve.values import ApiError

pytest.importorskip("llguidance")


def compiled(schema):
    """The schema as llguidance gets it."""
    grammar = json.loads(compile_rule(Rule("json_schema", schema, "p")))
    return {key: value for key, value in grammar["grammars"][1]["json_schema"].items() if key != "x-guidance"}


def refusal(kind, value) -> ApiError:
    with pytest.raises(ApiError) as caught:
        compile_rule(Rule(kind, value, "response_format"))
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    return caught.value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {}),
        ("json_schema", True),
        ("json_schema", {"type": "object"}),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}),
        ("json_schema", {"type": "string", "format": "password", "title": "t", "default": "x", "examples": [1]}),
        ("json_schema", {"$schema": "https://json-schema.org/draft/2020-12/schema", "const": 1}),
        ("json_schema", {"x-guidance": {"no such option": 1}}),
        ("regex", r"[a-z]{1,5}(\.[a-z]+)?"),
        ("choice", ["a", 'b"\n', "", "\x00\x7f", "ü😀"]),
        ("grammar", 'root ::= "yes" | "no" ws\nws ::= [ \\t]*'),
        ("grammar", 'start: "a" | B\nB: /b+/'),
    ],
)
def test_what_compiles(kind, value):
    assert compile_rule(Rule(kind, value, "p"))


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("json_schema", [1], "must be an object"),
        ("json_schema", "text", "must be an object"),
        ("json_schema", False, "#"),
        ("json_schema", {"type": "strin"}, "at #)"),
        ("json_schema", {"properties": {"a": {"items": {"type": "strin"}}}}, "at #/properties/a/items)"),
        ("json_schema", {"anyOf": [{}, {"properties": {"a/b": {"not": {}}}}]}, "at #/anyOf/1/properties/a~1b)"),
        (
            "json_schema",
            {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"uniqueItems": True}}},
            "uniqueItems",
        ),
        ("json_schema", {"$ref": "#/$defs/none"}, "'/$defs/none' does not exist"),
        ("json_schema", {"$ref": "https://example.com/schema"}, "example.com"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
        ("json_schema", {"pattern": "("}, "unclosed group"),
        ("json_schema", {"required": 5, "properties": {}}, "required"),
        ("json_schema", {"minimum": 10**400}, "out of range"),
        ("json_schema", {"minimum": float("inf")}, "too large"),
        ("regex", "a[", "unclosed character class"),
        ("regex", "(?=a)b", "look-ahead"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "root ::= [a", "end of input"),
        ("grammar", "", "root"),
        ("grammar", 'start: %json {"allOf": []}', "JSON schema"),
        ("grammar", '%llguidance {"no_forcing": false}\nstart: "a"', "options"),
    ],
)
def test_what_does_not_compile_says_where(kind, value, said):
    assert said in refusal(kind, value).message


def nested(n):
    schema = {}
    for _ in range(n):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", nested(200)),
        ("json_schema", nested(5000)),
        ("json_schema", {"properties": {str(i): {} for i in range(10_000)}}),
        ("json_schema", {"enum": ["x" * MAX_CHARS]}),
        ("json_schema", {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(200)]}),
        ("json_schema", {"allOf": [{"patternProperties": {f"a.{{{i}}}b": {}}} for i in range(200)]}),
        ("regex", "a" * (MAX_REGEX_CHARS + 1)),
        ("json_schema", {"pattern": "a" * (MAX_REGEX_CHARS + 1)}),
        ("json_schema", {"patternProperties": {"a" * (MAX_REGEX_CHARS + 1): {}}}),
        ("grammar", "root ::= " + "(" * 100_000),
        ("grammar", "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(3000)), 'r3000 ::= "a"'])),
    ],
)
def test_what_would_cost_much_is_refused(kind, value):
    # Without these bounds some of them would not end.
    refusal(kind, value)


@pytest.mark.parametrize("schema", [{"uniqueItems": True}, {"not": {}}, {"propertyNames": {"pattern": "^a"}}])
def test_what_cannot_be_enforced_is_ignored_unless_the_request_is_strict(schema):
    schema = {"properties": {"a": schema}}
    assert compile_rule(Rule("json_schema", schema, "p", strict=False))
    assert compile_forced_call([Function("f", schema, "p", strict=False)])
    assert "at #/properties/a)" in refusal("json_schema", schema).message
    with pytest.raises(ApiError):
        compile_forced_call([Function("f", schema, "p")])


@pytest.mark.parametrize("names", [{"type": "string"}, {}, {"type": "string", "title": "key"}])
def test_names_of_properties_that_may_be_any_string_are_no_rule(names):
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert compiled(record) == {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "properties"),
    [
        ({"additionalProperties": {"type": "integer"}}, {"a": {"type": "integer"}, "b": {"type": "integer"}}),
        ({}, {"a": True, "b": True}),
        ({"properties": {"a": {"const": 1}, "c": {}}, "additionalProperties": False}, {"a": {"const": 1}}),
    ],
)
def test_listed_names_become_optional_properties(schema, properties):
    record = {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, **schema}
    assert compiled(record) == {"type": "object", "properties": properties, "additionalProperties": False}


def test_objects_that_name_their_properties_get_no_others():
    inner = {"type": "object", "properties": {"b": {}}, "required": ["b"]}
    schema = compiled({"properties": {"a": inner}})
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"] == {**inner, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "required": ["b"]},
        {"allOf": [{"properties": {"a": {}}, "type": "object"}, {"properties": {"b": {}}, "type": "object"}]},
        {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": {"properties": {"a": {}}}}},
        {"anyOf": [{"properties": {"a": {}}}], "required": ["c"]},
    ],
)
def test_objects_that_must_stay_open_do(schema):
    assert compiled(schema) == schema


def test_a_schema_is_not_changed_where_it_is_no_schema():
    schema = {"const": {"format": "password", "properties": {}}}
    assert compiled(schema) == schema
    named = compiled({"properties": {"format": {"type": "string"}, "x-guidance": {"type": "string"}}})
    assert set(named["properties"]) == {"format", "x-guidance"}


@pytest.mark.parametrize(
    ("name", "taken", "left"),
    [
        ("date", ["2024-02-28", "0001-10-31", "1999-12-01"], ["2023-02-29", "2024-02-29", "0000-01-01", "2023-04-31"]),
        (
            "date-time",
            ["2024-02-28T23:59:59Z", "2024-11-30T00:00:00.5+01:00"],
            ["2024-02-28T23:59:60Z", "2023-02-29T00:00:00Z", "0000-01-01T00:00:00Z"],
        ),
        ("time", ["23:59:59Z"], ["23:59:60Z"]),
    ],
)
def test_dates_and_times_are_ones_that_python_knows(name, taken, left):
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer("byte")
    schema = {"type": "string", "format": name}
    grammar = compile_rule(Rule("json_schema", schema, "p"))

    def fits(text):
        matcher = LLMatcher(tokens, grammar)
        return matcher.consume_tokens(tokens.tokenize_str(json.dumps(text))) and matcher.is_accepting()

    assert [fits(text) for text in taken] == [True] * len(taken)
    assert [fits(text) for text in left] == [False] * len(left)


def test_the_parameters_of_a_forced_call_that_cannot_be_compiled_are_named():
    functions = [Function("f", None, "tools[0]"), Function("g", {"properties": {"a": {"type": "x"}}}, "tools[1]")]
    with pytest.raises(ApiError) as caught:
        compile_forced_call(functions)
    assert (caught.value.status, caught.value.param) == (400, "tools[1]")
    assert "#/properties/a" in caught.value.message


def test_each_function_s_references_have_their_own_root():
    def function(value):
        parameters = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"const": value}}}
        return Function(f"f{value}", parameters, "p")

    grammars = json.loads(compile_forced_call([function(1), function(2)]))["grammars"]
    assert [grammar["json_schema"]["$defs"]["A"] for grammar in grammars[1:]] == [{"const": 1}, {"const": 2}]


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    check_installed("p")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ApiError, match=r"pip install 'mlx-serve-http\[structured\]'") as caught:
        check_installed("p")
    assert (caught.value.status, caught.value.param) == (400, "p")


HUGE = "((a{1000}){1000}){10}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: compile_rule(Rule("regex", HUGE, "p")),
        lambda: compile_rule(Rule("json_schema", {"type": "string", "pattern": HUGE}, "p")),
        lambda: compile_rule(Rule("grammar", f"start: /{HUGE}/", "p")),
        lambda: compile_rule(Rule("grammar", 'root ::= "a"', "p")),
        lambda: compile_rule(Rule("choice", ["aaaa"], "p")),
        lambda: compile_forced_call([Function("f", {"properties": {"a": {"pattern": HUGE}}}, "p")]),
    ],
)
def test_no_grammar_forces_text(make):
    # With forcing, the first mask of these takes gigabytes.
    first = json.loads(make())["grammars"][0]["lark_grammar"]
    assert re.match(r'%llguidance {"no_forcing": true}\n', first)
