"""Encodes text to token ids in pieces, so that a long text can be cancelled and does not delay short ones.

The ids are those of the whole text: it is cut only where no token of the vocabulary spans the cut. Knows no model and
no chat template. Any thread may call it.

    text -> parts (at each GUARD) -> pieces (at exact cuts) -> ids, with ``check`` asked between two pieces
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from types import TracebackType

from mlx_serve.values import GUARD, Check

# The least characters of a piece, and the most where the text has no exact cut. At an inexact cut, the two adjacent
# tokens may differ from those of the whole text. A piece takes some milliseconds.
PIECE_CHARS = 16_384
MAX_PIECE_CHARS = 65_536
# After a letter or digit, these characters begin a new word in every tokenizer that splits words before it merges. No
# tokenizer's normalization changes them.
_BREAKS = frozenset(' \n\t\r,.;:!?()[]{}<>"。、「」')

# A function from a text to its ids; True adds the tokens that the tokenizer puts around a text.
Encode = Callable[[str, bool], list[int]]


class FairLock:
    """A lock that goes to the longest-waiting thread. ``threading.Lock`` often goes to the thread that just had it."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._waiting: deque[Lock] = deque()
        self._is_held = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._is_held:
                self._is_held = True
                return
            turn = Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._mutex:
            if self._waiting:
                # The lock stays held: it passes to the next thread.
                self._waiting.popleft().release()
            else:
                self._is_held = False


class Cuts:
    """Finds where a text can be cut without changing its tokens: after a letter or digit, where no token spans it."""

    def __init__(self, tokens: Iterable[bytes]) -> None:
        # All pairs of adjacent bytes in any token. Bytes, because a token may hold part of a character.
        self._joined = bytearray(65_536)
        for raw in tokens:
            for first, second in pairwise(raw):
                self._joined[first << 8 | second] = 1

    def is_exact(self, before: str, after: str) -> bool:
        """Whether a text may be cut between two characters."""
        if after not in _BREAKS or not before.isalnum():
            return False
        second = after.encode()[0]
        return not any(self._joined[form.encode()[-1] << 8 | second] for form in _forms(before))

    def pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """Each piece, with the character before it ("": there is none)."""
        start = 0
        while start < len(text):
            end = self._end(text, start)
            yield text[max(0, start - 1) : start], text[start:end]
            start = end

    def _end(self, text: str, start: int) -> int:
        last = min(start + MAX_PIECE_CHARS, len(text))
        places = range(start + PIECE_CHARS, last)
        return next((i for i in places if self.is_exact(text[i - 1], text[i])), last)


@lru_cache(maxsize=4096)
def _forms(char: str) -> frozenset[str]:
    """A character and the forms that tokenizers give it by folding case, compatible characters or accents."""
    whole = {char, char.lower(), unicodedata.normalize("NFKC", char), unicodedata.normalize("NFKC", char.lower())}
    parts = {part for form in whole for part in unicodedata.normalize("NFKD", form)}
    return frozenset(form[-1] for form in whole) | parts


class Encoder:
    """Encodes through ``encode``, which need not be thread-safe. ``tokens`` returns the vocabulary as bytes."""

    def __init__(self, encode: Encode, tokens: Callable[[], Iterable[bytes]], max_token_chars: int) -> None:
        self._encode = encode
        self._tokens = tokens
        self._max_token_chars = max_token_chars
        self._lock = FairLock()
        # Long texts wait here first, so that at most one of them competes with short texts for the other lock.
        self._long_lock = FairLock()
        # Computed with the first long text: for a large vocabulary it takes most of a second.
        self._cuts: Cuts | None = None

    def encode(self, text: str, *, special: bool, check: Check) -> list[int]:
        """Implements ``text.tokenizer.Tokenizer.encode``."""
        check(len(text) // self._max_token_chars)
        if len(text) <= PIECE_CHARS and GUARD not in text:
            ids = self._short(text, special)
            check(len(ids))
            return ids
        before, after = self._around() if special else ([], [])
        ids = list(before)
        for part in text.split(GUARD):
            for context, piece in self._pieces(part):
                with self._long_lock if len(text) > PIECE_CHARS else nullcontext():
                    ids += self._piece(context, piece)
                check(len(ids))
        return ids + after

    def _short(self, text: str, special: bool) -> list[int]:
        with self._lock:
            return list(self._encode(text, special))

    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text."""
        plain, whole = self._short("a", False), self._short("a", True)
        for i in range(len(whole) - len(plain) + 1):
            if whole[i : i + len(plain)] == plain:
                return whole[:i], whole[i + len(plain) :]
        return whole[: -len(plain)], []

    def _pieces(self, part: str) -> Iterator[tuple[str, str]]:
        if len(part) <= PIECE_CHARS:
            return iter([("", part)])
        with self._long_lock:
            self._cuts = self._cuts or Cuts(self._tokens())
        return self._cuts.pieces(part)

    def _piece(self, context: str, piece: str) -> list[int]:
        """The ids of a piece. A later piece is encoded together with the character before it, because some tokenizers
        add a space at the beginning of every text, or drop one."""
        if not context:
            return self._short(piece, False)
        head, ids = self._short(context, False), self._short(context + piece, False)
        return ids[len(head) :] if ids[: len(head)] == head else self._short(piece, False)
