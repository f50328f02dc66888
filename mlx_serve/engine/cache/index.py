"""The index of cache files in memory: a tree of blocks for each model and form, and the order of last use.

    root --[256 tokens]--[256 tokens]--[256 tokens]--[40 tokens]
                              \\--------[256 tokens]--[7 tokens]

A path from the root holds the cache of its tokens. Blocks that prompts share exist once. Opens no file, takes no lock,
knows no MLX. Keys are made by ``file.to_key``: bytes in token order. So among sorted keys, the one with the longest
common prefix is always a neighbour.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlx_serve.engine.cache.file import BLOCK_KEY_BYTES, TOKEN_BYTES, root_name
from mlx_serve.engine.cache.form import Form


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

    def __len__(self) -> int:
        return len(self._keys)

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


@dataclass(slots=True, eq=False)
class Block:
    """A file, or the root of a tree. ``key``: its own tokens. Only a full block has blocks behind it."""

    name: str
    owner: str
    form: Form
    key: bytes = b""
    parent: Block | None = None
    size: int = 0
    end: int = 0
    keys: SortedKeys = field(default_factory=SortedKeys)
    behind: dict[bytes, Block] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether other blocks may follow it."""
        return len(self.key) == BLOCK_KEY_BYTES

    @property
    def start(self) -> int:
        """How many tokens are before it."""
        return self.end - len(self.key) // TOKEN_BYTES

    def path(self) -> list[Block]:
        """The blocks from the first one to this one."""
        found, block = [], self
        while block.parent is not None:
            found.append(block)
            block = block.parent
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Path:
    """Blocks that hold the first ``n_tokens`` of a prompt. Of the last one, perhaps only a part."""

    blocks: tuple[Block, ...]
    n_tokens: int

    @property
    def n_bytes(self) -> int:
        """The bytes of the files."""
        return sum(block.size for block in self.blocks)


class CacheIndex:
    """All blocks of a directory, with their sum of bytes."""

    def __init__(self) -> None:
        self._roots: dict[str, dict[str, Block]] = {}
        self._by_use: OrderedDict[str, Block] = OrderedDict()
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._by_use)

    def __contains__(self, block: Block) -> bool:
        return self._by_use.get(block.name) is block

    def root(self, owner: str, form: Form) -> Block:
        """The root of the tree for a model and a form."""
        found = self._roots.get(owner, {}).get(form.text)
        return found or Block(root_name(owner, form.text), owner, form)

    def add(self, block: Block) -> None:
        """Add a block as the most recently used one, behind a parent that is a root or was added."""
        assert block.parent is not None
        if block.parent.parent is None:
            # Of the roots that ``root`` has made for this tree, the first one stays.
            block.parent = self._roots.setdefault(block.owner, {}).setdefault(block.form.text, block.parent)
        block.parent.keys.add(block.key)
        block.parent.behind[block.key] = block
        self._by_use[block.name] = block
        self.total_bytes += block.size

    def remove(self, block: Block) -> list[Block]:
        """Remove a block and those behind it, which nothing can reach then. Returns what was there."""
        if block not in self:
            return []
        removed = [block]
        for one in removed:
            removed += one.behind.values()
        for one in reversed(removed):
            assert one.parent is not None
            del self._by_use[one.name]
            self.total_bytes -= one.size
            one.parent.keys.remove(one.key)
            del one.parent.behind[one.key]
        root = block.parent
        assert root is not None
        if root.parent is None and not root.behind:
            del self._roots[root.owner][root.form.text]
            if not self._roots[root.owner]:
                del self._roots[root.owner]
        return removed

    def touch(self, blocks: Sequence[Block]) -> None:
        """Make the blocks of a path the most recently used ones, the first of the path last.

        So a block is never used less recently than those behind it, and the oldest block has none.
        """
        for block in reversed(blocks):
            if block in self:
                self._by_use.move_to_end(block.name)

    def oldest(self) -> Block | None:
        """The least recently used block."""
        return next(iter(self._by_use.values()), None)

    def best(self, owner: str, key: bytes) -> Path | None:
        """The blocks that cover most leading tokens of ``key``; None when they cover none.

        A whole form covers the longest common prefix. Any other covers the tokens up to the end of a last block, which
        has the states of the other layers.
        """
        found = [_best(root, key) for root in self._roots.get(owner, {}).values()]
        best = max((path for path in found if path is not None), key=lambda path: path.n_tokens, default=None)
        return best if best is not None and best.n_tokens else None

    def full(self, owner: str, form: Form, key: bytes) -> list[Block]:
        """The root of a tree, and the full blocks that hold the first tokens of ``key``, in order."""
        root = self.root(owner, form)
        return [root, *_full(root, key)]

    def holds_last(self, parent: Block, key: bytes) -> bool:
        """Whether the blocks behind ``parent`` make a last block with these tokens needless."""
        if not parent.form.whole:
            return key in parent.behind
        return not key or parent.keys.extension(key) is not None

    def needless(self, block: Block) -> list[Block]:
        """The last blocks that this one makes needless."""
        if not block.form.whole or block.parent is None:
            return []
        found = [block.parent.behind[key] for key in block.parent.keys.prefixes(block.key)]
        return [other for other in found if not other.is_full and other is not block]


def _full(root: Block, key: bytes) -> list[Block]:
    blocks: list[Block] = []
    block = root
    for start in range(0, len(key) - BLOCK_KEY_BYTES + 1, BLOCK_KEY_BYTES):
        found = block.behind.get(key[start : start + BLOCK_KEY_BYTES])
        if found is None:
            break
        blocks.append(found)
        block = found
    return blocks


def _best(root: Block, key: bytes) -> Path | None:
    blocks = _full(root, key)
    if root.form.whole:
        return _with_part(root, blocks, key)
    for n in range(len(blocks), -1, -1):
        block = blocks[n - 1] if n else root
        rest = key[n * BLOCK_KEY_BYTES : (n + 1) * BLOCK_KEY_BYTES]
        for last in block.keys.prefixes(rest):
            if len(last) < BLOCK_KEY_BYTES:
                found = block.behind[last]
                return Path((*blocks[:n], found), found.end)
    return None


def _with_part(root: Block, blocks: list[Block], key: bytes) -> Path:
    """The path of full blocks, and the block behind them that has most of the next tokens."""
    block = blocks[-1] if blocks else root
    n = len(blocks) * BLOCK_KEY_BYTES
    rest = key[n : n + BLOCK_KEY_BYTES]
    # Of blocks with the same part, the shorter one is read.
    near = block.keys.neighbours(rest)
    nearest = max(near, key=lambda key: (common_tokens(key, rest), -len(key)), default=b"")
    shared = common_tokens(nearest, rest)
    if not shared:
        return Path(tuple(blocks), block.end)
    return Path((*blocks, block.behind[nearest]), block.end + shared)
