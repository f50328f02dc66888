"""The tree of token sequences against a search through all of them."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.engine.cache.prefix_tree import (
    PrefixTree,
    as_ids,
    best_member,
    common,
    members_in_common,
    shared_tokens,
)

# Few tokens, so that sequences begin alike.
TOKENS = st.lists(st.integers(0, 2), max_size=8)
SCOPES = st.sampled_from(["", "a"])


@dataclass(eq=False)
class Sequence:
    ids: np.ndarray
    scope: str
    in_part: bool | None  # None: not a member
    node: object = None

    def reach(self, n_tokens):
        n = min(n_tokens, len(self.ids))
        return n if self.in_part or n == len(self.ids) else 0

    def gives(self, ids, most):
        return self.reach(min(common(self.ids, ids), most))


def nodes_of(node):
    yield node
    for child in node.children.values():
        yield from nodes_of(child)


def check_nodes(tree, held):
    """Each node is needed: sequences end there, or part there."""
    top = tree._root
    for node in nodes_of(top):
        if node.end:
            assert node.n_places or len(node.children) > 1
            assert node.edge[0] == node.key
            assert node.parent.children[node.key] is node
            assert node.end == node.parent.end + len(node.edge)
    assert sum(node.n_places for node in nodes_of(top)) == len(held)
    assert len(top.children) == len({one.scope for one in held})


def check_prompt(members, ids, scope, path, most):
    mine = [one for one in members if one.scope == scope]
    best = best_member(path, most)
    wanted = max((one.gives(ids, most) for one in mine), default=0)
    assert (best[1] if best else 0) == wanted
    if best and wanted:
        assert best[0] in mine
        assert best[0].gives(ids, most) == wanted
    assert shared_tokens(path) == max((common(one.ids, ids) for one in mine), default=0)
    in_common = members_in_common(path)
    assert in_common == {one: n for one in mine if (n := common(one.ids, ids))}
    assert list(in_common.values()) == sorted(in_common.values(), reverse=True)


@given(
    st.lists(st.tuples(TOKENS, SCOPES, st.sampled_from([True, False, None])), max_size=12),
    st.lists(st.integers(0, 30), max_size=8),
    TOKENS,
    SCOPES,
)
def test_the_tree_finds_what_a_search_through_all_finds(given_sequences, gone, prompt, scope):
    tree, held = PrefixTree(), []
    ids = as_ids(prompt)
    for tokens, own_scope, in_part in given_sequences:
        one = Sequence(as_ids(tokens), own_scope, in_part)
        one.node = tree.place(one.ids, own_scope)
        if in_part is not None:
            one.node.add(one)
        held.append(one)
    for number in gone:
        if number < len(held):
            one = held.pop(number)
            if one.in_part is not None:
                one.node.remove(one)
            tree.leave(one.node)
    check_nodes(tree, held)
    members = [one for one in held if one.in_part is not None]
    check_prompt(members, ids, scope, tree.walk(ids, scope), max(0, len(ids) - 1))
    place = tree.place(ids, scope)
    check_prompt(members, ids, scope, list(place.path()), max(0, len(ids) - 1))
    for one in held:
        assert one.node.common(place) == (common(one.ids, ids) if one.scope == scope else 0)
    tree.leave(place)
    check_nodes(tree, held)


def test_of_equals_the_last_added_is_taken():
    tree = PrefixTree()
    first, second = (Sequence(as_ids([1, 2, n]), "", True) for n in (3, 4))
    for one in (first, second):
        one.node = tree.place(one.ids, "")
        one.node.add(one)
    assert best_member(tree.walk(as_ids([1, 2]), ""), 9) == (second, 2)
    first.node.remove(first)
    first.node.add(first)
    assert best_member(tree.walk(as_ids([1, 2]), ""), 9) == (first, 2)
