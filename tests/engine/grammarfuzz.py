"""Random grammars as hostile and as careless clients send them: JSON schemas, regexes, Lark and GBNF."""

import json
import random
import string

LETTERS = string.ascii_letters + string.digits + " _-äß漢😀\\\"'/[](){}|*+?.^$,:;<>=!&%#@~`\n\t\x00"
CLASSES = ["[a-z]", "[^x]", ".", r"\d", r"\w", r"\s", r"\p{L}", "[0-9a-f]", "[\\x00-\\xff]", "(?i:ab)", r"\b", "^", "$"]
COUNTS = ["*", "+", "?", "{2}", "{0,3}", "{5,}", "{1000}", "{0,1000}", "*?", "{3,1}"]
FORMATS = ["date", "date-time", "email", "uri", "ipv4", "ipv6", "uuid", "hostname", "duration", "time", "x"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object", "strin"]
SIZES = [0, 1, 2, 7, 97, 1000, 10**6, -1, 0.5, 10**15, 1e300]


def regex(rng, depth=0):
    if depth > 4 or rng.random() < 0.3:
        return rng.choice(CLASSES) if rng.random() < 0.5 else word(rng)
    parts = [regex(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    joined = rng.choice(["", "", "|"]).join(parts)
    return f"({joined}){rng.choice(COUNTS)}" if rng.random() < 0.6 else joined


def word(rng):
    chars = LETTERS if rng.random() < 0.1 else string.ascii_lowercase
    return "".join(rng.choice(chars) for _ in range(rng.randint(1, 5)))


def schema(rng, depth=0):
    if rng.random() < 0.05:
        return rng.choice([True, False, None, 5, "text", [], {"enum": []}, {"$ref": "#"}, {"not": {}}])
    make = rng.choice([_text, _number, _items, _object, _object, _choice, _combined, _odd])
    if depth > 4:
        make = rng.choice([_text, _number])
    return make(rng, depth)


def _text(rng, depth):
    out = {"type": "string"}
    for key, make in [
        ("pattern", lambda: regex(rng)),
        ("format", lambda: rng.choice(FORMATS)),
        ("minLength", lambda: rng.choice(SIZES)),
        ("maxLength", lambda: rng.choice(SIZES)),
        ("enum", lambda: [word(rng) for _ in range(rng.randint(0, 5))]),
    ]:
        if rng.random() < 0.25:
            out[key] = make()
    return out


def _number(rng, depth):
    out = {"type": rng.choice(["integer", "number"])}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if rng.random() < 0.25:
            out[key] = rng.choice(SIZES)
    return out


def _items(rng, depth):
    out = {"type": "array", "items": schema(rng, depth + 1)}
    for key in ("minItems", "maxItems"):
        if rng.random() < 0.4:
            out[key] = rng.choice(SIZES)
    if rng.random() < 0.3:
        out["prefixItems"] = [schema(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return out


def _object(rng, depth):
    names = [word(rng) for _ in range(rng.randint(0, 5))]
    out = {"type": "object", "properties": {name: schema(rng, depth + 1) for name in names}}
    if rng.random() < 0.7:
        out["required"] = [name for name in names if rng.random() < 0.7] + ["other"] * (rng.random() < 0.1)
    if rng.random() < 0.4:
        out["additionalProperties"] = rng.choice([False, True, schema(rng, depth + 1)])
    if rng.random() < 0.2:
        out["patternProperties"] = {regex(rng): schema(rng, depth + 1)}
    if rng.random() < 0.2:
        out |= {"$defs": {"a": schema(rng, depth + 1)}, "$ref": rng.choice(["#/$defs/a", "#", "#/$defs/b"])}
    return out


def _choice(rng, depth):
    return {rng.choice(["anyOf", "oneOf"]): [schema(rng, depth + 1) for _ in range(rng.randint(0, 4))]}


def _combined(rng, depth):
    return {"allOf": [schema(rng, depth + 1) for _ in range(rng.randint(1, 4))]}


def _odd(rng, depth):
    key = rng.choice([*_KEYS, word(rng)])
    return {
        "type": rng.choice([*TYPES, TYPES[:3]]),
        key: rng.choice([None, True, -5, [], {}, "x", schema(rng, depth + 1)]),
    }


_KEYS = [
    "properties",
    "required",
    "items",
    "pattern",
    "enum",
    "const",
    "minItems",
    "$defs",
    "$ref",
    "uniqueItems",
    "if",
]


def lark(rng):
    n = rng.choice([1, 2, 3, 5, 8, 20])
    names = ["start", *(f"r{i}" for i in range(1, n))]
    lines = [f"{name}: {_lark_body(rng, names, 0)}" for name in names]
    lines += [f"T{i}: {_terminal(rng)}" for i in range(3)]
    if rng.random() < 0.2:
        lines.append(
            rng.choice(["%ignore /[ ]+/", "%ignore T1", "%llguidance {}", '%json {"type": "object"}', "%x", ":"])
        )
    return "\n".join(lines)


def _lark_body(rng, names, depth):
    if depth > 3 or rng.random() < 0.4:
        return rng.choice(
            [rng.choice(names), json.dumps(word(rng)), f"T{rng.randint(0, 3)}", "", f"<[{rng.randint(0, 300)}]>"]
        )
    parts = [_lark_body(rng, names, depth + 1) for _ in range(rng.randint(1, 3))]
    joined = rng.choice([" ", " ", " | "]).join(parts)
    return f"({joined}){rng.choice(['', '*', '+', '?', '{2,3}', '{0,1000}', '~2..5'])}"


def _terminal(rng):
    shapes = [
        f"/{regex(rng).replace('/', '')}/",
        json.dumps(word(rng)),
        "/a/ & /[a-c]+/",
        "~/x/",
        '%regex {"substring_chars": "abcabc"}',
    ]
    return rng.choice(shapes)


def gbnf(rng):
    n = rng.choice([1, 2, 3, 5, 8, 20])
    names = ["root", *(f"r{i}" for i in range(1, n))]
    return "\n".join(f"{name} ::= {_gbnf_body(rng, names, 0)}" for name in names)


def _gbnf_body(rng, names, depth):
    if depth > 3 or rng.random() < 0.4:
        return rng.choice(
            [rng.choice(names), json.dumps(word(rng)), "[a-z]", '[^"\\\\]', "[0-9]+", '""', ".", "(", "none"]
        )
    parts = [_gbnf_body(rng, names, depth + 1) for _ in range(rng.randint(1, 3))]
    joined = rng.choice([" ", " ", " | "]).join(parts)
    return f"({joined}){rng.choice(['', '*', '+', '?', '{2}', '{2,}', '{0,1000}'])}"


def hostile(rng):
    """What takes a compiler's time, memory or stack."""
    n = rng.choice([100, 400, 1000, 3000])
    return rng.choice(
        [
            ("guided_regex", "(" * n + "a" + ")?" * n),
            ("guided_regex", f"((a{{1000}}){{1000}}){{{n}}}"),
            ("guided_regex", "a?" * n + "a" * n),
            ("guided_regex", f"(a|b)*a(a|b){{{n}}}"),
            ("guided_regex", "|".join(f"{word(rng)}.*{word(rng)}" for _ in range(n // 4))),
            ("guided_json", {"type": "integer", "multipleOf": rng.choice([9999991, 99999989, 123457])}),
            ("guided_json", {"type": "string", "pattern": f"(.*a.{{{n}}}){{20}}"}),
            ("guided_json", {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 83, 79, 73, 71, 67)]}),
            (
                "guided_json",
                {"properties": {f"p{i}": {"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(n // 2)}},
            ),
            ("guided_json", json.dumps(json.loads('{"items":' * 60 + "{}" + "}" * 60))),
            (
                "guided_json",
                {"type": "array", "minItems": n, "maxItems": 10**6, "items": {"type": "array", "minItems": n}},
            ),
            ("guided_grammar", _chain(n, '"a" ')),
            ("guided_grammar", _chain(n, "")),
            ("guided_grammar", 'start: s\ns: s s s | s s | "a" |'),
            ("guided_grammar", "start: " + "(" * n + '"a"' + ")*" * n),
            ("guided_grammar", "root ::= " + "(" * n + '"a"' + ")?" * n),
            ("guided_grammar", 'root ::= "a"{1000000}'),
            ("guided_grammar", "start: " + " | ".join(f'"{word(rng)}" start?' for _ in range(n))),
        ]
    )


def _chain(n, before):
    return "start: r0\n" + "\n".join(f"r{i}: {before}r{i + 1}" for i in range(n)) + f'\nr{n}: "a"'


def request(rng, share_of_hostile):
    """The fields of a chat request that constrain its answer."""
    if rng.random() < share_of_hostile:
        field, value = hostile(rng)
        return {field: value}
    kind = rng.randrange(4)
    if kind == 0:
        return _with_schema(rng, schema(rng))
    if kind == 1:
        return {rng.choice(["guided_regex", "regex"]): regex(rng)}
    return {rng.choice(["guided_grammar", "grammar"]): lark(rng) if kind == 2 else gbnf(rng)}


def _with_schema(rng, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": value, "strict": rng.random() < 0.5}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": value, "strict": rng.random() < 0.5}}
    return rng.choice(
        [{"guided_json": value}, {"response_format": wanted}, {"tools": [tool], "tool_choice": "required"}]
    )


def requests(seed, n, share_of_hostile=0.02):
    """``n`` of them; the same for the same seed."""
    rng = random.Random(seed)
    return [request(rng, share_of_hostile) for _ in range(n)]
