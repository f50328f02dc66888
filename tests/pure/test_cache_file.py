"""A cache file is read as it was written, or not at all."""

import hashlib
import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_serve.engine.cache import file as cache_file
from mlx_serve.engine.cache.file import (
    DamagedFileError,
    Header,
    head,
    name,
    read,
    read_header,
    root_name,
    to_key,
    write,
)
from mlx_serve.engine.cache.form import dumped, parsed

FORM = parsed(dumped([{"kind": "K", "grows": {"tuple": [{"dtype": "uint8", "shape": [2, 5]}] * 2}, "settings": []}]))
STATES = [{"list": [{"dtype": "float16", "shape": [3, 1]}, {"value": None}]}]
ARRAYS = [b"abcdefghij" * 3, b"klmnopqrst" * 3, b"012345"]
HEADER = Header("a model", FORM, "ab" * 32, to_key([1, 2, 70000]), STATES)


def take_all(path):
    header, data = read(path, lambda: True)
    return header, bytes(data)


WHOLE = (HEADER, b"".join(ARRAYS))


def whole(path, header=HEADER, arrays=ARRAYS):
    assert write(path, head(header), arrays, lambda: True)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.kv"


def test_what_is_read_is_what_was_written(path):
    raw = whole(path)
    assert take_all(path) == WHOLE
    assert read_header(path) == (HEADER, len(raw))
    assert len(raw) == cache_file.file_size(head(HEADER), HEADER.n_bytes)


def test_nobody_else_may_read_it_and_nothing_else_is_left(path):
    whole(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_arrays_larger_than_a_piece_are_written_whole(path, monkeypatch):
    monkeypatch.setattr(cache_file, "_PIECE_BYTES", 7)
    whole(path)
    assert take_all(path) == WHOLE


def test_a_file_cut_short_anywhere_is_damaged(path):
    raw = whole(path)
    for end in range(len(raw)):
        path.write_bytes(raw[:end])
        with pytest.raises(DamagedFileError):
            take_all(path)
        with pytest.raises(DamagedFileError):
            read_header(path)


def test_a_file_with_more_behind_it_is_damaged(path):
    path.write_bytes(whole(path) + b"x")
    with pytest.raises(DamagedFileError):
        read_header(path)


def test_any_byte_that_has_changed_is_seen(path):
    raw = whole(path)
    n_head = len(head(HEADER))
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with pytest.raises(DamagedFileError):
            take_all(path)
        if at < n_head:
            with pytest.raises(DamagedFileError):
                read_header(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "x.kv"
    return path, whole(path)


@given(st.data())
def test_no_mixture_of_changes_passes(written, data):
    path, raw = written
    changed = bytearray(raw)
    for at, value in data.draw(st.dictionaries(st.integers(0, len(raw) - 1), st.integers(0, 255))).items():
        changed[at] = value
    changed = changed[: data.draw(st.integers(0, len(raw)))] + data.draw(st.binary(max_size=40))
    path.write_bytes(changed)
    if changed == raw:
        assert take_all(path) == WHOLE
    else:
        with pytest.raises(DamagedFileError):
            take_all(path)


@given(st.binary(max_size=300))
def test_other_files_are_damaged_ones(written, raw):
    path, _ = written
    path.write_bytes(raw)
    with pytest.raises(DamagedFileError):
        read_header(path)


def test_no_memory_is_taken_for_a_length_that_the_file_does_not_have(path, monkeypatch):
    asked = []
    exactly = cache_file._exactly
    monkeypatch.setattr(cache_file, "_exactly", lambda file, n: asked.append(n) or exactly(file, n))
    for field in (slice(8, 12), slice(12, 16), slice(16, 24)):
        raw = bytearray(whole(path))
        raw[field] = b"\xff" * (field.stop - field.start)
        path.write_bytes(raw)
        with pytest.raises(DamagedFileError):
            take_all(path)
    assert max(asked) <= cache_file._SIZES.size


@pytest.mark.parametrize("arrays", [ARRAYS[:2], [*ARRAYS, b"x"]])
def test_arrays_that_are_not_as_long_as_the_header_says(path, arrays):
    whole(path, arrays=arrays)
    with pytest.raises(DamagedFileError):
        read_header(path)


def test_a_reader_that_is_stopped_gives_nothing(path, monkeypatch):
    monkeypatch.setattr(cache_file, "_PIECE_BYTES", 7)
    whole(path)
    answers = iter([True, True, False])
    assert read(path, lambda: next(answers)) is None


def layer(**fields):
    return [{"kind": "K", "grows": {"dtype": "uint8", "shape": [1]}, "settings": []} | fields]


SENSE = {"owner": "a", "parent": "b", "states": [], "form": layer()}


@pytest.mark.parametrize(
    "about",
    [
        "",
        [],
        {},
        SENSE | {"states": 3},
        SENSE | {"states": [7]},
        SENSE | {"states": [{"dtype": "object", "shape": [1]}]},
        SENSE | {"states": [{"dtype": "uint8", "shape": [-1, -4]}]},
        SENSE | {"states": [{"dtype": "uint8", "shape": "x"}]},
        SENSE | {"states": [{"dtype": "uint8", "shape": [2**70]}]},
        SENSE | {"states": [{"dtype": "uint8", "shape": [True]}]},
        SENSE | {"form": None},
        SENSE | {"form": [None]},
        SENSE | {"form": layer(grows={"dtype": "uint8", "shape": []})},
        SENSE | {"form": layer(grows={"dtype": "uint9", "shape": [1]})},
        SENSE | {"form": layer(grows={"dtype": "uint8", "shape": [1.0]})},
        SENSE | {"form": layer(caches=5)},
    ],
)
def test_a_header_that_is_sealed_but_makes_no_sense(path, about):
    assert write(path, sealed(json.dumps(about).encode()), [], lambda: True)
    with pytest.raises(DamagedFileError):
        read_header(path)


@pytest.mark.parametrize("text", [b"", b"[" * 10**5, b'{"owner":"a"', b"\xff"])
def test_a_header_that_is_sealed_but_is_no_json(path, text):
    assert write(path, sealed(text), [], lambda: True)
    with pytest.raises(DamagedFileError):
        read_header(path)


def sealed(text, key=b"", n_bytes=0):
    start = cache_file._SIZES.pack(cache_file._MAGIC, len(text), len(key), n_bytes) + text + key
    return start + hashlib.sha256(start).digest()


def test_a_sealed_header_makes_sense(path):
    assert write(path, sealed(json.dumps(SENSE).encode(), to_key([1, 2]), 2), [b"ab"], lambda: True)
    assert read_header(path)[0].owner == "a"


@pytest.mark.parametrize("key", [b"abc", b"abcd" * (cache_file.BLOCK_TOKENS + 1)])
def test_the_tokens_of_a_block_have_a_right_number(path, key):
    assert write(path, sealed(json.dumps(SENSE).encode(), key), [], lambda: True)
    with pytest.raises(DamagedFileError, match="number of tokens"):
        read_header(path)


def test_a_name_says_which_tokens_and_whose():
    roots = {root_name(owner, form) for owner in ("a", "a b", "b") for form in ("[]", "[1]")}
    assert len(roots) == 6
    assert len({name(root, to_key(tokens)) for root in roots for tokens in ([1], [1, 2], [2])}) == 18


def test_a_header_over_the_limit_is_not_written():
    with pytest.raises(ValueError, match="header"):
        head(Header("a" * cache_file._MAX_HEADER_BYTES, FORM, "", b"", []))


def test_a_write_that_is_stopped_leaves_nothing(path):
    answers = iter([True, True, False])
    assert not write(path, head(HEADER), ARRAYS, lambda: next(answers))
    assert os.listdir(path.parent) == []


def test_a_write_that_fails_leaves_what_was_there(path):
    raw = whole(path)

    def arrays():
        yield b"abc"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        write(path, head(HEADER), arrays(), lambda: True)
    assert os.listdir(path.parent) == [path.name]
    assert path.read_bytes() == raw


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_are_32_bits(token):
    with pytest.raises(OverflowError):
        to_key([token])


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**32 - 1)))
def test_keys_sort_and_begin_as_the_tokens_do(a, b):
    assert (to_key(a) < to_key(b)) == (a < b)
    assert to_key(b).startswith(to_key(a)) == (b[: len(a)] == a)
