"""Splits a stream of text into content, reasoning and tool calls. Knows no tokens and no format.

The splitter returns text as soon as it is certain. Text that may be the start of a marker is held back until more text
decides. The readers of ``text/calls`` read calls; text that turns out to be no call is split again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlx_serve.text.calls.readers import Reader
from mlx_serve.text.symbols import Piece, Region, Symbols, is_symbol, joined

# A control token's character, or the text up to the next one.
_RUN = re.compile("[\ud800-\udfff]|[^\ud800-\udfff]+")


def held_back(text: str, markers: Collection[str]) -> int:
    """How many of the last characters of ``text`` may be the start of a marker."""
    longest = max((len(marker) for marker in markers), default=0)
    if longest < 2 or {marker[0] for marker in markers}.isdisjoint(text[1 - longest :]):
        return 0
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-n:]) for marker in markers if len(marker) > n):
            return n
    return 0


def _first(text: str, markers: Collection[str]) -> tuple[int, str] | None:
    """The marker that is complete first, and where it begins; of two that end together, the longer.

    The end counts and not the start, so that the result does not depend on how the text was cut into pieces.
    """
    found = [(text.find(marker) + len(marker), -len(marker), marker) for marker in markers if marker in text]
    if not found:
        return None
    end, _, marker = min(found)
    return end - len(marker), marker


@dataclass(frozen=True, slots=True)
class Layout:
    """Which markers lead from which region to which, and the region in which an answer begins."""

    edges: Mapping[Region, tuple[tuple[str, Region], ...]] = field(default_factory=dict)
    initial: Region = "content"

    def markers(self, region: Region) -> list[str]:
        """The markers that have a meaning in a region."""
        return [marker for marker, _ in self.edges.get(region, ())]

    def target(self, region: Region, marker: str) -> Region:
        """The region that a marker leads to."""
        return dict(self.edges[region])[marker]


@dataclass(frozen=True, slots=True)
class Calls:
    """``new`` makes a reader for the text behind an opening marker, given the marker's text. ``new_bare`` makes a
    reader for an answer that may be a call without a marker. ``closing`` is the marker that ends calls, or "".
    """

    new: Callable[[str], Reader]
    new_bare: Callable[[], Reader] | None = None
    closing: str = ""


@dataclass(slots=True)
class _Attempt:
    """Text that is read as calls. If it turns out to be none, it is returned from ``start`` on, its opening as text.

    While the model is thinking, ``pieces`` are held back: they are calls if nothing follows them, otherwise an example.
    """

    reader: Reader
    start: int
    n_opening: int
    is_marked: bool
    is_thought: bool
    raw: list[str]
    pieces: list[Piece] = field(default_factory=list)
    is_over: bool = False
    has_left_thought: bool = False


class RegionSplitter:
    """Splits a model's output at the markers of a layout and drops the markers. Without ``calls`` it finds no calls."""

    def __init__(
        self, layout: Layout, symbols: Symbols, *, calls: Calls | None = None, in_reasoning: bool = False
    ) -> None:
        self._layout = layout
        self._symbols = symbols
        self._calls = calls
        self._region: Region = "reasoning" if in_reasoning else layout.initial
        # Text that is not used up yet, and its position in all text that was fed.
        self._pending = ""
        self._position = 0
        self._attempt: _Attempt | None = None
        # In the reasoning, openings before this position are text.
        self._settled = 0
        # Text that turns out to be no call is shown with its markers.
        self._is_shown = False
        self._after_call = False
        self._at_start = True

    @property
    def region(self) -> Region:
        """The region of the next text, as far as it is known."""
        return self._region if self._attempt is None or self._attempt.is_thought else "call"

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        self._pending += text
        out: list[Piece] = []
        self._run(out)
        return joined(out)

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """The rest. A marker that was cut off in the middle is dropped; see ``_is_half_a_marker``."""
        out: list[Piece] = []
        self._run(out)
        while self._attempt is not None:
            self._close(self._attempt, out, cut=cut)
            self._run(out)
        held = held_back(self._pending, self._markers())
        if held and self._is_half_a_marker(self._pending[-held:], cut=cut):
            self._pending = self._pending[:-held]
        self._take(len(self._pending), out)
        return joined(out)

    def _run(self, out: list[Piece]) -> None:
        while self._pending and self._advance(out):
            pass

    def _is_half_a_marker(self, text: str, *, cut: bool) -> bool:
        """True if a control token is in it, because the model then began a marker. For an answer that was cut off, two
        characters of a marker are enough.

        These are the last characters before the cut, and clients would read half a marker as text. A single character
        ("<") is too common to be dropped.
        """
        return any(map(is_symbol, text)) or (cut and len(text) > 1)

    def _markers(self) -> list[str]:
        """The markers that have a meaning here. In the answer, a closing marker of calls is one even if it is shown."""
        markers = self._layout.markers(self._region)
        return [*markers, self._calls.closing] if self._closes() and self._calls else markers

    def _closes(self) -> bool:
        return self._region == "content" and self._calls is not None and self._calls.closing != ""

    def _advance(self, out: list[Piece]) -> bool:
        """Does the next thing that is certain. False: nothing is certain until more text comes."""
        if self._attempt is not None:
            return self._resolve(self._attempt, out) if self._attempt.is_over else self._read(self._attempt, out)
        markers = self._markers()
        match = _first(self._pending, markers)
        n_certain = len(self._pending) - held_back(self._pending, markers) if match is None else match[0]
        n_text = n_certain - self._trailing_space(n_certain)
        if self._may_be_bare(n_certain):
            self._begin(len(self._pending) - len(self._pending.lstrip()), "")
        elif match is None or (n_text and self._leads(match[1]) == "call"):
            self._take(n_text, out)
            return n_text > 0
        elif n_certain and self._leads(match[1]) != "call":
            self._take(n_certain, out)
        else:
            self._follow(n_certain, match[1], out)
        return True

    def _leads(self, marker: str) -> Region:
        """The region that a marker leads to; a closing marker of calls leads nowhere else."""
        edges = dict(self._layout.edges.get(self._region, ()))
        return edges.get(marker, self._region)

    def _may_be_bare(self, n_certain: int) -> bool:
        is_possible = self._calls is not None and self._calls.new_bare is not None
        return is_possible and self._region == "content" and self._at_start and self._pending[:n_certain].strip() != ""

    def _trailing_space(self, n: int) -> int:
        """Space before a tool call belongs to the template, so it is held back until more text comes."""
        if self._calls is None or self._region != "content":
            return 0
        return n - len(self._pending[:n].rstrip())

    def _follow(self, n_space: int, marker: str, out: list[Piece]) -> None:
        """Handles the marker at this position, perhaps behind space that belongs to it."""
        target = self._leads(marker)
        if target == "call" and (self._region != "reasoning" or self._position >= self._settled):
            self._begin(n_space, marker)
        elif target == "call":
            self._say(n_space + len(marker), out)
        elif self._calls is not None and marker == self._calls.closing and target == self._region:
            self._take(len(marker), out)
            self._is_shown = False
        else:
            self._skip(len(marker))
            self._at_start = self._at_start or self._region == "reasoning"
            self._region = target
            self._is_shown = False

    def _skip(self, n: int) -> str:
        text, self._pending = self._pending[:n], self._pending[n:]
        self._position += n
        return text

    def _take(self, n: int, out: list[Piece]) -> None:
        """Takes the next characters as text of the region. Space behind a tool call belongs to the template."""
        text = self._pending[:n]
        if self._after_call and self._region == "content":
            text = text.lstrip()
            self._after_call = not text
        self._skip(n)
        if self._region == "content" and text.strip():
            self._at_start = False
        if self._region in ("content", "reasoning"):
            out += self._visible(text, self._region)

    def _say(self, n: int, out: list[Piece]) -> None:
        """Takes the next characters as text, including control tokens among them."""
        was_shown, self._is_shown = self._is_shown, True
        self._after_call = False
        self._take(n, out)
        self._is_shown = was_shown

    def _visible(self, text: str, region: Literal["content", "reasoning"]) -> Iterator[Piece]:
        """The pieces of the text just skipped, between control tokens that have no meaning here."""
        start = self._position - len(text)
        written = self._symbols.restore if self._is_shown else self._symbols.visible
        for match in _RUN.finditer(text):
            if visible := written(match.group()):
                yield Piece(region, visible, start + match.start(), start + match.end())

    def _begin(self, n_space: int, marker: str) -> None:
        """Begins to read the following text as calls."""
        assert self._calls is not None
        n, start = n_space + len(marker), self._position
        raw = self._skip(n)
        reader = (
            self._calls.new(self._symbols.restore(marker))
            if marker or not self._calls.new_bare
            else self._calls.new_bare()
        )
        if self._attempt is None:
            is_thought = self._region == "reasoning"
            self._attempt = _Attempt(reader, start, n, marker != "", is_thought, [raw])
        else:
            self._attempt.reader, self._attempt.is_over = reader, False
            self._attempt.raw.append(raw)

    def _read(self, attempt: _Attempt, out: list[Piece]) -> bool:
        text = self._skip(len(self._pending))
        attempt.raw.append(text)
        n_left = attempt.reader.feed(self._symbols.restore(text), attempt.pieces if attempt.is_thought else out)
        if n_left is not None:
            self._end(attempt, n_left, out)
        return n_left is not None

    def _end(self, attempt: _Attempt, n_left: int, out: list[Piece]) -> None:
        """Called when the reader is done; the last ``n_left`` characters do not belong to the calls."""
        if not attempt.reader.n_calls:
            self._give_back(attempt, out)
            return
        self._put_back(attempt, n_left)
        self._is_shown = False
        if attempt.is_thought:
            attempt.is_over = True
        else:
            self._attempt, self._region = None, "content"
            self._after_call, self._at_start = True, False

    def _put_back(self, attempt: _Attempt, n_left: int) -> None:
        """Makes the last characters pending again; the reader counted them."""
        raw, n_raw = "".join(attempt.raw), 0
        while n_left > 0:
            n_raw += 1
            n_left -= len(self._symbols.restore(raw[-n_raw]))
        attempt.raw = [raw[: len(raw) - n_raw]]
        self._pending = raw[len(raw) - n_raw :] + self._pending
        self._position -= n_raw

    def _give_back(self, attempt: _Attempt, out: list[Piece]) -> None:
        """It is no call: its opening is text, and the text behind it is split again."""
        self._attempt = None
        if self._region == "header":
            self._region = "content"
        self._pending = "".join(attempt.raw) + self._pending
        self._position = attempt.start
        self._say(attempt.n_opening, out)
        self._at_start = False
        self._is_shown = attempt.is_marked

    def _resolve(self, attempt: _Attempt, out: list[Piece]) -> bool:
        """Handles what follows calls in the reasoning. Another call, or the end of the reasoning,
        decides nothing yet.
        """
        text = self._pending.lstrip()
        n_space = len(self._pending) - len(text)
        markers = [] if attempt.has_left_thought else self._layout.markers("reasoning")
        marker = next((marker for marker in markers if text.startswith(marker)), None)
        if marker is not None and self._layout.target("reasoning", marker) == "call":
            self._begin(n_space, marker)
        elif marker is not None:
            attempt.raw.append(self._skip(n_space + len(marker)))
            attempt.has_left_thought = True
        elif text and not any(marker.startswith(text) for marker in markers):
            self._settled = self._position
            self._give_back(attempt, out)
        else:
            return False
        return True

    def _close(self, attempt: _Attempt, out: list[Piece], *, cut: bool) -> None:
        """Called when no more text comes. Calls at the end of the reasoning are calls."""
        if attempt.is_over:
            if self._pending.strip() and not cut:
                self._give_back(attempt, out)
            else:
                self._settle(attempt, out)
            return
        n_left = attempt.reader.close(attempt.pieces if attempt.is_thought else out, cut=cut)
        if attempt.reader.n_calls or not (cut and attempt.is_marked):
            self._end(attempt, n_left, out)
        else:
            # Markup that was cut off is neither a call nor text.
            self._settle(attempt, out)

    def _settle(self, attempt: _Attempt, out: list[Piece]) -> None:
        out += attempt.pieces
        self._pending, self._attempt, self._region = "", None, "content"
