"""Turns a request's constraint on its text (a JSON schema, a regex, ...) into a grammar in llguidance's form, as text.

Knows no tokens and no model: one grammar works for all models. In ``text``, only this module knows llguidance.
llguidance is an extra and is imported with the first grammar. A constraint that does not compile is a 400 that names
the request's field and, in a schema, the place. Compiling can take very long or end the process, so
``api/grammar_child.py`` does it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from mlx_serve.values import ApiError

# OpenAI's own limit on a schema's text is 120,000 characters.
MAX_CHARS = 120_000
# llguidance limits most of the cost of compiling, and the limits of the compiling process cover the rest. The limits
# below give clearer messages. Measured in seconds: 3,000 properties 0.3, 9,000 7; 15 patterns that one string must
# match 0.1, 20 of them 10; 500 GBNF rules that lead to each other 0.3, 3,000 more than 12.
MAX_PARTS = 2_000
MAX_MEETING_PATTERNS = 12
MAX_RULES = 500
# A regex of n optional letters, "a?" * n, takes time and memory that grow with the square of n: 16,000 characters
# 0.7 s and 150 MB, 80,000 characters 40 s and 4 GB.
MAX_REGEX_CHARS = 16_384
# llguidance can force text that has only one continuation, as the tokens that its tokenizer makes of it. For the first
# mask of "((a{1000}){1000}){10}" it computes all ten million letters. So forcing is off in every grammar; the first
# grammar of a list sets this option for all of them.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_NOT_IN_LARK = {"%json": "a JSON schema", "%llguidance": "llguidance's options"}
# The place of a fault in a schema is found by compiling the schema's parts, for at most this long.
_SEARCH_S = 0.5

# Each value can be written in one way only, that of Python's json.dumps: with free white space a small model never
# ends. All options are set, so that a schema's own "x-guidance" changes nothing.
_JSON_STYLE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
# The formats of JSON Schema that llguidance enforces. Others, such as "password" or "binary", do not restrict the text.
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"]
)
# llguidance accepts the 29th of February of any year, the year 0 and the second 60, which Python's datetime, and so
# pydantic, refuse. A regex has no calendar, so some valid days are excluded with them.
_DAY = "^([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(02-([01][0-9]|2[0-8])|0[13-9]|1)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_STRICTER = {"date": _DAY, "date-time": f"{_DAY}[0-9-]*T{_TIME}", "time": f"^{_TIME}"}

# Keywords of ``propertyNames`` that may restrict a string; all other keywords there are comments.
_NAME_KEYWORDS = frozenset(
    [
        *("type", "enum", "const", "pattern", "format", "minLength", "maxLength"),
        *("$ref", "anyOf", "oneOf", "allOf", "not", "if"),
    ]
)

# Where a schema contains other schemas: by name, in a list, or alone.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties")


@dataclass(frozen=True, slots=True)
class Rule:
    """A constraint on the text. ``param`` is the request's field that sets it, for errors.

    ``strict`` False: keywords of a JSON schema that cannot be enforced are ignored; True: they are refused.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any
    param: str
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Function:
    """A callable tool. ``parameters`` is a JSON schema; None: it takes none. ``strict`` as in a Rule."""

    name: str
    parameters: Mapping[str, Any] | None
    param: str
    strict: bool = True


def compile_rule(rule: Rule) -> str:
    """The grammar of a rule. Raises ApiError 400 that names its field."""
    if rule.kind == "json_schema":
        schema = {"name": "value", "json_schema": _checked_schema(rule.value, rule.param, strict=rule.strict)}
        return _grammar(_lark("start: @value"), schema)
    if rule.kind == "choice":
        grammar = _grammar(_lark("start: " + " | ".join(_literal(choice) for choice in rule.value)))
    elif rule.kind == "regex":
        grammar = _regex(rule)
    else:
        grammar = _free_grammar(rule)
    if fault := _fault(grammar):
        raise refused(rule.param, f"it cannot be compiled: {fault}")
    return grammar


def compile_forced_call(functions: Sequence[Function]) -> str:
    """The grammar of a call of one of some functions: {"name": ..., "arguments": {...}}.

    Raises ApiError 400 that names the tool whose parameters cannot be compiled.
    """
    # Each function has its own grammar, so that a reference in its parameters ("#/$defs/...") finds its root.
    calls = [
        f'{_literal(f"""{{"name": {json.dumps(function.name)}, "arguments": """)} @arguments{i} "}}"'
        for i, function in enumerate(functions)
    ]
    grammars: list[dict[str, Any]] = [_lark("start: " + " | ".join(calls))]
    for i, function in enumerate(functions):
        schema = _checked_schema(_parameters(function), function.param, strict=function.strict)
        grammars.append({"name": f"arguments{i}", "json_schema": schema})
    grammar = _grammar(*grammars)
    if fault := _fault(grammar):
        raise refused("tools", f"their parameters cannot be compiled: {fault}")
    return grammar


def _parameters(function: Function) -> Mapping[str, Any]:
    # Arguments are always an object, whatever the schema says.
    return {"properties": {}, **(function.parameters or {}), "type": "object"}


def check_installed(param: str) -> None:
    """Raises ApiError 400 if the extra is not installed."""
    if find_spec("llguidance") is None:
        text = f"'{param}' needs constrained decoding, which is not installed: pip install 'mlx-serve-http[structured]'"
        raise ApiError(400, text, param=param)


def _free_grammar(rule: Rule) -> str:
    """GBNF, as in llama.cpp, or Lark in llguidance's dialect, which is recognized by its ``start:``."""
    if len(rule.value) > MAX_CHARS or rule.value.count("::=") > MAX_RULES:
        raise refused(rule.param, f"it is longer than {MAX_CHARS} characters or {MAX_RULES} rules.")
    for word, what in _NOT_IN_LARK.items():
        if word in rule.value:
            raise refused(rule.param, f"a grammar cannot hold {what} here ({word}).")
    from llguidance import grammar_from

    try:
        return _grammar(_lark(grammar_from("gbnf", rule.value)))
    except ValueError as error:
        raise refused(rule.param, f"it cannot be compiled: {error}") from None


def _regex(rule: Rule) -> str:
    if len(rule.value) > MAX_REGEX_CHARS:
        raise refused(rule.param, f"the regex is longer than {MAX_REGEX_CHARS} characters.")
    from llguidance import LLMatcher

    escaped = json.loads(LLMatcher.grammar_from_regex(rule.value))
    return _grammar(_lark(escaped["grammars"][0]["lark_grammar"]))


def _lark(text: str) -> dict[str, str]:
    """A Lark grammar that stands first in a list."""
    return {"lark_grammar": _OPTIONS + text}


def _literal(text: str) -> str:
    """A string of a Lark grammar, which is written as in JSON."""
    return json.dumps(text)


def _grammar(*grammars: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _fault(grammar: str) -> str:
    """llguidance's error, or ""."""
    if len(grammar) > 2 * MAX_CHARS:
        return f"it is longer than {MAX_CHARS} characters."
    from llguidance import LLMatcher, LLParserLimits

    return str(LLMatcher.validate_grammar(grammar, limits=LLParserLimits(verbose_errors=False))).strip()


def _checked_schema(schema: Any, param: str, *, strict: bool) -> dict[str, Any]:
    """The schema in the form that is compiled. Raises ApiError 400 that names the place of the fault."""
    if not isinstance(schema, dict | bool):
        raise refused(param, "a JSON schema must be an object.")
    try:
        _check_size(schema, param)
        tidy = _tidied(schema, strict=strict)
        if len(json.dumps(tidy, allow_nan=False)) > MAX_CHARS:
            raise refused(param, f"the JSON schema is longer than {MAX_CHARS} characters.")
        if fault := _schema_fault(tidy):
            raise refused(param, f"the JSON schema cannot be compiled: {fault} (at {_where(tidy, fault)})")
    except RecursionError:
        raise refused(param, "the JSON schema is nested too deeply.") from None
    except ValueError:  # a number out of a double's range
        raise refused(param, "the JSON schema holds a number that is too large.") from None
    return tidy


def _check_size(schema: Any, param: str) -> None:
    parts = list(_all_parts(schema))
    if len(parts) > MAX_PARTS:
        raise refused(param, f"the JSON schema has more than {MAX_PARTS} parts.")
    patterns = {str(part[key]) for part in parts for key in ("pattern", "format", "multipleOf") if key in part}
    patterns |= {name for part in parts for name in _names(part.get("patternProperties"))}
    if any(len(pattern) > MAX_REGEX_CHARS for pattern in patterns):
        raise refused(param, f"the JSON schema has a pattern of more than {MAX_REGEX_CHARS} characters.")
    if len(patterns) > MAX_MEETING_PATTERNS and any(_meets_others(part) for part in parts):
        text = f"more than {MAX_MEETING_PATTERNS} patterns in a JSON schema that combines schemas (allOf)."
        raise refused(param, text)


def _names(schemas: Any) -> list[str]:
    return list(schemas) if isinstance(schemas, dict) else []


def _schema_fault(schema: Any) -> str:
    return _fault(_grammar({"json_schema": schema}))


def _tidied(schema: dict[str, Any] | bool, *, strict: bool) -> dict[str, Any]:
    if isinstance(schema, bool):
        # true and false as schemas: options can only stand in an object.
        schema = {} if schema else {"enum": []}
    closed = not any(_meets_others(part) for part in _all_parts(schema))
    tidy = _rebuilt(schema, _close if closed else lambda part: part)
    return {**tidy, "x-guidance": {**_JSON_STYLE, "lenient": not strict}}


def _rebuilt(schema: Any, finish: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy without keywords that would mislead llguidance; ``finish`` is applied to each schema in it."""
    if not isinstance(schema, dict):
        return schema
    out = {key: value for key, value in schema.items() if key != "x-guidance"}
    if isinstance(out.get("format"), str):
        _rewrite_format(out, out["format"])
    if isinstance(out.get("propertyNames"), dict):
        _rewrite_names(out, out["propertyNames"])
    for key in out.keys() & _BY_NAME:
        if isinstance(out[key], dict):
            out[key] = {name: _rebuilt(part, finish) for name, part in out[key].items()}
    for key in out.keys() & _IN_LIST:
        if isinstance(out[key], list):
            out[key] = [_rebuilt(part, finish) for part in out[key]]
    for key in out.keys() & _ALONE:
        out[key] = _rebuilt(out[key], finish)
    return finish(out)


def _rewrite_format(schema: dict[str, Any], name: str) -> None:
    if name not in _FORMATS:
        del schema["format"]
    elif name in _STRICTER:
        schema.setdefault("pattern", _STRICTER[name])


def _rewrite_names(schema: dict[str, Any], names: dict[str, Any]) -> None:
    """Replaces ``propertyNames`` by keywords that llguidance knows, if there are any; zod writes it for each record.

    Names are always strings. A list of names becomes optional properties, and no others are allowed.
    """
    wanted = {
        key: value for key, value in names.items() if key in _NAME_KEYWORDS and (key, value) != ("type", "string")
    }
    if not wanted:
        del schema["propertyNames"]
    elif wanted.keys() == {"enum"} and isinstance(wanted["enum"], list) and "patternProperties" not in schema:
        named, rest = schema.get("properties"), schema.get("additionalProperties", True)
        known = named if isinstance(named, dict) else {}
        listed = {name: known.get(name, rest) for name in wanted["enum"] if isinstance(name, str)}
        schema["properties"] = {name: value for name, value in listed.items() if value is not False}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbids further properties in an object that names some; otherwise the object might never end.

    JSON Schema allows further properties, so the result still conforms. vLLM's default grammars do the same.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    open_by_wish = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & schema.keys()
    if open_by_wish or not isinstance(properties, dict) or not isinstance(required, list):
        return schema
    if any(isinstance(name, str) and name not in properties for name in required):
        return schema
    return {**schema, "additionalProperties": False}


def _meets_others(schema: Mapping[str, Any]) -> bool:
    """Whether a value must match this and another schema: if either forbade further properties, no
    value might be left.
    """
    combined = {"$ref", "anyOf", "oneOf"} & schema.keys()
    own = {"properties", "required", "additionalProperties", "patternProperties"} & schema.keys()
    return "allOf" in schema or len(combined) > 1 or bool(combined and own)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its JSON pointer from there (RFC 6901)."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield f"/{key}/" + name.replace("~", "~0").replace("/", "~1"), part
        elif key in _IN_LIST and isinstance(value, list):
            yield from ((f"/{key}/{i}", part) for i, part in enumerate(value))
        elif key in _ALONE:
            yield f"/{key}", value


def _all_parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for _, part in _parts(schema):
            yield from _all_parts(part)


def _where(schema: dict[str, Any], fault: str) -> str:
    """The JSON pointer of the smallest part that has the same fault when compiled alone."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    deadline = time.monotonic() + _SEARCH_S
    pointer, part = "#", schema
    while (found := _faulty_part(part, shared, fault, deadline)) is not None:
        step, part = found
        pointer += step
    return pointer


def _faulty_part(part: Any, shared: dict[str, Any], fault: str, deadline: float) -> tuple[str, Any] | None:
    for step, inner in _parts(part):
        if time.monotonic() > deadline:
            return None
        if _schema_fault({**shared, **inner} if isinstance(inner, dict) else inner) == fault:
            return step, inner
    return None


def refused(param: str, reason: str) -> ApiError:
    """The error for an unsupported value."""
    return ApiError(400, f"Invalid value for '{param}': {reason}", param=param)
