"""What a tool-call format is, and how a reader is made of its description. Knows no family of models by name.

A description is a shape of what stands before the arguments (``headed``), or the tags around the values (``tagged``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mlx_serve.text.calls.json_reader import JsonCalls
from mlx_serve.text.calls.readers import AnyCalls, Frame, HeaderCalls, Reader, WholeCalls
from mlx_serve.text.calls.values import Schema
from mlx_serve.text.calls.xml_reader import Markup, XmlCalls


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request, and mlx-lm's parser for them."""

    tools: Sequence[dict[str, Any]]
    parse: Callable[[str], list[dict[str, Any]]]

    def names(self) -> frozenset[str]:
        """The tools' names."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def schema_of(self, name: str) -> Schema:
        """The schema of a tool's arguments."""
        found = (tool["function"].get("parameters") for tool in self.tools if tool["function"]["name"] == name)
        parameters = next(found, None)
        return Schema(parameters, parameters)


NewReader: TypeAlias = Callable[[Frame, Offer], Reader]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls. ``closing`` may be "": then a call ends with the answer, or where one opens.

    ``own_openings`` open calls too and are their first words; models leave the opening marker out. ``between``: markers
    that stand between and around calls. ``bare``: the reader of an answer that may be a call without any marker.
    ``is_offered_only``: the name alone makes a call of any text, so only offered names are calls. ``taught``
    is how a model is told to write a call where JSON between the markers is no way.
    """

    opening: str
    closing: str
    reader: NewReader
    own_openings: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    bare: NewReader | None = None
    is_offered_only: bool = False
    taught: str = ""

    @property
    def example(self) -> str:
        """A call as the reader takes it, with FUNCTION and {ARGUMENTS}, for models whose template teaches none."""
        return self.taught or f'{self.opening}\n{{"name": "FUNCTION", "arguments": {{ARGUMENTS}}}}\n{self.closing}'

    def openings(self) -> tuple[str, ...]:
        """All that opens a call."""
        return (self.opening, *(text for text in self.own_openings if text != self.opening))


def json_calls(frame: Frame, offer: Offer) -> Reader:
    """{"name": ..., "arguments": {...}}, and lists of them."""
    return JsonCalls(frame)


def named_json(frame: Frame, offer: Offer) -> Reader:
    """{NAME: {...}}, and lists of them."""
    return JsonCalls(Frame(frame.closing, frame.between, names=offer.names()), by_name=True)


def headed(header: str, end: str = "", *delimiters: str) -> NewReader:
    """A name in a header, and then the arguments; see HeaderCalls. JSON calls are read as well."""

    def new(frame: Frame, offer: Offer) -> Reader:
        return AnyCalls(JsonCalls(frame), HeaderCalls(frame, header, end, delimiters))

    return new


def tagged(markup: Markup, header: str = "{json}", end: str = "") -> NewReader:
    """Tags around values; see XmlCalls. JSON calls are read as well, and behind a ``header`` all arguments as JSON."""

    def new(frame: Frame, offer: Offer) -> Reader:
        others = [HeaderCalls(frame, header, end)] if "{name}" in header else []
        return AnyCalls(JsonCalls(frame), XmlCalls(frame, markup, offer.schema_of), *others)

    return new


def parsed_calls(frame: Frame, offer: Offer) -> Reader:
    """Whatever mlx-lm parses."""
    return WholeCalls(frame, offer.parse)


PYTHON = " «[» {name}«.call»{parenthesis}"
_LLAMA = " <function={name}> {json}"


def llama_calls(frame: Frame, offer: Offer) -> Reader:
    """JSON; <function=NAME>{...}</function>; [NAME(key=value)]."""
    # Code that is to be run looks like a call as well.
    offered = Frame(frame.closing, frame.between, names=offer.names())
    return AnyCalls(JsonCalls(frame), HeaderCalls(frame, _LLAMA, " </function>"), HeaderCalls(offered, PYTHON))


def bare_calls(frame: Frame, offer: Offer) -> Reader:
    """JSON or Python of a tool that was offered, as the whole answer."""
    bare = Frame(frame.closing, frame.between, names=offer.names())
    return AnyCalls(JsonCalls(bare, strict=True), HeaderCalls(bare, PYTHON))


def bare_tags(markup: Markup) -> NewReader:
    """Tags behind the name of a tool that was offered, as the whole answer."""

    def new(frame: Frame, offer: Offer) -> Reader:
        return XmlCalls(Frame(frame.closing, frame.between, names=offer.names()), markup, offer.schema_of)

    return new


def functions(opening: str, closing: str, pad: str) -> CallFormat:
    """Qwen3-Coder's kin: a tag for the function, one for each parameter."""
    key, end = " <parameter={key}>", " </function>"
    markup = Markup(" <function={name}>", key, "<parameter=", "</parameter>", end, pad)
    return CallFormat(opening, closing, tagged(markup), own_openings=("<function=",), between=(opening,))


def invokes(prefix: str, opening: str, closing: str, **more: Any) -> CallFormat:
    """MiniMax M2's kin: the names are attributes."""
    open_tag, close_tag = f"<{prefix}", f"</{prefix}"
    key = f" {open_tag}parameter name={{quote}}{{key}}{{quote}}{{attributes}}>"
    name, end = f" {open_tag}invoke name={{quote}}{{name}}{{quote}}>", f" {close_tag}invoke>"
    markup = Markup(name, key, f"{open_tag}parameter name=", f"{close_tag}parameter>", end)
    return CallFormat(opening, closing, tagged(markup), own_openings=(f"{open_tag}invoke name=",), **more)


def keys_and_values(opening: str, closing: str, *calls: str, prefix: str = "", suffix: str = "") -> CallFormat:
    """GLM's kin: the name as it is, then keys and values in turn. ``calls``: what opens and closes each of several
    calls, whose names a separator ends, between ``opening`` and ``closing``. All tags have ``prefix`` and ``suffix``.
    """
    separator, key, end_key, value, end_value = (
        f"<{slash}{prefix}{name}{suffix}>"
        for slash, name in (("", "tool_sep"), ("", "arg_key"), ("/", "arg_key"), ("", "arg_value"), ("/", "arg_value"))
    )
    name = f" {{name}} {separator if calls else '{tag}'}"
    markup = Markup(name, f" {key}{{key}}{end_key} {value}", value, end_value)
    reader, bare = tagged(markup), bare_tags(markup)
    return CallFormat(opening, closing, reader, calls[:1], calls or (opening,), bare, is_offered_only=True)
