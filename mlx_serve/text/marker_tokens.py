"""Finds a marker in a sequence of token ids, however a tokenizer cuts its text: an automaton over the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlx_serve.values import Marker


def marker_of(text: bytes, tokens: Iterable[tuple[int, bytes]]) -> Marker:
    """The automaton for ``text``; ``tokens`` are the ids that may spell a part of it, each with its bytes."""
    begun = tuple(text[:n] for n in range(1, len(text)))
    rows = ((token, _row(text, begun, raw)) for token, raw in tokens if _may_spell(text, begun, raw))
    return Marker(len(text), tuple((token, row) for token, row in rows if any(row)))


def _may_spell(text: bytes, begun: tuple[bytes, ...], raw: bytes) -> bool:
    """A quick test that leaves few of a vocabulary's tokens."""
    return bool(raw) and (raw in text or text in raw or raw.endswith(begun) or any(_ends(text, raw)))


def _ends(text: bytes, raw: bytes) -> Iterator[bool]:
    """Whether the token begins with what is left of the text, for each place in it."""
    return (raw.startswith(text[n:]) for n in range(1, len(text)))


def _row(text: bytes, begun: tuple[bytes, ...], raw: bytes) -> tuple[int, ...]:
    return tuple(_next(text, text[:state] + raw) for state in range(len(text)))


def _next(text: bytes, read: bytes) -> int:
    """How much of the text has been read. Longer beginnings win, as in Knuth, Morris and Pratt's search."""
    if text in read:
        return len(text)
    return next((n for n in range(min(len(text) - 1, len(read)), 0, -1) if read.endswith(text[:n])), 0)
