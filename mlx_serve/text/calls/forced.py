"""Reads an answer that a grammar restricts to one tool call in JSON. Knows no grammar and no markers."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_serve.text.calls.json_reader import JsonCalls
from mlx_serve.text.calls.readers import Frame
from mlx_serve.text.symbols import Piece, Region, Splitter, joined


class ForcedCall:
    """A splitter that reads the content as one JSON call. Reasoning passes through unchanged."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._reader = JsonCalls(Frame(), eager=True)
        self._said: list[str] = []

    @property
    def region(self) -> Region:
        """The region of the next text, as far as it is known."""
        region = self._splitter.region
        return "call" if region == "content" else region

    def feed(self, text: str) -> list[Piece]:
        """Takes more of the answer and returns the pieces that are certain now."""
        return self._read(self._splitter.feed(text))

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Returns the remaining pieces. A call that was cut off before its name yields nothing."""
        out = self._read(self._splitter.flush(cut=cut))
        self._reader.close(out, cut=cut)
        text = "".join(self._said)
        return out if cut or self._reader.n_calls or not text.strip() else [*out, Piece("content", text)]

    def _read(self, pieces: Sequence[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            if piece.kind == "content":
                self._reader.feed(piece.text, out)
                self._said += [piece.text] if not self._reader.n_calls else []
            else:
                out.append(piece)
        return joined(out)
