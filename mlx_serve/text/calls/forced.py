"""An answer that a grammar made one tool call of. Knows no grammar and no markers."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_serve.text.calls.json_reader import JsonCalls
from mlx_serve.text.calls.readers import Frame
from mlx_serve.text.symbols import Piece, Region, Splitter, joined


class ForcedCall:
    """A splitter whose content is one call as JSON: a grammar saw to that. Reasoning comes through as it is."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._reader = JsonCalls(Frame(), eager=True)
        self._said: list[str] = []

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
