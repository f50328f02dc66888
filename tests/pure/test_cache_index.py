"""Finding blocks by tokens: the same as looking at each."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.engine.cache import index as cache_index
from mlx_serve.engine.cache.file import TOKEN_BYTES, name, to_key
from mlx_serve.engine.cache.form import dumped, parsed
from mlx_serve.engine.cache.index import Block, CacheIndex, SortedKeys, common_tokens

# Few values and short lists, so that prefixes are shared. A full block has two tokens.
prompts = st.lists(st.sampled_from([0, 1, 255, 256]), max_size=7).map(to_key)
BLOCK = 2 * TOKEN_BYTES
GROWS = {"kind": "K", "grows": {"dtype": "uint8", "shape": [1]}, "settings": []}
WHOLE, STATEFUL = parsed(dumped([GROWS])), parsed(dumped([GROWS, {"kind": "L"}]))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cache_index, "BLOCK_KEY_BYTES", BLOCK)


def put(index, key, *, form=WHOLE, owner="m", size=10):
    """Add the blocks of a prompt that are not there, as the writer does. Returns its path."""
    key = to_key(key) if isinstance(key, list) else key
    root, *path = index.full(owner, form, key)
    n = len(path) * BLOCK
    while len(key) - n >= BLOCK:
        path.append(add(index, path[-1] if path else root, key[n : n + BLOCK], size))
        n += BLOCK
    parent = path[-1] if path else root
    if not index.holds_last(parent, key[n:]):
        path.append(add(index, parent, key[n:], size))
    return path


def add(index, parent, key, size):
    end = parent.end + len(key) // TOKEN_BYTES
    block = Block(name(parent.name, key), parent.owner, parent.form, key, parent, size, end)
    for other in index.needless(block):
        assert index.remove(other) == [other]
    index.add(block)
    return block


@given(prompts, prompts)
def test_common_tokens(a, b):
    want = 0
    while (want + 1) * 4 <= min(len(a), len(b)) and a[: (want + 1) * 4] == b[: (want + 1) * 4]:
        want += 1
    assert common_tokens(a, b) == want


@given(st.sets(prompts), prompts)
def test_sorted_keys_find_what_a_search_finds(keys, key):
    ours = SortedKeys()
    for one in keys:
        ours.add(one)
    assert list(ours.prefixes(key)) == sorted((k for k in keys if key.startswith(k)), key=len, reverse=True)
    assert ours.extension(key) == min((k for k in keys if k.startswith(key)), default=None)
    nearest = max((common_tokens(k, key) for k in ours.neighbours(key)), default=0)
    assert nearest == max((common_tokens(k, key) for k in keys), default=0)


def covers(key, held, form):
    """How many tokens of ``key`` a prompt that was put in serves."""
    n = common_tokens(key, held)
    return n if form is WHOLE or n * TOKEN_BYTES == len(held) else 0


@given(st.lists(prompts, max_size=8), prompts, st.sampled_from([WHOLE, STATEFUL]))
def test_the_best_path_is_the_one_that_gives_most(held, key, form):
    index = CacheIndex()
    for one in held:
        put(index, one, form=form)
    want = max((covers(key, one, form) for one in held), default=0)
    found = index.best("m", key)
    assert (found.n_tokens if found else 0) == want
    assert index.best("other", key) is None
    if found is not None:
        assert b"".join(block.key for block in found.blocks).startswith(key[: want * TOKEN_BYTES])
        assert found.blocks[0].parent.parent is None
        for before, after in pairwise(found.blocks):
            assert after.parent is before
            assert before.is_full
        assert found.blocks[-1].start < want <= found.blocks[-1].end or found.blocks[-1].key == b""


@given(st.lists(prompts, max_size=8))
def test_what_prompts_share_is_there_once(held):
    index = CacheIndex()
    for one in held:
        put(index, one)
        n = len(index)
        put(index, one)
        assert len(index) == n
    full = {one[:n] for one in held for n in range(BLOCK, len(one) + 1, BLOCK)}
    last = {one for one in held if len(one) % BLOCK and not any(len(b) > len(one) and b.startswith(one) for b in held)}
    assert len(index) == len(full) + len(last)


@given(st.lists(st.tuples(prompts, st.sampled_from("ab"), st.sampled_from([WHOLE, STATEFUL])), max_size=10), st.data())
def test_bytes_and_files_add_up_and_no_block_outlives_the_one_before_it(steps, data):
    index = CacheIndex()
    there = set()
    for n, (key, owner, form) in enumerate(steps, 1):
        there |= set(put(index, key, owner=owner, form=form, size=n))
        there = {block for block in there if block in index}
        if there and data.draw(st.booleans()):
            block = data.draw(st.sampled_from(sorted(there, key=lambda block: block.name)))
            removed = index.remove(block)
            assert removed[0] is block
            assert set(removed) == {one for one in there if block in one.path()}
            assert index.remove(block) == []
            there -= set(removed)
        assert index.total_bytes == sum(block.size for block in there)
        assert len(index) == len(there)
        assert all(set(block.path()) <= there for block in there)
    while (oldest := index.oldest()) is not None:
        index.remove(oldest)
    assert (index.total_bytes, len(index), index._roots) == (0, 0, {})


def test_the_oldest_block_is_a_last_one_of_the_path_used_longest_ago():
    index = CacheIndex()
    a, b = put(index, [1, 2, 3, 4, 5]), put(index, [1, 2, 7])
    for path in (a, b):
        index.touch(path)
    assert index.oldest() is a[2]
    index.touch(a)
    order = []
    while (oldest := index.oldest()) is not None:
        order.append(oldest)
        index.remove(oldest)
    assert order == [b[1], *reversed(a)]


def test_of_two_blocks_that_give_the_same_the_shorter_one_is_read():
    index = CacheIndex()
    put(index, [5, 9])
    put(index, [5, 3, 1])
    put(index, [6])
    assert index.best("m", to_key([6, 4])).blocks[0].key == to_key([6])
    assert index.best("m", to_key([5, 4])).n_tokens == 1


def test_forms_do_not_mix():
    index = CacheIndex()
    put(index, [1, 2, 3, 4], form=WHOLE)
    put(index, [1, 2, 3], form=STATEFUL)
    assert [block.form for block in index.best("m", to_key([1, 2, 3, 4])).blocks] == [WHOLE] * 2
    assert [block.form for block in index.best("m", to_key([1, 2, 3])).blocks] == [WHOLE] * 2
    index.remove(index.best("m", to_key([1, 2])).blocks[0])
    assert [block.form for block in index.best("m", to_key([1, 2, 3, 4])).blocks] == [STATEFUL] * 2


@pytest.mark.parametrize("form", [WHOLE, STATEFUL])
def test_nothing_in_common_is_nothing_found(form):
    index = CacheIndex()
    put(index, [1, 2], form=form)
    assert index.best("m", to_key([3])) is None
