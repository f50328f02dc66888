"""The index of cache files in memory: by tokens, and in the order of last use.

Opens no file, takes no lock, knows no MLX. Tokens are keys made by ``file.to_key``: bytes in token order. So among
sorted keys, the one with the longest common prefix is always a neighbour.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlx_serve.engine.cache.file import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: its tokens (``key``), its model, and its bytes on disk."""

    identity: str
    key: bytes
    trimmable: bool
    path: Path
    size: int

    @property
    def n_tokens(self) -> int:
        """How many tokens the cache holds."""
        return len(self.key) // TOKEN_BYTES

    def covers(self, other: Entry) -> bool:
        """Whether this file makes the other one useless."""
        if self.identity != other.identity:
            return False
        return self.key == other.key or (self.trimmable and other.trimmable and self.key.startswith(other.key))


def common_tokens(a: bytes, b: bytes) -> int:
    """The length of the longest common prefix, in tokens. Found by bisection: comparing bytes is faster than a loop."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if a[part] == b[part]:
            low = middle
        else:
            high = middle - 1
    return low


class SortedKeys:
    """A sorted list of different keys."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def add(self, key: bytes) -> None:
        """Add a key that is not there yet."""
        insort(self._keys, key)

    def remove(self, key: bytes) -> None:
        """Remove a key that is there."""
        del self._keys[bisect_left(self._keys, key)]

    def neighbours(self, key: bytes) -> list[bytes]:
        """The last key that is at most ``key``, and the first that is greater or equal."""
        before, after = bisect_right(self._keys, key), bisect_left(self._keys, key)
        return self._keys[max(before - 1, 0) : before] + self._keys[after : after + 1]

    def prefixes(self, key: bytes) -> Iterator[bytes]:
        """The keys that are prefixes of ``key``, itself included, the longest first."""
        at = bisect_right(self._keys, key)
        while at:
            found = self._keys[at - 1]
            if key.startswith(found):
                yield found
                at -= 1
            else:
                # A prefix of ``key`` that sorts before ``found`` is at most as long as their common prefix.
                shared = common_tokens(key, found) * TOKEN_BYTES
                at = min(at - 1, bisect_right(self._keys, key[:shared]))

    def extension(self, key: bytes) -> bytes | None:
        """The first key that begins with ``key``."""
        at = bisect_left(self._keys, key)
        return self._keys[at] if at < len(self._keys) and self._keys[at].startswith(key) else None


@dataclass(slots=True)
class _Shelf:
    """The files of one model. Trimmable ones are in a list of their own: only they can be reused in part."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    every: SortedKeys = field(default_factory=SortedKeys)
    trimmable: SortedKeys = field(default_factory=SortedKeys)


class CacheIndex:
    """All files of a directory, with their sum of bytes."""

    def __init__(self) -> None:
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)
        self._by_use: OrderedDict[Path, Entry] = OrderedDict()
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._by_use)

    def add(self, entry: Entry) -> None:
        """Add a file as the most recently used one. It replaces a file with the same tokens."""
        shelf = self._shelves[entry.identity]
        if (former := shelf.entries.get(entry.key)) is not None:
            self.remove(former)
        shelf = self._shelves[entry.identity]
        shelf.entries[entry.key] = entry
        shelf.every.add(entry.key)
        if entry.trimmable:
            shelf.trimmable.add(entry.key)
        self._by_use[entry.path] = entry
        self.total_bytes += entry.size

    def remove(self, entry: Entry) -> None:
        """Remove a file from the index, if it is there."""
        if self._by_use.get(entry.path) is not entry:
            return
        del self._by_use[entry.path]
        self.total_bytes -= entry.size
        shelf = self._shelves[entry.identity]
        del shelf.entries[entry.key]
        shelf.every.remove(entry.key)
        if entry.trimmable:
            shelf.trimmable.remove(entry.key)
        if not shelf.entries:
            del self._shelves[entry.identity]

    def touch(self, entry: Entry) -> None:
        """Make a file the most recently used one."""
        if entry.path in self._by_use:
            self._by_use.move_to_end(entry.path)

    def oldest(self) -> Entry | None:
        """The least recently used file."""
        return next(iter(self._by_use.values()), None)

    def best(self, identity: str, key: bytes, *, trimmable: bool) -> tuple[Entry, int] | None:
        """The file that covers most leading tokens of ``key`` (of equals the smaller one), and how many it covers."""
        shelf = self._shelves.get(identity)
        if shelf is None:
            return None
        whole = next(shelf.every.prefixes(key), None)
        found = [(shelf.entries[whole], shelf.entries[whole].n_tokens)] if whole is not None else []
        if trimmable:
            found += [(shelf.entries[near], common_tokens(near, key)) for near in shelf.trimmable.neighbours(key)]
        best = max(found, key=lambda pair: (pair[1], -pair[0].size), default=None)
        return best if best is not None and best[1] else None

    def covering(self, entry: Entry) -> Entry | None:
        """A file that makes ``entry`` useless."""
        shelf = self._shelves.get(entry.identity)
        if shelf is None:
            return None
        if (same := shelf.entries.get(entry.key)) is not None:
            return same
        longer = shelf.trimmable.extension(entry.key) if entry.trimmable else None
        return shelf.entries[longer] if longer is not None else None

    def covered(self, entry: Entry) -> list[Entry]:
        """The files that ``entry`` makes useless, without itself."""
        shelf = self._shelves.get(entry.identity)
        if shelf is None or not entry.trimmable:
            return []
        return [shelf.entries[key] for key in shelf.trimmable.prefixes(entry.key) if key != entry.key]
