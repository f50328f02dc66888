"""What each family of models writes: calls in the form that its template teaches, and conversations made of them.

A Written family has a tokenizer with its control tokens and its template's signs, a writer of calls, and its reasoning
markers. ``transcripts`` makes the same answers in each family's form.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.pure.formatkit import DEEPSEEK, Answer, model, parts_of

Calls = list[tuple[str, dict[str, Any]]]

PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}}
PROPERTIES = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array", "items": {"type": "string"}},
    "maybe_n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "maybe_flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "maybe_text": {"type": ["string", "null"]},
    "unit": {"enum": ["1", "two", "null"]},
    "level": {"enum": [1, 2]},
    "place": {"$ref": "#/$defs/Place"},
    "maybe_place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
    "data": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": PROPERTIES, "$defs": {"Place": PLACE}},
        },
    }
    for name in ("write_file", "read")
]


@dataclass
class Written:
    """A family. ``is_typed``: values have their types written; else the schema says them."""

    write: Callable[[Calls], str]
    opening: str
    controls: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    think: tuple[str, str] | None = None
    signs: str = ""
    is_typed: bool = True
    # Calls are known without their opening marker, which some models forget.
    may_lack_opening: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self):
        signs = self.signs or self.opening
        think = " ".join(self.think or ())
        facts = {"template": f"{{{{ tools }}}} tool_calls {signs} {think}"} | self.facts
        return model(*self.controls, special=self.special, **facts)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    """As templates write values between tags."""
    return value if isinstance(value, str) else dumps(value)


def each(pattern: Callable[[str, dict[str, Any]], str], joint: str = "\n") -> Callable[[Calls], str]:
    return lambda calls: joint.join(pattern(name, arguments) for name, arguments in calls)


def json_call(name: str, arguments: dict[str, Any]) -> str:
    return dumps({"name": name, "arguments": arguments})


def functions(opening: str, closing: str, pad: str) -> Callable[[Calls], str]:
    def write(name, arguments):
        inner = "".join(f"<parameter={key}>{pad}{raw(value)}{pad}</parameter>\n" for key, value in arguments.items())
        return f"{opening}\n<function={name}>\n{inner}</function>\n{closing}"

    return each(write)


def invokes(prefix: str, opening: str, closing: str, *, typed: bool = False) -> Callable[[Calls], str]:
    def parameter(key, value):
        kind = f' string="{"true" if isinstance(value, str) else "false"}"' if typed else ""
        return f'<{prefix}parameter name="{key}"{kind}>{raw(value)}</{prefix}parameter>\n'

    def write(name, arguments):
        inner = "".join(parameter(key, value) for key, value in arguments.items())
        return f'<{prefix}invoke name="{name}">\n{inner}</{prefix}invoke>'

    return lambda calls: f"{opening}\n{each(write)(calls)}\n{closing}"


def keyed(opening: str, closing: str, line: str = "\n", tag: str = "{}", separator: str = "") -> Callable[[Calls], str]:
    def named(name):
        return f"<{tag.format(name)}>" if not name.startswith("/") else f"</{tag.format(name[1:])}>"

    def write(name, arguments):
        inner = "".join(
            f"{named('arg_key')}{key}{named('/arg_key')}{line}{named('arg_value')}{raw(value)}{named('/arg_value')}{line}"
            for key, value in arguments.items()
        )
        return f"{opening}{name}{separator}{line}{inner}{closing}"

    return each(write)


def gemma(opening: str, closing: str, quote: str) -> Callable[[Calls], str]:
    def value_of(value):
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{value_of(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(value_of, value)) + "]"
        return dumps(value)

    return each(lambda name, arguments: f"{opening}call:{name}{value_of(arguments)}{closing}", "")


def pythonic(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


M3 = "]<]minimax[>["


def m3(calls: Calls) -> str:
    def tagged(key, value):
        if isinstance(value, dict):
            inner = "".join(tagged(*pair) for pair in value.items())
        elif isinstance(value, list):
            inner = "".join(tagged("item", item) for item in value)
        else:
            inner = raw(value)
        return f"{M3}<{key}>{inner}{M3}</{key}>"

    def write(name, arguments):
        return f'{M3}<invoke name="{name}">' + "".join(tagged(*p) for p in arguments.items()) + f"{M3}</invoke>\n"

    return f"{M3}<tool_call>\n{each(write, '')(calls)}{M3}</tool_call>"


def minicpm(name: str, arguments: dict[str, Any]) -> str:
    def value_of(value):
        text = raw(value)
        return f"<![CDATA[{text}]]>" if isinstance(value, str) and re.search(r"[<&\n]", text) else text

    inner = "".join(f'<param name="{key}">{value_of(value)}</param>' for key, value in arguments.items())
    return f'<function name="{name}">{inner}</function>'


def kimi_k3(calls: Calls) -> str:
    def kind(value):
        return {str: "string", bool: "boolean", int: "number", float: "number"}.get(type(value), "object")

    def write(i, name, arguments):
        inner = "".join(
            f'<|open|>argument key="{key}" type="{kind(value)}"<|sep|>{raw(value)}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        return f'<|open|>call tool="{name}" index="{i}"<|sep|>{inner}<|close|>call<|sep|>'

    inner = "".join(write(i, name, arguments) for i, (name, arguments) in enumerate(calls, 1))
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def kimi_k2(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def solar2(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(
        f"<|tool_arg:start|>{key}<|tool_arg:value|>{raw(value)}<|tool_arg:end|>\n" for key, value in arguments.items()
    )
    return f"<|tool_call:start|>{name}\n{inner}<|tool_call:end|>"


def wrapped(opening: str, write: Callable[[Calls], str], closing: str) -> Callable[[Calls], str]:
    return lambda calls: f"{opening}{write(calls)}{closing}"


def listed(opening: str, closing: str, write=json_call) -> Callable[[Calls], str]:
    return wrapped(f"{opening}[", each(write, ", "), f"]{closing}")


THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
ARGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
XTML_THINK = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
XTML_MARKERS = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
QWEN = f"{CALL[0]}<function=<parameter=example_parameter_1>\\nvalue"
MIMO = f"{CALL[0]}<function=<parameter=example_parameter_1>value"
HUNYUAN = each(lambda name, arguments: f"<tool_call>{name}\n```json\n{dumps(arguments)}\n```</tool_call>")


def deepseek_v3(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"


def deepseek_v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"


def solar(name, arguments):
    return f"<|tool_call:begin|>a1B2<|tool_call:name|>{name}<|tool_call:args|>{dumps(arguments)}<|tool_call:end|>"


def in_tags(name, arguments):
    return f"<tool_call>\n{json_call(name, arguments)}\n</tool_call>"


FAMILIES: dict[str, Written] = {
    # Tags around values, whose types the schema says.
    "qwen3-coder": Written(
        functions(*CALL, "\n"),
        CALL[0],
        CALL,
        think=None,
        signs=QWEN,
        is_typed=False,
        may_lack_opening=True,
    ),
    "qwen3.5, nemotron 3, step 3.5": Written(
        functions(*CALL, "\n"),
        CALL[0],
        (*CALL, *THINK),
        think=THINK,
        signs=QWEN,
        is_typed=False,
        may_lack_opening=True,
    ),
    "mimo v2": Written(
        functions(*CALL, ""),
        CALL[0],
        (*CALL, *THINK),
        think=THINK,
        signs=MIMO,
        is_typed=False,
        may_lack_opening=True,
    ),
    "seed-oss": Written(
        functions("<seed:tool_call>", "</seed:tool_call>", ""),
        "<seed:tool_call>",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        think=("<seed:think>", "</seed:think>"),
        is_typed=False,
        may_lack_opening=True,
    ),
    "glm 4.5, 4.6, ring, laguna xs": Written(
        keyed(*CALL),
        CALL[0],
        (*CALL, *THINK, *ARGS),
        think=THINK,
        signs=f"{CALL[0]}<arg_key>",
        is_typed=False,
        may_lack_opening=True,
    ),
    "glm 4.7, 5": Written(
        keyed(*CALL, line=""),
        CALL[0],
        (*CALL, *THINK, *ARGS),
        think=THINK,
        signs=f"{CALL[0]}<arg_key>",
        is_typed=False,
        may_lack_opening=True,
    ),
    "longcat 2": Written(
        keyed("<longcat_tool_call>", "</longcat_tool_call>", tag="longcat_{}"),
        "<longcat_tool_call>",
        ("<longcat_think>", "</longcat_think>", "<longcat_tool_call>", "</longcat_tool_call>"),
        think=("<longcat_think>", "</longcat_think>"),
        is_typed=False,
        may_lack_opening=True,
    ),
    "hunyuan 3": Written(
        wrapped(
            "<tool_calls>\n",
            each(lambda n, a: keyed("<tool_call>", "</tool_call>", separator="<tool_sep>")([(n, a)])),
            "\n</tool_calls>",
        ),
        "<tool_calls>",
        think=THINK,
        signs="<tool_calls><tool_call><tool_sep><arg_key>",
        is_typed=False,
    ),
    "minimax m2": Written(
        invokes("", "<minimax:tool_call>", "</minimax:tool_call>"),
        "<minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>", *THINK),
        think=THINK,
        is_typed=False,
        may_lack_opening=True,
    ),
    "minimax m3": Written(m3, f"{M3}<tool_call>", (M3,), think=("<mm:think>", "</mm:think>"), signs=M3, is_typed=False),
    "minicpm 5": Written(
        each(minicpm), "<function name=", THINK, think=THINK, signs="<function name=<param name=", is_typed=False
    ),
    "step 3": Written(
        invokes(
            "steptml:", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_calls_end｜>"
        ),
        "<｜tool_calls_begin｜>",
        special=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        signs="<steptml:invoke",
        is_typed=False,
    ),
    "solar open 2": Written(
        each(solar2),
        "<|tool_call:start|>",
        special=("<|tool_call:start|>", "<|tool_call:end|>", "<|think:start|>", "<|think:end|>"),
        think=("<|think:start|>", "<|think:end|>"),
        signs="<|tool_arg:start|>",
        is_typed=False,
    ),
    # Tags that say types.
    "deepseek v3.2": Written(
        invokes("｜DSML｜", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", typed=True),
        "<｜DSML｜function_calls>",
        ("｜DSML｜", *THINK),
        think=THINK,
        may_lack_opening=True,
        signs="｜DSML｜function_calls>",
    ),
    "deepseek v4": Written(
        invokes("｜DSML｜", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", typed=True),
        "<｜DSML｜tool_calls>",
        ("｜DSML｜", *THINK),
        think=THINK,
        may_lack_opening=True,
        signs="｜DSML｜ tool_calls>",
    ),
    "kimi k3": Written(
        kimi_k3,
        "<|open|>tools<|sep|>",
        special=XTML,
        think=XTML_THINK,
        facts={
            "template": None,
            "tool_call": ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            "tool_format": "kimi_k3",
            "think": XTML_THINK,
            "structural_markers": XTML_MARKERS,
        },
    ),
    # JSON.
    "qwen 2.5, hermes, smollm 3, exaone 4": Written(each(in_tags), CALL[0]),
    "qwen 3": Written(each(in_tags), CALL[0], (*CALL, *THINK), think=THINK),
    "llama-nemotron, olmo-like thinkers": Written(listed("<TOOLCALL>", "</TOOLCALL>"), "<TOOLCALL>", think=THINK),
    "mistral": Written(listed("[TOOL_CALLS]", ""), "[TOOL_CALLS]", special=("[TOOL_CALLS]",)),
    "mistral of 2512": Written(
        each(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}", ""),
        "[TOOL_CALLS]",
        special=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        think=("[THINK]", "[/THINK]"),
    ),
    "kimi k2": Written(kimi_k2, KIMI_SECTION[0], THINK, (*KIMI_SECTION, *KIMI), think=THINK),
    "deepseek v3, r1": Written(
        wrapped(DEEPSEEK[0], each(deepseek_v3), DEEPSEEK[1]), DEEPSEEK[0], (*THINK, *DEEPSEEK), think=THINK
    ),
    "deepseek v3.1": Written(
        wrapped(DEEPSEEK[0], each(deepseek_v31, ""), DEEPSEEK[1]), DEEPSEEK[0], (*THINK, *DEEPSEEK), think=THINK
    ),
    "hunyuan a13b": Written(
        wrapped("<tool_calls>", HUNYUAN, "</tool_calls>"),
        "<tool_calls>",
        think=THINK,
        signs="<tool_calls><tool_call>```json",
    ),
    "minimax m1": Written(wrapped("<tool_calls>\n", each(json_call), "\n</tool_calls>"), "<tool_calls>", think=THINK),
    "jamba": Written(listed("<tool_calls>", "</tool_calls>"), "<tool_calls>"),
    "hy-mt 2": Written(
        wrapped("<tool_calls>\n", keyed("<tool_call>", "</tool_call>", separator="<tool_sep>"), "\n</tool_calls>"),
        "<tool_calls>",
        signs="<tool_calls> <tool_call> <tool_sep> <arg_key> <｜tool▁calls▁begin｜>",
        is_typed=False,
    ),
    "hyperclova x think 14b": Written(
        listed(" -> tool/function_call\n", ""), "-> tool/function_call", signs="assistant -> tool/function_call"
    ),
    "deephat": Written(listed("", ""), "", signs="<tool_call>[ ]</tool_call>"),
    "deephat, as told": Written(listed("<tool_call>", "</tool_call>"), "<tool_call>", signs="<tool_call>["),
    "apriel": Written(
        listed("<tool_calls>", "</tool_calls>"),
        "<tool_calls>",
        think=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ),
    "step 3 vl": Written(wrapped("<tool_calls>\n", each(in_tags), "\n</tool_calls>"), "<tool_calls>", think=THINK),
    "intern-s1": Written(
        each(lambda n, a: f"<|action_start|><|plugin|>\n{dumps({'name': n, 'parameters': a})}\n<|action_end|>"),
        "<|action_start|>",
        ("<|action_start|>", "<|action_end|>", "<|plugin|>"),
        think=THINK,
    ),
    "command r": Written(
        wrapped("Action:\n```json\n[", each(lambda n, a: dumps({"tool_name": n, "parameters": a}), ",\n"), "]\n```"),
        "Action:",
        signs="Action: ```json",
    ),
    "command r7b, a": Written(
        listed(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            lambda n, a: dumps({"tool_call_id": "0", "tool_name": n, "parameters": a}),
        ),
        "<|START_ACTION|>",
        special=("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "apertus": Written(
        listed("<|tools_prefix|>", "<|tools_suffix|>", lambda n, a: dumps({n: a})),
        "<|tools_prefix|>",
        special=("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        think=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "granite 3": Written(listed("<|tool_call|>", ""), "<|tool_call|>", special=("<|tool_call|>",)),
    "phi 4 mini": Written(
        listed("<|tool_call|>", "<|/tool_call|>"), "<|tool_call|>", special=("<|tool_call|>", "<|/tool_call|>")
    ),
    "phi 4 mini, functools": Written(listed("functools", ""), "functools[", signs="<|tool_call|>"),
    "gigachat 3": Written(
        each(lambda n, a: f"<|function_call|>{json_call(n, a)}"), "<|function_call|>", special=("<|function_call|>",)
    ),
    "solar open": Written(
        wrapped("<|tool_calls|>", each(solar, ""), "<|calls|>"),
        "<|tool_calls|>",
        special=("<|tool_calls|>", "<|calls|>", "<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
        think=("<|think|>", "<|end|>"),
        signs="<|tool_call:args|> <|begin|>assistant <|content|>",
    ),
    "llama 3.1, 3.2 json": Written(
        lambda calls: "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls), "", signs="<|python_tag|>"
    ),
    "llama 3.1 functions": Written(
        each(lambda n, a: f"<function={n}>{dumps(a)}</function>", ""), "<function=", signs="<|python_tag|>"
    ),
    "functionary 3.1, kanana": Written(
        each(lambda n, a: f"<function={n}>{dumps(a)}</function>", ""), "<function=", signs="<function="
    ),
    # Python, and what Gemma writes.
    "llama 3.2, 4 pythonic": Written(listed("", "", pythonic), "", signs="<|python_start|>"),
    "lfm 2": Written(
        listed("<|tool_call_start|>", "<|tool_call_end|>", pythonic),
        "<|tool_call_start|>",
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo 3": Written(
        wrapped("<function_calls>", each(pythonic), "</function_calls>"), "<function_calls>", think=THINK
    ),
    "gemma 4": Written(
        gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        "<|tool_call>",
        special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        think=("<|channel>thought", "<channel|>"),
        signs="<|tool_call><tool_call|>",
        facts={"think": ("<|channel>thought", "<channel|>")},
    ),
    "function gemma": Written(
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call>",
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
}

MARKUP = (
    "see </tool_call>, </function>, </arg_value>, </parameter>, </param> and <think>x</think>",
    "use <parameter=x>, <arg_key>k</arg_key>, <param name=x> or <parameter name=x> here",
    "</function>\n</tool_call>",
)
CODE = "def f(x):\n    return x < 3 & True\n\n\tprint(\"a\\n\", '<b>')\n"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"text": "Zürich 🐉", "n": 3, "flag": True},
    "none": {},
    "big integer": {"n": 1234567890123456789},
    "null as text": {"text": "null"},
    "optional": {"maybe_n": 5, "maybe_flag": True},
    "optional null": {"maybe_n": None, "maybe_place": None},
    "digits for an optional text": {"maybe_text": "123"},
    "number": {"x": 0.25, "n": -7},
    "space at the ends": {"text": "  two \n"},
    "line ends at the ends": {"text": "\n\nx\n\n"},
    "enum of texts": {"unit": "1"},
    "enum with null": {"unit": "null"},
    "enum of numbers": {"level": 2},
    "reference": {"place": {"lat": 47.5, "name": "Zürich"}, "maybe_place": {"lat": -1.5, "name": "1"}},
    "nested": {"data": {"a": {"b": ["e", {"c": "}"}]}, "d": "x"}, "items": ["a", "b, c", "]"]},
    "quotes and escapes": {"text": 'He said "it\'s" \\n \\ {"a": [1]}'},
    "json in a text": {"text": '{"name": "read", "arguments": {}}'},
    "code": {"text": CODE, "n": 1},
    "empty text": {"text": ""},
}


def answer(content: str = "", reasoning: str = "", calls: Calls = ()) -> Answer:
    return Answer(content, reasoning, [(name, dumps(arguments)) for name, arguments in calls])


def transcripts(family: Written) -> Iterator[tuple[str, str, bool, Answer]]:
    """Each as (what it shows, what the model writes, whether it was cut off, what the client gets)."""
    one: Calls = [("write_file", ARGUMENTS["plain"])]
    two: Calls = [*one, ("read", {"text": "b"})]
    yield (
        "no call",
        "Just text, with {braces} and [brackets].",
        False,
        answer("Just text, with {braces} and [brackets]."),
    )
    for name, arguments in ARGUMENTS.items():
        yield name, family.write([("write_file", arguments)]), False, answer(calls=[("write_file", arguments)])
    yield "two calls", family.write(two), False, answer(calls=two)
    if not family.is_typed:
        # What stands between tags has no quotes that tell where it ends, and an integer that is written so is one.
        for text in (*MARKUP, family.write(two)):
            calls: Calls = [("write_file", {"text": text, "n": 5}), *one]
            yield f"markup in a text: {text}", family.write(calls), False, answer(calls=calls)
        yield "a number for an integer", family.write([("read", {"n": 3.0})]), False, answer(calls=[("read", {"n": 3})])
    if family.may_lack_opening:
        yield "no opening marker", family.write(two).replace(family.opening, "", 1), False, answer(calls=two)
    if family.opening:
        yield from _with_markers(family, one, two)
    if family.think is not None:
        yield from _with_thoughts(family, one)


def _with_markers(family: Written, one: Calls, two: Calls) -> Iterator[tuple[str, str, bool, Answer]]:
    call = family.write(one)
    yield "text before", f"I will.\n{call}", False, answer("I will.", calls=one)
    if family.opening not in ("[TOOL_CALLS]", "<|tool_call|>", "functools[", "Action:"):
        yield (
            "text around",
            f"I will.\n{call}\nDone.",
            False,
            answer("I will.", calls=one).__class__(
                "I will.Done.", "", [(name, dumps(arguments)) for name, arguments in one]
            ),
        )
    markup = {"text": f"a {family.opening}\n<b>x</b> {family.opening}"}
    if "[ARGS]" not in call:
        yield "its own opening in a text", family.write([("read", markup)]), False, answer(calls=[("read", markup)])
    mention = f"Write {family.opening} to call."
    yield "a mention", mention, False, answer(mention)
    at_name = call.index("write_file") + 5
    yield "cut in the name", call[:at_name], True, answer()
    at_text = call.index("rich") + 2
    yield "cut in a text", call[:at_text], True, Answer("", "", [("write_file", '{"text": "Züri')])
    both = family.write(two)
    at_second = both.rindex("read") + 2
    yield "cut in the second name", both[:at_second], True, answer(calls=one)


def _with_thoughts(family: Written, one: Calls) -> Iterator[tuple[str, str, bool, Answer]]:
    opening, closing = family.think or ("", "")
    call = family.write(one)
    yield "thoughts", f"{opening}hm{closing}Hi.", False, answer("Hi.", "hm")
    yield "thoughts and a call", f"{opening}hm{closing}{call}", False, answer("", "hm", one)
    if family.opening:
        said = f"I could write {family.opening} here, but no."
        yield "a mention in the thoughts", f"{opening}{said}{closing}Hi.", False, answer("Hi.", said)
        yield "a call that ends the thoughts", f"{opening}hm {call}", False, answer("", "hm ", one)
        said = f"Like so: {call} as an example."
        yield "an example in the thoughts", f"{opening}{said}{closing}Hi.", False, answer("Hi.", said)
        yield "an example, then a call", f"{opening}{said}{closing}{call}", False, answer("", said, one)


# Ways of cutting


def ways(atoms: list[str], seed: int = 0) -> dict[str, list[str]]:
    """The same text in pieces of each size."""
    whole = "".join(atoms)
    out = {f"{n} characters": ["".join(atoms[i : i + n]) for i in range(0, len(atoms), n)] for n in (1, 2, 3, 7)}
    out["tokens"] = re.findall(r"[\ud800-\udfff]|\s?\w{1,4}|\s|[^\w\s\ud800-\udfff]{1,3}", whole)
    out["words"] = re.findall(r"\S*\s*", whole)
    rng, at, pieces = random.Random(seed), 0, []
    while at < len(whole):
        n = rng.choice((1, 1, 2, 5, 13, 40))
        pieces.append(whole[at : at + n])
        at += n
    out["random"] = pieces
    out["whole"] = [whole]
    return out


def atoms_of(tokenizer, symbols, controls, written: str) -> list[str]:
    """Control tokens as characters, and the text between them."""
    ids = {text: token for token, text in controls.items()}
    return [symbols.char(ids[part]) if part in ids else part for part in parts_of(tokenizer, written)]
