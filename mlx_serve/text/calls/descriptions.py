"""Describes a tool-call format as data and builds its reader. Knows no model family by name.

A format is described by the shape of the text before the arguments (``headed``) or by the tags around each value
(``tagged``). ``registry`` lists the formats of the known families.
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
    """The tools that a request offers, and mlx-lm's parser for the model's calls."""

    tools: Sequence[dict[str, Any]]
    parse: Callable[[str], list[dict[str, Any]]]

    def names(self) -> frozenset[str]:
        """The tools' names."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def schema_of(self, name: str) -> Schema:
        """The JSON schema of the arguments of the tool ``name``."""
        found = (tool["function"].get("parameters") for tool in self.tools if tool["function"]["name"] == name)
        parameters = next(found, None)
        return Schema(parameters, parameters)


NewReader: TypeAlias = Callable[[Frame, Offer], Reader]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls.

    ``opening``, ``closing``: the markers around the calls. With ``closing`` "" a call ends at the next opening, or with
    the answer. ``own_openings``: texts that open a call without the opening marker, which models sometimes leave out;
    each is also the first text of the call. ``between``: markers that may stand before, between and after calls.
    ``bare``: makes the reader of an answer that may be a call without any marker. ``is_offered_only``: a call's text
    is little more than a name, so only the names of offered tools are read as calls. ``taught``: the example of a call
    that the prompt shows to the model, if the format is not JSON between the markers.
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
        """A call with the placeholders FUNCTION and {ARGUMENTS}, for models whose template teaches no format."""
        return self.taught or f'{self.opening}\n{{"name": "FUNCTION", "arguments": {{ARGUMENTS}}}}\n{self.closing}'

    def openings(self) -> tuple[str, ...]:
        """Every text that opens a call."""
        return (self.opening, *(text for text in self.own_openings if text != self.opening))


def json_calls(frame: Frame, offer: Offer) -> Reader:
    """Reads {"name": ..., "arguments": {...}}, and lists of such objects."""
    return JsonCalls(frame)


def named_json(frame: Frame, offer: Offer) -> Reader:
    """Reads {NAME: {...}}, and lists of such objects."""
    return JsonCalls(Frame(frame.closing, frame.between, names=offer.names()), by_name=True)


def headed(header: str, end: str = "", *delimiters: str) -> NewReader:
    """Reads calls of a header with the name, then the arguments (see HeaderCalls). Reads JSON calls too."""

    def new(frame: Frame, offer: Offer) -> Reader:
        return AnyCalls(JsonCalls(frame), HeaderCalls(frame, header, end, delimiters))

    return new


def tagged(markup: Markup, header: str = "{json}", end: str = "") -> NewReader:
    """Reads calls of tags around values (see XmlCalls). Reads JSON calls too, and JSON arguments after ``header``."""

    def new(frame: Frame, offer: Offer) -> Reader:
        others = [HeaderCalls(frame, header, end)] if "{name}" in header else []
        return AnyCalls(JsonCalls(frame), XmlCalls(frame, markup, offer.schema_of), *others)

    return new


def parsed_calls(frame: Frame, offer: Offer) -> Reader:
    """Reads whatever mlx-lm's parser accepts."""
    return WholeCalls(frame, offer.parse)


PYTHON = " «[» {name}«.call»{parenthesis}"
_LLAMA = " <function={name}> {json}"


def llama_calls(frame: Frame, offer: Offer) -> Reader:
    """Reads JSON; <function=NAME>{...}</function>; [NAME(key=value)]."""
    # The Python form also matches code in an answer. Only the names of offered tools make it a call.
    offered = Frame(frame.closing, frame.between, names=offer.names())
    return AnyCalls(JsonCalls(frame), HeaderCalls(frame, _LLAMA, " </function>"), HeaderCalls(offered, PYTHON))


def bare_calls(frame: Frame, offer: Offer) -> Reader:
    """Reads an answer that is as a whole a JSON or Python call of an offered tool."""
    bare = Frame(frame.closing, frame.between, names=offer.names())
    return AnyCalls(JsonCalls(bare, strict=True), HeaderCalls(bare, PYTHON))


def bare_tags(markup: Markup) -> NewReader:
    """Reads an answer that is as a whole the name of an offered tool and tags."""

    def new(frame: Frame, offer: Offer) -> Reader:
        return XmlCalls(Frame(frame.closing, frame.between, names=offer.names()), markup, offer.schema_of)

    return new


def functions(opening: str, closing: str, pad: str) -> CallFormat:
    """Qwen3-Coder and its relatives: one tag for the function, one tag for each parameter."""
    key, end = " <parameter={key}>", " </function>"
    markup = Markup(" <function={name}>", key, "<parameter=", "</parameter>", end, pad)
    return CallFormat(opening, closing, tagged(markup), own_openings=("<function=",), between=(opening,))


def invokes(prefix: str, opening: str, closing: str, **more: Any) -> CallFormat:
    """MiniMax M2 and its relatives: the names of function and parameters are attributes of tags."""
    open_tag, close_tag = f"<{prefix}", f"</{prefix}"
    key = f" {open_tag}parameter name={{quote}}{{key}}{{quote}}{{attributes}}>"
    name, end = f" {open_tag}invoke name={{quote}}{{name}}{{quote}}>", f" {close_tag}invoke>"
    markup = Markup(name, key, f"{open_tag}parameter name=", f"{close_tag}parameter>", end)
    return CallFormat(opening, closing, tagged(markup), own_openings=(f"{open_tag}invoke name=",), **more)


def keys_and_values(opening: str, closing: str, *calls: str, prefix: str = "", suffix: str = "") -> CallFormat:
    """GLM and its relatives: the plain name, then keys and values in turn.

    ``calls``: the opening and closing of each single call, if ``opening`` and ``closing`` surround the whole list; a
    separator then follows the name. Every tag's name stands between ``prefix`` and ``suffix``.
    """
    separator, key, end_key, value, end_value = (
        f"<{slash}{prefix}{name}{suffix}>"
        for slash, name in (("", "tool_sep"), ("", "arg_key"), ("/", "arg_key"), ("", "arg_value"), ("/", "arg_value"))
    )
    name = f" {{name}} {separator if calls else '{tag}'}"
    markup = Markup(name, f" {key}{{key}}{end_key} {value}", value, end_value)
    reader, bare = tagged(markup), bare_tags(markup)
    return CallFormat(opening, closing, reader, calls[:1], calls or (opening,), bare, is_offered_only=True)
