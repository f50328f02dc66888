"""Cutting a stream of text: at stop strings, and into content, reasoning and tool calls. Knows no tokens and no JSON.

Both cutters take text as it comes and give back what is certain; what may be the start of a marker is held back until
it is one, or is not. ``flush`` gives the rest at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mlx_serve.core import Region

PieceKind: TypeAlias = Region | Literal["tool"]


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
    """Ends the text before whichever of some strings (none of them empty) is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop string. After a match ``stopped`` is True and nothing comes."""
        if self.stopped:
            return ""
        self._pending += text
        match = _first(self._pending, self._stops)
        if match is not None:
            self.stopped = True
            out, self._pending = self._pending[: match[0]], ""
            return out
        keep = held_back(self._pending, self._stops)
        cut = len(self._pending) - keep
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        out, self._pending = self._pending, ""
        return out


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one region. A "tool" piece is one whole region: what stands between a tool call's markers.

    ``raw`` is the text as the model wrote it, markers included, for a call that turns out not to be one.
    """

    kind: PieceKind
    text: str
    raw: str = ""


class RegionSplitter:
    """Splits a model's output at its reasoning and tool-call markers, which are dropped. ``kind``: where it is now."""

    def __init__(
        self, think: tuple[str, str] | None, tool_call: tuple[str, str] | None, *, in_reasoning: bool = False
    ) -> None:
        self._think = think
        self._tool_call = tool_call
        self.kind: PieceKind = "reasoning" if in_reasoning and think else "content"
        self._pending = ""
        self._tool_text = ""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now, none of them empty but for tool calls."""
        self._pending += text
        pieces: list[Piece] = []
        while (match := _first(self._pending, self._markers())) is not None:
            start, marker = match
            pieces += self._take(start)
            self._pending = self._pending[len(marker) :]
            pieces += self._enter(marker)
        pieces += self._take(len(self._pending) - held_back(self._pending, self._markers()))
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, and a tool call that was not closed."""
        pieces = self._take(len(self._pending))
        if self.kind == "tool":
            pieces += self._end_tool_call("")
        return pieces

    def _markers(self) -> list[str]:
        if self.kind == "tool":
            return [self._tool_call[1]] if self._tool_call and self._tool_call[1] else []
        opening = [self._tool_call[0]] if self._tool_call else []
        if self._think is None:
            return opening
        return [*opening, self._think[1 if self.kind == "reasoning" else 0]]

    def _take(self, n: int) -> list[Piece]:
        text, self._pending = self._pending[:n], self._pending[n:]
        if self.kind == "tool":
            self._tool_text += text
            return []
        return [Piece(self.kind, text)] if text else []

    def _enter(self, marker: str) -> list[Piece]:
        """Go into the region that ``marker`` opens, or out of the one that it closes."""
        if self.kind == "tool":
            return self._end_tool_call(marker)
        if self._tool_call is not None and marker == self._tool_call[0]:
            self.kind = "tool"
        else:
            self.kind = "content" if self.kind == "reasoning" else "reasoning"
        return []

    def _end_tool_call(self, closing: str) -> list[Piece]:
        assert self._tool_call is not None
        text, self._tool_text, self.kind = self._tool_text, "", "content"
        return [Piece("tool", text, self._tool_call[0] + text + closing)]
