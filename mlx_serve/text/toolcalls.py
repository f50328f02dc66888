"""The registry of tool-call formats. To add one, write its reader (or use one of ``callbody``) and add a row.

mlx-lm names the format of the models that it has a parser for; ``READERS`` says which of them are read as they come,
the others are parsed by mlx-lm once they are whole. ``OWN_FORMATS`` are those that it has no parser for, found by the
chat template and the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from mlx_serve.text.callbody import CallBody, EitherCalls, HeaderCalls, WholeCalls
from mlx_serve.text.calljson import JsonCalls
from mlx_serve.text.pieces import Piece, Region, Splitter, joined
from mlx_serve.text.tokenizer import Tokenizer

Parser: TypeAlias = Callable[[str], list[dict[str, Any]]]
Reader: TypeAlias = Callable[[Parser], CallBody]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls. ``closing`` may be "": then a call ends with the answer, or where one opens.

    ``may_be_bare``: the answer may be a call without any marker. ``example`` tells a model how to write one, for
    templates that do not say it.
    """

    opening: str
    closing: str
    reader: Reader
    may_be_bare: bool = False
    example: str = '<tool_call>\n{"name": "FUNCTION", "arguments": {ARGUMENTS}}\n</tool_call>'
    # GLM's parser makes a call of any text: only names that were offered are calls.
    offered_only: bool = False
    # The id that the template wants of the n-th call of a conversation: (id, name, n) -> id.
    call_id: Callable[[str, str, int], str] = lambda call_id, name, n: call_id


def json_calls(_: Parser) -> CallBody:
    """{"name": ..., "arguments": {...}}, and lists of them."""
    return JsonCalls()


_MISTRAL_NAME = r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*"
_KIMI_NAME = r"\s*(?:functions\.)?(?P<name>[\w./-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
_KIMI_END = r"\s*(?:<\|tool_call_end\|>)?\s*"
_DEEPSEEK_BEGIN = r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?"
_DEEPSEEK_NAME = r"(?P<name>[\w.:/-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"
_DEEPSEEK_END = r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*"


def mistral_calls(_: Parser) -> CallBody:
    """A list of JSON calls, or name[ARGS]{...}, with [CALL_ID] between in some versions."""
    return EitherCalls(JsonCalls(), HeaderCalls("", _MISTRAL_NAME, r"\s*"))


def kimi_calls(_: Parser) -> CallBody:
    """functions.NAME:0, then the arguments, each between tokens of its own."""
    return HeaderCalls(r"<\|tool_call_begin\|>", _KIMI_NAME, _KIMI_END)


def deepseek_calls(_: Parser) -> CallBody:
    """V3's and R1's: function, the name, a JSON block. V3.1's: the name, JSON."""
    return HeaderCalls(_DEEPSEEK_BEGIN, _DEEPSEEK_NAME, _DEEPSEEK_END)


def parsed_calls(parse: Parser) -> CallBody:
    """Whatever mlx-lm parses."""
    return WholeCalls(parse)


_INVOKE = re.compile(r'<｜DSML｜invoke\s+name="(?P<name>[^"]+)"\s*>(?P<body>.*?)</｜DSML｜invoke>', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter\s+name="(?P<key>[^"]+)"(?:\s+string="(?P<string>true|false)")?\s*>'
    r"(?P<value>.*?)</｜DSML｜parameter>",
    re.DOTALL,
)


def parse_dsml(text: str) -> list[dict[str, Any]]:
    """DeepSeek V3.2's: parameters between tags, as text or as JSON. Raises ValueError."""
    calls = []
    for invoke in _INVOKE.finditer(text):
        found = _PARAMETER.finditer(invoke["body"])
        arguments = {p["key"]: json.loads(p["value"]) if p["string"] == "false" else p["value"] for p in found}
        calls.append({"name": invoke["name"], "arguments": arguments})
    if not calls:
        raise ValueError("no call")
    return calls


def dsml_calls(_: Parser) -> CallBody:
    """DeepSeek V3.2's."""
    return WholeCalls(parse_dsml)


def mistral_id(call_id: str, name: str, n: int) -> str:
    """Mistral's templates refuse ids of more or less than nine letters and digits."""
    return call_id if re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def kimi_id(call_id: str, name: str, n: int) -> str:
    """Kimi's templates show the id as the model itself wrote it."""
    return f"functions.{name}:{n}"


# mlx-lm's name of a format -> its reader, when it can be read as it comes.
READERS: dict[str, Reader] = {"json_tools": json_calls, "mistral": mistral_calls, "kimi_k2": kimi_calls}
_CALL_IDS = {"mistral": mistral_id, "kimi_k2": kimi_id}
_GUESSED = frozenset({"glm47", "laguna"})

# What models without a format of their own are told to write.
HERMES = CallFormat("<tool_call>", "</tool_call>", json_calls, may_be_bare=True)
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>FUNCTION<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
_DEEPSEEK_EXAMPLE = f"<｜tool▁calls▁begin｜>{_DEEPSEEK_CALL}<｜tool▁calls▁end｜>"
# (what the template or the vocabulary has, format); the first that fits.
OWN_FORMATS: tuple[tuple[str, CallFormat], ...] = (
    ("｜DSML｜", CallFormat("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", dsml_calls)),
    (
        "<｜tool▁calls▁begin｜>",
        CallFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", deepseek_calls, example=_DEEPSEEK_EXAMPLE),
    ),
    ("<|python_tag|>", CallFormat("<|python_tag|>", "", json_calls, may_be_bare=True)),
    # Phi 4 mini closes its list, Granite does not.
    ("<|/tool_call|>", CallFormat("<|tool_call|>", "<|/tool_call|>", json_calls)),
    ("<|tool_call|>", CallFormat("<|tool_call|>", "", json_calls)),
    ("<TOOLCALL>", CallFormat("<TOOLCALL>", "</TOOLCALL>", json_calls)),
    ("<|START_ACTION|>", CallFormat("<|START_ACTION|>", "<|END_ACTION|>", json_calls)),
    ("<tool_call>", CallFormat("<tool_call>", "</tool_call>", json_calls)),
)


def call_format(tokenizer: Tokenizer) -> CallFormat:
    """The format that a model writes its calls in."""
    if tokenizer.tool_call is not None:
        opening, closing = tokenizer.tool_call
        name = tokenizer.tool_format or ""
        form = CallFormat(opening, closing, READERS.get(name, parsed_calls), offered_only=name in _GUESSED)
        return replace(form, call_id=_CALL_IDS.get(name, form.call_id))
    known = {*tokenizer.controls.values()}
    for sign, own in OWN_FORMATS:
        if sign in (tokenizer.template or "") or (sign in known and tokenizer.template is None):
            return own
    return HERMES


def new_reader(form: CallFormat, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> Callable[[], CallBody]:
    """Makes the reader of each call's text."""
    names = {tool["function"]["name"] for tool in tools}

    def parse(text: str) -> list[dict[str, Any]]:
        calls = tokenizer.parse_tool_call(text, tools)
        if form.offered_only and not all(call.get("name") in names for call in calls):
            raise ValueError("no such tool")
        return calls

    return lambda: form.reader(parse)


def new_bare_reader(tools: Sequence[dict[str, Any]]) -> Callable[[], CallBody]:
    """Makes the reader of an answer that may be a call: JSON of a tool that was offered, and no other."""
    names = {tool["function"]["name"] for tool in tools}
    return lambda: JsonCalls(names.__contains__, strict=True)


class ForcedCall:
    """A splitter whose content is one call as JSON: a grammar saw to that. Reasoning comes through as it is."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._body = JsonCalls(eager=True)

    @property
    def region(self) -> Region:
        """Where the next text belongs, as far as that is known."""
        region = self._splitter.region
        return "call" if region == "content" else region

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        return self._read(self._splitter.feed(text))

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """The rest. Of a call that was cut off before its name there is nothing to show."""
        out = self._read(self._splitter.flush(cut=cut))
        left = self._body.close(out, cut=cut)
        if left.strip() and not self._body.n_calls:
            out.append(Piece("content", left))
        return out

    def _read(self, pieces: Sequence[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            rest = piece.text if piece.kind == "content" else ""
            if not rest:
                out.append(piece)
            while rest:
                rest = rest[self._body.feed(rest, out) :]
        return joined(out)
