"""Finding cache files by tokens: the same as looking at each."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.engine.cache.file import to_key
from mlx_serve.engine.cache.index import CacheIndex, Entry, SortedKeys, common_tokens

# Few values and short lists, so that prefixes are shared.
prompts = st.lists(st.sampled_from([0, 1, 255, 256]), max_size=6).map(to_key)


def entry(key, *, trimmable=True, identity="m", size=10):
    key = to_key(key) if isinstance(key, list) else key
    return Entry(identity, key, trimmable, Path(f"{identity}-{key.hex()}"), size)


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


@given(st.dictionaries(prompts, st.booleans()), prompts, st.booleans())
def test_the_best_file_is_the_one_that_gives_most(files, key, trimmable):
    index = CacheIndex()
    for k, can_trim in files.items():
        index.add(entry(k, trimmable=can_trim))

    def gives(k):
        return common_tokens(k, key) if key.startswith(k) or (trimmable and files[k]) else 0

    want = max(map(gives, files), default=0)
    found = index.best("m", key, trimmable=trimmable)
    assert (found[1] if found else 0) == want
    assert found is None or gives(found[0].key) == want
    assert index.best("other", key, trimmable=trimmable) is None


@given(st.dictionaries(prompts, st.booleans()), prompts, st.booleans())
def test_what_covers_and_what_is_covered(files, key, trimmable):
    index = CacheIndex()
    others = [entry(k, trimmable=can_trim) for k, can_trim in files.items()]
    for one in others:
        index.add(one)
    new = entry(key, trimmable=trimmable)
    assert (index.covering(new) is not None) == any(one.covers(new) for one in others)
    covered = {one.key for one in index.covered(new)}
    assert covered == {one.key for one in others if new.covers(one) and one.key != key}


@given(st.lists(st.tuples(prompts, st.sampled_from("ab"), st.booleans())))
def test_bytes_and_files_add_up(steps):
    index, model = CacheIndex(), {}
    for n, (key, identity, add) in enumerate(steps, 1):
        one = entry(key, identity=identity, size=n)
        if add:
            index.add(one)
            model[key, identity] = one
        elif (known := model.pop((key, identity), None)) is not None:
            index.remove(known)
        assert index.total_bytes == sum(e.size for e in model.values())
        assert len(index) == len(model)
    for one in list(model.values()):
        index.remove(one)
        index.remove(one)
    assert (index.total_bytes, len(index), index.oldest()) == (0, 0, None)


def test_the_oldest_is_the_one_used_longest_ago():
    index = CacheIndex()
    a, b, c = entry([1]), entry([2]), entry([3])
    for one in (a, b, c):
        index.add(one)
    index.touch(a)
    assert index.oldest() is b
    index.remove(b)
    assert index.oldest() is c


def test_of_two_files_that_give_the_same_the_smaller_is_read():
    index = CacheIndex()
    index.add(entry([5, 1], size=30))
    index.add(entry([5, 9], size=20))
    assert index.best("m", to_key([5, 4]), trimmable=True)[0].size == 20


@pytest.mark.parametrize("trimmable", [True, False])
def test_nothing_in_common_is_nothing_found(trimmable):
    index = CacheIndex()
    index.add(entry([1, 2]))
    assert index.best("m", to_key([3]), trimmable=trimmable) is None
