"""Reads tool calls written as tags, one around each value. Values stream out, converted by the tool's schema.

    _between ---> _begin --name--> _inside --key--> _begin_value ---> _in_value
       ^                           |     ^                               |
       +------ end of the call ----+     +------- end of the value ------+

Each name is a step (see readers.CallReader). A closing tag ends a value only if another key, the end of the call or a
marker follows it. Otherwise the tag is data: a value may hold markup of the same kind. A Markup describes the tags; the
reader knows no model's markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_serve.text.calls.readers import CallReader, Frame, any_of, overlap
from mlx_serve.text.calls.shapes import shape
from mlx_serve.text.calls.values import Conversion, Schema, quoted
from mlx_serve.text.symbols import Piece

_TYPE = re.compile(r"""\b(?:string|type)\s*=\s*["'](\w+)["']""")
_CDATA = ("<![CDATA[", "]]>")
# The number of characters of a value that decide whether it can be anything but a string.
_N_DECISIVE = 64
_ANYTHING = Schema({"type": ["null", "boolean", "number", "object", "array", "string"]}, None)


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags of a call.

    ``name``, ``end``: shapes of the call's beginning and end. Without ``end`` the frame's closing marker ends the call.
    ``key``: shape of the text before a value. ``value_open``: literal text that every ``key`` contains; it counts
    values nested in a value. ``value_end``: literal text after a value. In these two "{key}" stands for the key.
    ``pad``: text that the template puts around every value. ``nested``: text before each tag inside of a value.
    """

    name: str
    key: str
    value_open: str
    value_end: str
    end: str = ""
    pad: str = ""
    nested: str = ""
    has_cdata: bool = False


class XmlCalls(CallReader):
    """Reads calls written as tags. ``schema_of`` returns the schema of a tool's arguments."""

    def __init__(self, frame: Frame, markup: Markup, schema_of: Callable[[str], Schema]) -> None:
        super().__init__(replace(frame, separators=" \t\r\n,;"))
        self._markup = markup
        self._schema_of = schema_of
        self._name, self._key, self._tail = shape(markup.name), shape(markup.key), shape(markup.end)
        self._tool = ""
        self._is_out = False
        self._n_values = 0
        # Texts that may end the current value or make its end uncertain.
        self._marks: tuple[str, ...] = ()
        self._value = _ArgumentValue("", _ANYTHING, markup)

    def _begin(self, out: list[Piece]) -> bool:
        is_name_first = self._markup.name.startswith(" {name}")
        if is_name_first and not (self._may_be_name() or self._may_be_marker()):
            return self._end()
        match = self._expect(self._name)
        if match is None:
            return False
        if not self._frame.accepts(match["name"]):
            return self._end()
        self._tool = match["name"]
        self._is_out, self._n_values = False, 0
        self._step = self._inside
        return True

    def _inside(self, out: list[Piece]) -> bool:
        """Reads the text in a call before a value, and after the last one."""
        follows = self._follows(self._at)
        if follows is None:
            return False
        if follows and (match := self._key_at(self._at)):
            self._at = match.end()
            self._open_value(match, out)
        elif follows or self._is_out:
            ended = self._tail.match(self._text, self._at) if follows else None
            self._at = ended.end() if ended else self._at
            self._end_call(out)
        else:
            return self._end()
        return True

    def _follows(self, at: int) -> bool | None:
        """Whether a key, the end of the call or a marker stands at ``at``. None: more text is needed."""
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        if at == len(self._text):
            return None
        is_end = bool(self._markup.end) and self._tail.match(self._text, at)
        if is_end or self._key_at(at) or any(m and self._text.startswith(m, at) for m in self._markers()):
            return True
        left = self._text[at : at + 80]
        is_begun = any(len(left) < len(marker) and marker.startswith(left) for marker in self._markers())
        is_begun = is_begun or any(part.may_begin(self._text, at) for part in (self._key, self._tail))
        return None if is_begun else False

    def _key_at(self, at: int) -> re.Match[str] | None:
        is_end = bool(self._markup.end) and self._tail.match(self._text, at)
        return None if is_end else self._key.match(self._text, at)

    def _open_value(self, match: re.Match[str], out: list[Piece]) -> None:
        if not self._is_out:
            self._is_out = True
            self._call(self._tool, out)
        key = match["key"].strip()
        kind = _TYPE.search(match.groupdict().get("attributes") or "")
        schema = self._schema_of(self._tool).member(key)
        if kind is not None:
            schema = Schema({"type": "string"}, None) if kind[1] in ("true", "string") else _ANYTHING
        self._value = _ArgumentValue(key, schema, self._markup)
        self._value.prefix = (", " if self._n_values else "{") + quoted(key) + ": "
        self._n_values += 1
        self._step = self._begin_value

    def _begin_value(self, out: list[Piece]) -> bool:
        """Skips the text that the template puts before a value."""
        opening, closing = _CDATA if self._markup.has_cdata else (self._markup.pad, "")
        left = self._text[self._at : self._at + len(opening)]
        if len(left) < len(opening) and opening.startswith(left):
            return False
        if opening and left == opening:
            self._at += len(opening)
            self._value.end = closing + self._value.end
            self._value.is_data = bool(closing)
        others = (self._value.opening, *filter(None, (_literal(self._markup.end), self._frame.closing)))
        self._marks = (self._value.end, *(() if self._value.is_data else others))
        self._step = self._in_value
        return True

    def _in_value(self, out: list[Piece]) -> bool:
        value, marks = self._value, self._marks
        match = any_of(marks).search(self._text, self._at)
        if match is None:
            held = overlap(self._text, self._at, marks)
            self._take(len(self._text) - held, out)
            return False
        self._take(match.start(), out)
        if match.group() == value.end:
            return self._end_tag(match.end(), out)
        if match.group() == value.opening:
            value.depth += 1
        else:
            value.doubt()
        self._take(match.end(), out)
        return True

    def _end_tag(self, end: int, out: list[Piece]) -> bool:
        """Handles a closing tag. The text after it decides whether it ends this value or is data."""
        follows = self._follows(end)
        if follows is None:
            return False
        if follows and not self._value.depth:
            self._at = end
            self._send(self._value.finish(), out)
            self._step = self._inside
            return True
        if follows:
            self._value.doubt()
        self._value.depth -= self._value.depth > 0
        self._take(end, out)
        return True

    def _take(self, end: int, out: list[Piece]) -> None:
        self._send(self._value.add(self._text[self._at : end]), out)
        self._at = end

    def _end_call(self, out: list[Piece]) -> None:
        if not self._is_out:
            self._call(self._tool, out)
        self._send("}" if self._n_values else "{}", out)
        self._is_out = False
        self._step = self._between

    def _cut(self, out: list[Piece]) -> None:
        """Keeps what is complete: the name and the values. Of a string, keeps the part that has arrived."""
        if self._step == self._inside and not self._is_out:
            self._call(self._tool, out)
        elif self._step == self._in_value:
            is_whole = self._text.startswith(self._value.end, self._at) and not self._value.depth
            self._send(self._value.finish() if is_whole else self._value.settle(), out)

    def _finish(self, out: list[Piece], *, cut: bool) -> None:
        if cut:
            self._cut(out)
            return
        while self._step in (self._in_value, self._begin_value):
            # The last value has no certain end. It ended at the first doubtful place, or else with the text.
            doubtful = self._value.doubtful()
            self._text, self._at = doubtful + self._text[self._at :], 0
            if self._text.startswith(self._value.end):
                self._at = len(self._value.end)
            elif not doubtful:
                self._take(len(self._text), out)
            self._send(self._value.finish(), out)
            self._step = self._inside
            while self._n_left is None and self._step(out):
                pass
        if self._is_out:
            self._end_call(out)


class _ArgumentValue:
    """One value: takes its text and returns its JSON as soon as it is certain."""

    def __init__(self, key: str, schema: Schema, markup: Markup) -> None:
        self.prefix = ""
        self.end = markup.value_end.replace("{key}", key)
        self.opening = markup.value_open.replace("{key}", key)
        # CDATA: only ``end`` ends the value, and other marks in it are data.
        self.is_data = False
        # The number of values of the same kind that are open inside of this one.
        self.depth = 0
        self._markup = markup
        self._schema = schema
        self._conversion = Conversion(schema)
        self._is_nested = bool(markup.nested) and not self._conversion.is_surely_text("")
        self._parts: list[str] = []
        self._n_chars = 0
        self._is_text = False
        self._pad = ""
        self._doubtful: list[str] | None = None

    def doubt(self) -> None:
        """Notes that the value may have ended here. Later text is held back until this is known."""
        if self._doubtful is None:
            self._doubtful = []

    def doubtful(self) -> str:
        """Takes the held text out: it does not belong to the value."""
        held, self._doubtful = "".join(self._doubtful or ()), None
        return held

    def settle(self) -> str:
        """Adds the held text to the value, and returns the JSON of it that is certain."""
        held, self._doubtful = "".join(self._doubtful or ()), None
        return self.add(held)

    def add(self, text: str) -> str:
        """Adds text, and returns the JSON that is certain now."""
        if self._doubtful is not None:
            self._doubtful.append(text)
            return ""
        text, self._pad = self._pad + text, ""
        if self._markup.pad and text.endswith(self._markup.pad):
            text, self._pad = text.removesuffix(self._markup.pad), self._markup.pad
        if self._is_text:
            return quoted(text)[1:-1]
        self._parts.append(text)
        is_decisive = self._n_chars < _N_DECISIVE
        self._n_chars += len(text)
        if not is_decisive or not self._is_surely_text("".join(self._parts)):
            return ""
        self._is_text = True
        return f'{self.prefix}"{quoted("".join(self._parts))[1:-1]}'

    def finish(self) -> str:
        """The rest of the value's JSON."""
        certain = self.settle()
        if self._is_text:
            return certain + '"'
        text = "".join(self._parts)
        if self._is_nested and text.lstrip().startswith(self._markup.nested):
            return self.prefix + _nested(text, self._schema, self._markup.nested)
        return self.prefix + self._conversion.json(text)

    def _is_surely_text(self, text: str) -> bool:
        nested, begun = self._markup.nested, text.lstrip()[: len(self._markup.nested)]
        return not (self._is_nested and nested.startswith(begun)) and self._conversion.is_surely_text(text)


def _nested(text: str, schema: Schema, mark: str) -> str:
    """Converts a value of nested tags to JSON: tags named "item" are a list, other tags an object."""
    found = _inner_tags(text, mark)
    is_list = "array" in schema.types() or (bool(found) and all(key == "item" for key, _ in found))
    inner = []
    for key, value in found:
        part = schema.item() if is_list else schema.member(key)
        is_nested = value.lstrip().startswith(mark)
        written = _nested(value, part, mark) if is_nested else Conversion(part).json(value)
        inner.append(written if is_list else f"{quoted(key)}: {written}")
    return f"[{', '.join(inner)}]" if is_list else f"{{{', '.join(inner)}}}"


def _inner_tags(text: str, mark: str) -> list[tuple[str, str]]:
    """The name and the content of each outermost tag."""
    found, depth, start = [], 0, 0
    for tag in re.finditer(rf"{re.escape(mark)}<(/?)([^<>]+)>", text):
        depth += -1 if tag[1] else 1
        if not tag[1] and depth == 1:
            start = tag.end()
        elif tag[1] and depth == 0:
            found.append((tag[2], text[start : tag.start()]))
    return found


def _literal(source: str) -> str:
    """The shape's text without the white space around it."""
    return source.strip()
