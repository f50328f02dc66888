"""A radix tree of token sequences: which of them begin alike, and how far. Knows no caches and no MLX.

    root --[system prompt]-- node --[question, answer]-- node      an edge holds all tokens up to the next place where
                               `----[another question]-- node      two sequences part, or where one ends

A sequence is compared with the others once, along one path from the root. What it has in common with each of them then
follows from the nodes of that path, in steps that do not depend on the number of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]


class HasReach(Protocol):
    """A sequence whose beginnings others can use."""

    def reach(self, n_tokens: int) -> int:
        """How many of its first ``n_tokens`` can be used."""


Member = TypeVar("Member", bound=HasReach)
# The nodes of a sequence's path, the deepest first, each with the number of tokens in common.
Path: TypeAlias = "Iterable[tuple[Node[Member], int]]"


def as_ids(tokens: Iterable[int]) -> Ids:
    """Token ids as an array that ``common`` compares."""
    # numpy's own conversion of a tuple takes twice as long.
    return np.array(array("q", tokens), np.int64)


def common(a: Ids, b: Ids) -> int:
    """How many leading tokens are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class Node(Generic[Member]):
    """The end of an edge, ``end`` tokens from the root. ``key`` is its place among the children of ``parent``.

    ``members``: all members that have the tokens up to here, the last added one last. ``n_places``: how many sequences
    hold this node.
    """

    __slots__ = ("children", "edge", "end", "key", "members", "n_places", "parent")

    def __init__(self, parent: Node[Member] | None, key: int | str, edge: Ids) -> None:
        self.parent = parent
        self.key = key
        self.edge = edge
        self.end: int = len(edge) + (parent.end if parent is not None else 0)
        self.children: dict[int | str, Node[Member]] = {}
        self.members: dict[Member, None] = {}
        self.n_places = 0
        if parent is not None:
            parent.children[key] = self

    def path(self) -> Iterator[tuple[Node[Member], int]]:
        """This node and those above it, with their tokens."""
        node: Node[Member] | None = self
        while node is not None:
            yield node, node.end
            node = node.parent

    def common(self, other: Node[Member]) -> int:
        """How many tokens this node's sequence and another one have in common; 0 in another scope."""
        a, b = self, other
        while a is not b:
            # Of two nodes at the same depth either may be left first: they are not on one path.
            lower, upper = (a, b) if a.end >= b.end and a.parent is not None else (b, a)
            assert lower.parent is not None
            a, b = lower.parent, upper
        return a.end

    def add(self, member: Member) -> None:
        """A member ends here."""
        for node, _ in self.path():
            node.members[member] = None

    def remove(self, member: Member) -> None:
        """Undo ``add``."""
        for node, _ in self.path():
            del node.members[member]

    def split(self, n: int) -> Node[Member]:
        """Cut the edge to this node behind ``n`` of its tokens. Returns the new node at the cut."""
        assert self.parent is not None
        upper: Node[Member] = Node(self.parent, self.key, self.edge[:n])
        upper.members = dict(self.members)
        self._move(upper, self.edge[n:])
        return upper

    def take_out(self) -> None:
        """Remove this node from the tree. A single child takes its place."""
        assert self.parent is not None
        del self.parent.children[self.key]
        for child in self.children.values():
            child._move(self.parent, np.concatenate([self.edge, child.edge]))

    def _move(self, parent: Node[Member], edge: Ids) -> None:
        self.parent, self.key, self.edge = parent, int(edge[0]), edge
        parent.children[self.key] = self


class PrefixTree(Generic[Member]):
    """Sequences that have a place, some of them as members: those whose beginnings others can use.

    Each scope has a tree of its own, which hangs on one root.
    """

    def __init__(self) -> None:
        self._root: Node[Member] = Node(None, "", as_ids(()))

    def walk(self, ids: Ids, scope: str) -> list[tuple[Node[Member], int]]:
        """The path of a sequence that needs no place. The edge to the first node may be shared in part."""
        path = [(self._root, 0)]
        child = self._root.children.get(scope)
        while child is not None:
            start = path[-1][1]
            n = start + common(child.edge, ids[start:])
            path.append((child, n))
            child = child.children.get(int(ids[n])) if n == child.end < len(ids) else None
        return path[::-1]

    def place(self, ids: Ids, scope: str) -> Node[Member]:
        """Give a sequence its place. ``leave`` gives it back."""
        (node, n), *_ = self.walk(ids, scope)
        if node is self._root:
            node = Node(node, scope, ids[:0])
        if n < node.end:
            node = node.split(n - node.end + len(node.edge))
        if n < len(ids):
            node = Node(node, int(ids[n]), ids[n:])
        node.n_places += 1
        return node

    def leave(self, node: Node[Member]) -> None:
        """Give back a place. Nodes that nobody needs any more are removed."""
        node.n_places -= 1
        # A scope's own node, which has no tokens, may have a single child.
        while node.parent is not None and not node.n_places and len(node.children) <= (node.end > 0):
            node.take_out()
            node = node.parent


def best_member(path: Path[Member], most: int) -> tuple[Member, int] | None:
    """The member that gives most leading tokens, at most ``most``, and how many. Of equals, the last added one."""
    best, best_n = None, 0
    for node, n in path:
        n_wanted = min(n, most)
        for member in reversed(node.members):
            # Members of nodes further up have fewer tokens in common.
            if best_n >= n_wanted:
                break
            if (given := member.reach(n_wanted)) > best_n:
                best, best_n = member, given
        if best is not None and best_n >= n_wanted:
            break
    return (best, best_n) if best is not None else None


def shared_tokens(path: Path[Member]) -> int:
    """The longest common prefix with any member."""
    return next((n for node, n in path if node.members), 0)


def members_in_common(path: Path[Member]) -> dict[Member, int]:
    """The members with any tokens in common, and how many, most first."""
    found: dict[Member, int] = {}
    for node, n in path:
        for member in node.members if n else ():
            found.setdefault(member, n)
    return found
