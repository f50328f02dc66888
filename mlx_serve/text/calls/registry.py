"""The registry of tool-call formats. To add a format, add a Family: how to recognize its models, and its CallFormat.

A model's family is found by signs in its chat template, by mlx-lm's name for its parser, or by signs in its vocabulary,
in this order. If mlx-lm has a parser for a format that is not listed here, that parser reads each call once it is
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from mlx_serve.text.calls.descriptions import (
    PYTHON,
    CallFormat,
    Offer,
    bare_calls,
    functions,
    headed,
    invokes,
    json_calls,
    keys_and_values,
    llama_calls,
    named_json,
    parsed_calls,
    tagged,
)
from mlx_serve.text.calls.readers import Frame, Reader
from mlx_serve.text.calls.xml_reader import Markup
from mlx_serve.text.tokenizer import Tokenizer

_M3 = "]<]minimax[>["
_M3_MARKUP = Markup(
    f' {_M3}<invoke name="{{name}}">',
    f" {_M3}<{{key}}>",
    f"{_M3}<{{key}}>",
    f"{_M3}</{{key}}>",
    f" {_M3}</invoke>",
    nested=_M3,
)
_MINICPM_MARKUP = Markup(
    " <function name={quote}{name}{quote}>",
    " <param name={quote}{key}{quote}>",
    "<param name=",
    "</param>",
    " </function>",
    has_cdata=True,
)
_SOLAR_MARKUP = Markup(
    " {name} {tag}",
    " <|tool_arg:start|>{key}<|tool_arg:value|>",
    "<|tool_arg:value|>",
    "<|tool_arg:end|>",
)
_XTML_MARKUP = Markup(
    ' <|open|>call tool="{name}"{attributes}<|sep|>',
    ' <|open|>argument key="{key}"{attributes}<|sep|>',
    "<|open|>argument key=",
    "<|close|>argument<|sep|>",
    " <|close|>call<|sep|>",
)
_XTML_JSON = ' <|open|>call tool="{name}"{other}<|sep|> <|open|>json{other}<|sep|> {json}'
_XTML_END = " <|close|>json<|sep|> <|close|>call<|sep|>"
_DEEPSEEK = " <｜tool▁call▁begin｜> «function<｜tool▁sep｜> »{name} «<｜tool▁sep｜> »«```json »{json}"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>FUNCTION<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
_KIMI = " <|tool_call_begin|> «functions.»{name}«:{word}» <|tool_call_argument_begin|> {json}"
_SOLAR = " <|tool_call:begin|> {word} <|tool_call:name|> {name} <|tool_call:args|> {json}"
_MISTRAL = " «[TOOL_CALLS]»{name} «[CALL_ID]{word} »«[ARGS] »{json}"
_DSML_END = "</｜DSML｜function_calls>"

# The format for models without one of their own: the prompt teaches it to them.
HERMES = CallFormat("<tool_call>", "</tool_call>", json_calls, between=("<tool_call>",), bare=bare_calls)
# The format of models whose template or vocabulary shows the tag and no sign of a family.
_TAGGED_JSON = CallFormat("<tool_call>", "</tool_call>", json_calls, between=("<tool_call>",))
_HY3 = ("<tool_call:opensource>", "</tool_call:opensource>")
_LISTS = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models with one format.

    ``signs``: texts that are all in its template, or all in the vocabulary of a model without a template.
    ``parser``: mlx-lm's name for the family's parser.
    """

    form: CallFormat
    signs: tuple[str, ...] = ()
    parser: str = ""


# The first family that matches is used.
FAMILIES: tuple[Family, ...] = (
    Family(invokes("｜DSML｜", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"), ("｜DSML｜", "tool_calls>")),
    Family(invokes("｜DSML｜", "<｜DSML｜function_calls>", _DSML_END), ("｜DSML｜",)),
    # Hy-MT2's template also has DeepSeek's markers, around results.
    Family(keys_and_values("<tool_calls>", "</tool_calls>", *_LISTS), ("<tool_calls>", "<arg_key>")),
    Family(
        CallFormat(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            headed(_DEEPSEEK, " «``` »«<｜tool▁call▁end｜>»"),
            taught=f"<｜tool▁calls▁begin｜>{_DEEPSEEK_CALL}<｜tool▁calls▁end｜>",
        ),
        ("<｜tool▁calls▁begin｜>",),
    ),
    Family(CallFormat(f"{_M3}<tool_call>", f"{_M3}</tool_call>", tagged(_M3_MARKUP)), (_M3,)),
    Family(invokes("", "<minimax:tool_call>", "</minimax:tool_call>"), ("<minimax:tool_call>",), "minimax_m2"),
    Family(invokes("atem:", "<atem:function_calls>", "</atem:function_calls>"), ("<atem:",), "muse_spark"),
    Family(
        invokes(
            "steptml:",
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            between=("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        ),
        ("<steptml:invoke",),
    ),
    Family(functions("<seed:tool_call>", "</seed:tool_call>", ""), ("<seed:tool_call>",)),
    Family(functions("<zyphra_tool_call>", "</zyphra_tool_call>", "\n"), ("<zyphra_tool_call>",)),
    Family(functions("<tool_call>", "</tool_call>", ""), ("<tool_call>", "<parameter=example_parameter_1>value")),
    Family(functions("<tool_call>", "</tool_call>", "\n"), ("<function=", "<parameter="), "qwen3_coder"),
    Family(
        CallFormat(
            "<function name=",
            "",
            tagged(_MINICPM_MARKUP),
            own_openings=("<function name=",),
            bare=bare_calls,
            taught='{"name": "FUNCTION", "arguments": {ARGUMENTS}}',
        ),
        ("<function name=", "<param name="),
        "minicpm5",
    ),
    Family(
        keys_and_values("<longcat_tool_call>", "</longcat_tool_call>", prefix="longcat_"),
        ("<longcat_tool_call>",),
        "longcat",
    ),
    Family(
        CallFormat("<|tool_call:start|>", "<|tool_call:end|>", tagged(_SOLAR_MARKUP), is_offered_only=True),
        ("<|tool_arg:start|>",),
    ),
    Family(CallFormat("<|tool_calls|>", "<|calls|>", headed(_SOLAR, " <|tool_call:end|>")), ("<|tool_call:args|>",)),
    Family(
        keys_and_values("<tool_calls:opensource>", "</tool_calls:opensource>", *_HY3, suffix=":opensource"),
        ("<tool_sep", ":opensource"),
    ),
    Family(
        keys_and_values("<tool_call>", "</tool_call>"),
        ("<arg_key>",),
        "glm47",
    ),
    Family(
        CallFormat(
            "<tool_calls>",
            "</tool_calls>",
            headed(" <tool_call> {name} ```json {json}", " ``` </tool_call>"),
            own_openings=("<tool_call>",),
        ),
        ("<tool_calls>", "```json"),
    ),
    Family(CallFormat("<tool_calls>", "</tool_calls>", json_calls, between=_LISTS), ("<tool_calls>",)),
    Family(CallFormat("<|tools_prefix|>", "<|tools_suffix|>", named_json), ("<|tools_prefix|>",)),
    Family(CallFormat("<function_calls>", "</function_calls>", headed(PYTHON)), ("<function_calls>",)),
    Family(
        CallFormat(
            "<|tool_call>", "<tool_call|>", headed(" call:{name}{open}", "", '<|"|>'), between=("<|tool_call>",)
        ),
        ("<|tool_call>", "<tool_call|>"),
        "gemma4",
    ),
    Family(
        CallFormat("<start_function_call>", "<end_function_call>", headed(" call:{name}{open}", "", "<escape>")),
        ("<start_function_call>",),
        "function_gemma",
    ),
    Family(
        CallFormat("<|tool_call_start|>", "<|tool_call_end|>", headed(PYTHON), between=("```", "python")),
        ("<|tool_call_start|>",),
        "pythonic",
    ),
    Family(
        CallFormat(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            headed(_KIMI, " <|tool_call_end|>"),
        ),
        ("<|tool_calls_section_begin|>",),
        "kimi_k2",
    ),
    Family(
        CallFormat("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", tagged(_XTML_MARKUP, _XTML_JSON, _XTML_END)),
        ("<|open|>",),
        "kimi_k3",
    ),
    Family(
        CallFormat("[TOOL_CALLS]", "", headed(_MISTRAL), between=("[TOOL_CALLS]",)),
        ("[TOOL_CALLS]",),
        "mistral",
    ),
    Family(
        CallFormat("<|action_start|>", "<|action_end|>", json_calls, between=("<|plugin|>",)), ("<|action_start|>",)
    ),
    Family(CallFormat("<|CALL_START|>", "<|CALL_END|>", headed(" function {name} {json}")), ("<|CALL_START|>",)),
    Family(CallFormat("<|START_ACTION|>", "<|END_ACTION|>", json_calls), ("<|START_ACTION|>",)),
    Family(
        CallFormat("Action:", "", json_calls, between=("```", "json"), is_offered_only=True), ("Action:", "```json")
    ),
    Family(
        CallFormat("<|python_start|>", "", llama_calls, ("<function=",), ("<|python_end|>",), bare_calls),
        ("<|python_start|>",),
    ),
    Family(
        CallFormat("<|python_tag|>", "", llama_calls, ("<function=",), ("<|python_tag|>",), bare_calls),
        ("<|python_tag|>",),
    ),
    Family(
        CallFormat(
            *("<function=", "", llama_calls, ("<function=",)),
            bare=bare_calls,
            taught="<function=FUNCTION>{ARGUMENTS}</function>",
        ),
        ("<function=",),
    ),
    # Of the models that write this format, some close each call, some close the list, and some close neither.
    Family(
        CallFormat(
            "<|tool_call|>",
            "",
            json_calls,
            own_openings=("functools[",),
            between=("<|tool_call|>", "<|/tool_call|>", "<|tool_call_end|>", "functools"),
        ),
        ("<|tool_call|>",),
    ),
    Family(CallFormat("functools[", "", json_calls, ("functools[",), ("functools",)), ("functools[",)),
    Family(CallFormat("-> tool/function_call", "", json_calls), ("-> tool/function_call",)),
    # DeepHat's instructions have calls between tags; its history has them without tags.
    Family(HERMES, ("<tool_call>[",)),
    Family(CallFormat("<TOOLCALL>", "</TOOLCALL>", json_calls), ("<TOOLCALL>",)),
    Family(CallFormat("<|function_call|>", "", json_calls, between=("<|function_call|>",)), ("<|function_call|>",)),
    Family(CallFormat("function call<|role_sep|>", "", json_calls), ("'function call'", "<|role_sep|>")),
    Family(CallFormat("<function_call>", "", json_calls, between=("<function_call>",)), ("<function_call>",)),
)
_BY_PARSER = {family.parser: family.form for family in FAMILIES if family.parser} | {"json_tools": _TAGGED_JSON}
_BY_PARSER["laguna"] = _BY_PARSER["glm47"]


def call_format(tokenizer: Tokenizer) -> CallFormat:
    """The format in which the tokenizer's model writes calls."""
    template = tokenizer.template or ""
    found = _family(template)
    if found is None and tokenizer.tool_call is not None:
        opening, closing = tokenizer.tool_call
        known = _BY_PARSER.get(tokenizer.tool_format or "")
        return known or CallFormat(opening, closing, parsed_calls, between=(opening,))
    controls = set(tokenizer.controls.values())
    if found is None and tokenizer.template is None:
        found = _family(controls)
    if found is None and "<tool_call>" in (template or controls):
        return _TAGGED_JSON
    return HERMES if found is None else found


def _family(signs: Collection[str]) -> CallFormat | None:
    """The family whose signs are all in ``signs``: a text, or the tokens of a vocabulary."""
    return next((family.form for family in FAMILIES if family.signs and all(s in signs for s in family.signs)), None)


def new_reader(form: CallFormat, offer: Offer) -> Callable[[str], Reader]:
    """Makes the reader of the text after an opening. Without the opening marker, only offered names make a call."""
    names = offer.names()

    def new(opening: str) -> Reader:
        is_own = opening in form.own_openings
        only = names if form.is_offered_only or is_own else None
        reader = form.reader(Frame(form.closing, form.between, names=only), offer)
        if is_own:
            reader.feed(opening, [])
        return reader

    return new


def new_bare_reader(form: CallFormat, offer: Offer) -> Callable[[], Reader] | None:
    """Makes the reader of an answer that may be a call without any marker. None if the format has no such calls."""
    return None if form.bare is None else partial(form.bare, Frame(form.closing, form.between), offer)
