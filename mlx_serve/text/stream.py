"""Cutting a stream of text: at stop strings, and into content, reasoning and tool calls. Knows no tokens.

Both cutters take text as it comes and give back what is certain; what may be the start of a marker is held back until
it is one, or is not. ``flush`` gives the rest at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlx_serve.text.callbody import CallBody
from mlx_serve.text.pieces import Piece, Region, Symbols, is_symbol, joined
from mlx_serve.text.stops import StopSearch

# A control token's character, or the text up to the next one.
_RUN = re.compile("[\ud800-\udfff]|[^\ud800-\udfff]+")
# What may stand between calls, and what small models leave behind a call's JSON.
_SEPARATORS = " \t\r\n,;]}"


def held_back(text: str, markers: Collection[str]) -> int:
    """How many of the last characters of ``text`` may be the start of a marker."""
    longest = max((len(marker) for marker in markers), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-n:]) for marker in markers if len(marker) > n):
            return n
    return 0


def _first(text: str, markers: Collection[str]) -> tuple[int, str] | None:
    """The marker that is complete first, and where it begins; of two that end together, the longer.

    By its end and not by its start, so that the outcome does not depend on how much text comes at a time.
    """
    found = [(text.find(marker) + len(marker), -len(marker), marker) for marker in markers if marker in text]
    if not found:
        return None
    end, _, marker = min(found)
    return end - len(marker), marker


class StopCutter:
    """Ends the text at whichever of some strings (none of them empty) is complete first.

    Before that string, or with ``keeps_stop`` behind it.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._search = StopSearch(stops)
        self._keeps_stop = keeps_stop
        self._pending = ""
        # The string that ended the text.
        self.match: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether one of them has ended the text."""
        return self.match is not None

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop string. After a match nothing comes."""
        if self.stopped:
            return ""
        n_before = len(self._pending)
        self._pending += text
        found = self._search.feed(text)
        if found is not None:
            end, self.match = found
            end += n_before if self._keeps_stop else n_before - len(self.match)
            out, self._pending = self._pending[:end], ""
            return out
        cut = len(self._pending) - self._search.n_held
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out

    def flush(self) -> str:
        """What was held back, now that nothing follows. A stop string does not reach over this place."""
        self._search.restart()
        out, self._pending = self._pending, ""
        return out


@dataclass(frozen=True, slots=True)
class Layout:
    """Which markers lead from where to where, and where an answer begins."""

    edges: Mapping[Region, tuple[tuple[str, Region], ...]] = field(default_factory=dict)
    initial: Region = "content"

    def markers(self, region: Region) -> list[str]:
        """Those that count in a region."""
        return [marker for marker, _ in self.edges.get(region, ())]

    def target(self, region: Region, marker: str) -> Region:
        """Where a marker leads."""
        return dict(self.edges[region])[marker]


class RegionSplitter:
    """Splits a model's output at the markers of a layout, which are dropped.

    ``new_call`` makes the reader of a tool call's text, ``new_bare_call`` that of an answer which begins like a call
    without any marker. Without them there are no calls.
    """

    def __init__(
        self,
        layout: Layout,
        symbols: Symbols,
        *,
        new_call: Callable[[], CallBody] | None = None,
        new_bare_call: Callable[[], CallBody] | None = None,
        in_reasoning: bool = False,
    ) -> None:
        self._layout = layout
        self._symbols = symbols
        self._new_call = new_call
        self._new_bare_call = new_bare_call
        self._region: Region = "reasoning" if in_reasoning else layout.initial
        self._pending = ""
        # Where the pending text, and the last call, begin in the text that was fed.
        self._position = 0
        self._call_position = 0
        self._body: CallBody | None = None
        # The text of the marker that opened the call ("": none did), and the space before it.
        self._opening = ""
        self._space = ""
        self._after_call = False
        self._at_start = True

    @property
    def region(self) -> Region:
        """Where the next text belongs, as far as that is known."""
        return self._region

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        self._pending += text
        out: list[Piece] = []
        while self._pending and self._advance(out):
            pass
        return joined(out)

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """The rest. What was cut off in the middle of a marker is no text; see ``_is_half_a_marker``."""
        out: list[Piece] = []
        held = held_back(self._pending, self._markers())
        if held and self._is_half_a_marker(self._pending[-held:], cut=cut):
            self._pending = self._pending[:-held]
        while self._pending and self._body is not None:
            self._give(len(self._pending), out)
        if self._body is not None:
            self._end_call("", out, cut=cut)
        self._take(len(self._pending), out)
        return joined(out)

    def _is_half_a_marker(self, text: str, *, cut: bool) -> bool:
        """A control token in it: the model began a marker. Else, when the answer was cut off: two characters will do.

        Of an answer that was cut off, these are the last few characters before the cut; half a marker would be read as
        text by whoever gets it. A single one ("<") is too common to be dropped. Text that will be given back because it
        is no call is given back whole.
        """
        if self._body is not None and self._body.n_calls == 0:
            return False
        return any(map(is_symbol, text)) or (cut and len(text) > 1)

    def _markers(self) -> list[str]:
        return [] if self._body is not None and self._body.in_string else self._layout.markers(self._region)

    def _advance(self, out: list[Piece]) -> bool:
        """Do the next thing that is certain. False: nothing is, before more text comes."""
        if self._begins_bare_call():
            text = self._pending.lstrip()
            self._space = self._pending[: len(self._pending) - len(text)]
            self._skip(len(self._space))
            self._begin_call("")
            self._call_position -= len(self._space)
            return True
        markers = self._markers()
        match = _first(self._pending, markers)
        if match is None:
            n = len(self._pending) - held_back(self._pending, markers)
            return self._advance_by(n if self._body is not None else n - self._trailing_space(n), out)
        start, marker = match
        if start == 0:
            self._follow(marker, out)
        elif self._body is None and self._layout.target(self._region, marker) == "call":
            n_text = start - self._trailing_space(start)
            self._take(n_text, out)
            # Should it turn out to be no call, this goes back with it.
            self._space = self._pending[: start - n_text]
            self._skip(start - n_text)
        else:
            self._advance_by(start, out)
        return True

    def _advance_by(self, n: int, out: list[Piece]) -> bool:
        if n > 0 and self._body is not None:
            self._give(n, out)
        elif n > 0:
            self._take(n, out)
        return n > 0

    def _begins_bare_call(self) -> bool:
        is_possible = self._new_bare_call is not None and self._region == "content" and self._at_start
        return is_possible and self._pending.lstrip().startswith("{")

    def _trailing_space(self, n: int) -> int:
        """Space before a tool call is the template's, so it waits for what follows."""
        if self._new_call is None or self._region != "content":
            return 0
        return n - len(self._pending[:n].rstrip())

    def _skip(self, n: int) -> None:
        self._pending = self._pending[n:]
        self._position += n

    def _take(self, n: int, out: list[Piece]) -> None:
        """The next characters are text of the region. Space behind a tool call is the template's."""
        text = self._pending[:n]
        if self._after_call and self._region == "content":
            text = text.lstrip()
            self._after_call = not text
        self._skip(n)
        if self._region == "content" and text.strip():
            self._at_start = False
        if self._region in ("content", "reasoning"):
            out += self._visible(text, self._region)

    def _visible(self, text: str, region: Literal["content", "reasoning"]) -> Iterator[Piece]:
        """The pieces of text that was just skipped, between control tokens that mean nothing here."""
        start = self._position - len(text)
        for match in _RUN.finditer(text):
            if visible := self._symbols.visible(match.group()):
                yield Piece(region, visible, start + match.start(), start + match.end())

    def _give(self, n: int, out: list[Piece]) -> None:
        """Some of the next characters are a tool call's."""
        assert self._body is not None
        match = _RUN.match(self._pending[:n])
        assert match is not None
        run = match.group()
        if is_symbol(run[0]):
            rest = self._symbols.restore(run)
            while rest:
                rest = rest[self._body.feed(rest, out) :]
            self._skip(1)
        else:
            self._skip(self._body.feed(run, out))
        if self._body.failed and not self._opening:
            # No marker will end it.
            self._end_call("", out, cut=False)

    def _follow(self, marker: str, out: list[Piece]) -> None:
        target = self._layout.target(self._region, marker)
        text = self._symbols.restore(marker)
        if self._body is not None:
            # A marker that opens the next call ends this one, but is no part of its text.
            n_own = 0 if target == "call" else len(marker)
            self._skip(n_own)
            self._end_call("" if target == "call" else text, out, cut=False)
            self._skip(len(marker) - n_own)
        else:
            self._skip(len(marker))
            self._at_start = self._at_start or self._region == "reasoning"
        self._region = target
        if target == "call":
            self._begin_call(text)
            self._call_position -= len(marker) + len(self._space)

    def _begin_call(self, opening: str) -> None:
        new = self._new_call if opening else self._new_bare_call
        assert new is not None
        self._region, self._body, self._opening = "call", new(), opening
        self._call_position = self._position

    def _end_call(self, closing: str, out: list[Piece], *, cut: bool) -> None:
        assert self._body is not None
        left = self._body.close(out, cut=cut)
        is_call = self._body.n_calls > 0
        self._region, self._body, self._after_call = "content", None, is_call
        text = left if is_call else self._space + self._opening + left + closing
        if cut and not left.strip():
            # A marker and nothing behind it says nothing.
            text = ""
        self._space = ""
        if text.strip(_SEPARATORS) if is_call else text:
            self._at_start = self._after_call = False
            out.append(Piece("content", text, self._call_position, self._position))
