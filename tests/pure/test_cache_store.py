"""The directory of cache files: budget, order, failures, crashes, two servers. Without MLX."""

import errno
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from mlx_serve.engine.cache import file as cache_file
from mlx_serve.engine.cache.file import Header, file_size, head, to_key
from mlx_serve.engine.cache.store import CacheStore
from mlx_serve.values import StartError

N = 1000
LONG_S = 60


def make(tokens, data=b"x" * N, *, trimmable=True, identity="m"):
    key = to_key(tokens)
    start = head(Header(identity, key, trimmable, [], len(data)))
    return key, start, data, trimmable, identity


def entry_of(store, made):
    key, start, data, trimmable, identity = made
    return store.entry(identity, key, trimmable=trimmable, size=file_size(start, len(data)))


def save(store, tokens, *args, flush=True, **kwargs):
    """As a tier does it; whether it was taken."""
    made = make(tokens, *args, **kwargs)
    entry = entry_of(store, made)
    if store.covers(entry) or not store.admit(entry):
        return False
    store.put(entry, made[1], [made[2]])
    assert not flush or store.flush(LONG_S)
    return True


def load(store, tokens, *, trimmable=True, identity="m"):
    found = store.find(identity, to_key(tokens), trimmable=trimmable)
    return found and store.read(found[0], lambda header, take: bytes(take(header.n_bytes)))


SIZE = file_size(make([1, 2])[1], N)


@pytest.fixture
def open_store(tmp_path):
    opened = []

    def open_one(max_bytes=100 * SIZE, directory=tmp_path / "c", **kwargs):
        opened.append(CacheStore(directory, max_bytes, **kwargs))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close(LONG_S)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "c"


def files(directory, suffix=".kv"):
    return sorted(path for path in directory.iterdir() if path.suffix == suffix)


def test_what_was_saved_is_there_after_a_restart(open_store, directory):
    store = open_store()
    assert save(store, [1, 2], b"abc")
    assert load(store, [1, 2]) == b"abc"
    store.close()
    again = open_store()
    assert load(again, [1, 2, 3]) == b"abc"
    assert load(again, [2]) is None
    assert load(again, [1, 2], identity="another") is None
    assert again.counts()["files"] == 1
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_file_that_covers_it_makes_a_save_needless(open_store, directory):
    store = open_store()
    assert save(store, [1, 2, 3])
    assert not save(store, [1, 2, 3])
    assert not save(store, [1, 2])
    assert save(store, [1, 2], trimmable=False)
    assert save(store, [1, 2], identity="another")
    assert len(files(directory)) == 3


def test_what_a_longer_one_makes_useless_is_removed(open_store, directory):
    store = open_store()
    save(store, [1, 2], b"short", trimmable=False)
    for tokens in ([3, 4], [3, 4, 5], [3, 4, 5, 6]):
        save(store, tokens)
    assert len(files(directory)) == 2
    assert store.counts()["files"] == 2
    assert store.counts()["evicted"] == 0
    assert load(store, [1, 2], trimmable=False) == b"short"


def test_the_budget_is_kept_and_the_least_used_goes_first(open_store, directory):
    store = open_store(3 * SIZE)
    for n in (1, 2, 3):
        save(store, [n, n], bytes([n]) * N)
    assert load(store, [1, 1])
    save(store, [4, 4])
    assert [bool(load(store, [n, n])) for n in (1, 2, 3, 4)] == [True, False, True, True]
    assert sum(path.stat().st_size for path in files(directory)) == store.counts()["bytes"] == 3 * SIZE
    assert store.counts()["evicted"] == 1


def test_a_save_that_a_file_covers_counts_as_a_use(open_store):
    store = open_store(2 * SIZE)
    save(store, [1, 1])
    save(store, [2, 2])
    assert not save(store, [1, 1])
    save(store, [3, 3])
    assert load(store, [1, 1])
    assert not load(store, [2, 2])


def test_the_order_of_use_survives_a_restart(open_store, directory):
    store = open_store()
    for n in (1, 2, 3):
        save(store, [n, n])
    store.close()
    for path in files(directory):
        os.utime(path, (1, 1))
    store = open_store()
    assert load(store, [2, 2])
    store.close()
    store = open_store(SIZE)
    assert load(store, [2, 2])
    assert store.counts()["files"] == len(files(directory)) == 1


def test_the_file_about_to_be_replaced_makes_room_before_others_do(open_store):
    store = open_store(2 * SIZE + 20)
    save(store, [1, 1])
    save(store, [2, 2])
    save(store, [2, 2, 3])
    assert load(store, [1, 1])
    assert load(store, [2, 2, 3])
    assert store.counts()["evicted"] == 0


def test_a_cache_larger_than_the_budget_is_not_kept(open_store, directory):
    store = open_store(2 * SIZE)
    save(store, [1, 1])
    assert not save(store, [2], b"x" * 2 * SIZE)
    assert store.counts()["skipped_large"] == 1
    assert load(store, [1, 1])


class FullFile:
    """A file on a disk that has room for a few bytes."""

    def __init__(self, path):
        self._file = path.open("wb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data):
        self._file.write(data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said_once_a_spell_and_leaves_nothing_behind(open_store, directory, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mlx_serve")
    store = open_store()
    save(store, [1, 1], b"before")
    for spell in range(2):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(cache_file, "create", FullFile)
            for n in (2, 3, 4):
                assert save(store, [n, spell])
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "No space left" in caplog.text
        assert files(directory, ".tmp") == []
        assert store.counts()["pending_bytes"] == 0
        assert save(store, [5, spell])
        assert caplog.records[-1].levelname == "INFO"
    counts = store.counts()
    assert (counts["failed"], counts["files"]) == (6, 3)
    assert load(store, [1, 1]) == b"before"
    assert load(store, [2, 0]) is None


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_late_leaves_nothing_either(open_store, directory, monkeypatch, call):
    store = open_store()

    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    save(store, [1, 1])
    assert files(directory) == files(directory, ".tmp") == []
    monkeypatch.undo()
    assert save(store, [1, 1])
    assert load(store, [1, 1])


def test_a_damaged_file_is_dropped_when_it_is_read(open_store, directory, caplog):
    store = open_store()
    save(store, [1, 1])
    (path,) = files(directory)
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    assert load(store, [1, 1]) is None
    assert path.name in caplog.text
    assert store.counts()["damaged"] == 1
    assert (files(directory), store.counts()["bytes"]) == ([], 0)
    assert save(store, [1, 1])
    assert load(store, [1, 1])


@pytest.mark.parametrize("read", [True, False])
def test_a_file_that_somebody_removed_is_forgotten(open_store, directory, read):
    store = open_store()
    save(store, [1, 1])
    files(directory)[0].unlink()
    if read:
        assert load(store, [1, 1]) is None
        assert store.counts()["files"] == 0
    assert save(store, [1, 1])
    assert load(store, [1, 1])


@pytest.mark.parametrize(("number", "kept"), [(errno.EMFILE, True), (errno.EIO, False)])
def test_a_file_is_not_dropped_for_what_is_not_its_fault(open_store, directory, monkeypatch, number, kept):
    store = open_store()
    save(store, [1, 1])

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache_file, "read", fail)
    assert load(store, [1, 1]) is None
    monkeypatch.undo()
    assert bool(load(store, [1, 1])) == bool(files(directory)) == kept


def test_a_start_drops_what_is_damaged_and_what_a_crash_left_and_nothing_else(open_store, directory, caplog):
    store = open_store()
    for n in (1, 2, 3):
        save(store, [n, n])
    store.close()
    good, cut, moved = files(directory)
    cut.write_bytes(cut.read_bytes()[:-1])
    moved.rename(directory / f"{'0' * 64}.kv")
    (directory / f"{'1' * 64}.kv").write_bytes(b"")
    (directory / f"{'2' * 64}.tmp").write_bytes(b"half a file")
    strangers = {"notes.kv", "notes.tmp", "README"}
    for name in strangers:
        (directory / name).write_bytes(b"not ours")
    (directory / f"{'3' * 64}.kv").mkdir()
    (directory / f"{'4' * 64}.kv").symlink_to(directory / "README")
    store = open_store()
    assert {path.name for path in directory.iterdir()} == strangers | {
        *("lock", good.name),
        *(f"{'3' * 64}.kv", f"{'4' * 64}.kv"),
    }
    assert (store.counts()["files"], store.counts()["damaged"]) == (1, 3)
    assert len([r for r in caplog.records if "dropped" in r.message]) == 3


def test_a_file_that_cannot_be_opened_is_passed_over(open_store, directory, monkeypatch):
    store = open_store()
    save(store, [1, 1])
    store.close()

    def fail(*_):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(cache_file, "read_header", fail)
    store = open_store()
    assert store.counts()["files"] == 0
    assert len(files(directory)) == 1


def test_a_directory_that_others_write_in_is_warned_of(open_store, directory, caplog):
    open_store().close()
    assert caplog.records == []
    directory.chmod(0o770)
    open_store()
    assert "other users may write" in caplog.text


def test_a_directory_that_cannot_be_used_is_a_start_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StartError, match="cannot use the prompt cache directory"):
            CacheStore(path, 1)

    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "scandir", fail)
    for _ in range(2):
        with pytest.raises(StartError, match="Read-only"):
            CacheStore(tmp_path / "c", 1)


HOLD = """
import os, sys
from pathlib import Path
from mlx_serve.engine.cache.store import CacheStore
store = CacheStore(Path(sys.argv[1]), 10**6)
(Path(sys.argv[1]) / ("f" * 64 + ".tmp")).write_bytes(b"half")
print("open", flush=True)
sys.stdin.read()
"""


def test_two_servers_do_not_share_a_directory_and_a_killed_one_gives_it_back(open_store, directory):
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, directory], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout.readline() == b"open\n"
            with pytest.raises(StartError, match="in use by another server"):
                open_store()
            assert len(files(directory, ".tmp")) == 1
        finally:
            other.kill()
    store = open_store()
    assert files(directory, ".tmp") == []
    with pytest.raises(StartError, match="in use"):
        open_store()
    assert save(store, [1, 1])


def test_a_link_in_the_place_of_a_file_is_neither_read_nor_written(open_store, directory, tmp_path):
    store = open_store()
    assert save(store, [1, 1], b"ours")
    (file,) = files(directory)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    before = elsewhere.stat().st_mtime_ns
    assert load(store, [1, 1]) is None
    assert (store.counts()["damaged"], file.is_symlink()) == (1, False)
    assert elsewhere.stat().st_mtime_ns == before
    stranger = tmp_path / "stranger"
    stranger.write_bytes(b"theirs")
    file.with_suffix(".tmp").symlink_to(stranger)
    save(store, [1, 1], b"ours")
    assert stranger.read_bytes() == b"theirs"
    assert save(store, [1, 1], b"ours")
    assert load(store, [1, 1]) == b"ours"


def test_a_link_in_the_place_of_the_lock_is_refused(directory, tmp_path):
    directory.mkdir()
    (directory / "lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(StartError, match="cannot use the prompt cache directory"):
        CacheStore(directory, 100)
    assert not (tmp_path / "theirs").exists()


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes wait for ``gate``; ``reached`` tells that one does."""

    class Slow:
        gate, reached = Event(), Event()

    create = cache_file.create

    def wait(path):
        Slow.reached.set()
        assert Slow.gate.wait(LONG_S)
        return create(path)

    monkeypatch.setattr(cache_file, "create", wait)
    yield Slow
    Slow.gate.set()


def test_beyond_its_bytes_nothing_waits_for_the_disk(open_store, slow_disk):
    store = open_store(max_pending_bytes=2 * SIZE)
    assert save(store, [1, 1], flush=False)
    assert slow_disk.reached.wait(LONG_S)
    assert save(store, [2, 2], flush=False)
    assert not save(store, [3, 3], flush=False)
    assert not save(store, [1, 1], flush=False)
    assert not save(store, [2], flush=False)
    assert not save(store, [4, 4], b"x" * 2 * SIZE, flush=False)
    assert store.counts()["pending_bytes"] == 2 * SIZE
    slow_disk.gate.set()
    assert store.flush(LONG_S)
    assert save(store, [3, 3])
    counts = store.counts()
    assert (counts["skipped_busy"], counts["skipped_large"], counts["written"]) == (1, 1, 3)
    assert counts["pending_bytes"] == 0


def test_what_a_longer_one_makes_useless_leaves_the_queue(open_store, slow_disk):
    store = open_store(max_pending_bytes=2 * SIZE + 50)
    save(store, [1, 1], flush=False)
    assert slow_disk.reached.wait(LONG_S)
    for tokens in ([2, 2], [2, 2, 2], [2, 2, 2, 2]):
        assert save(store, tokens, flush=False)
    # One that isn't taken replaces nothing.
    assert not save(store, [2, 2, 2, 2, 2], b"x" * 2 * N, flush=False)
    slow_disk.gate.set()
    assert store.flush(LONG_S)
    assert store.counts()["written"] == 2
    assert store.find("m", to_key([2, 2, 2, 2]), trimmable=False)[1] == 4


def test_closing_waits_for_what_is_queued_and_takes_nothing_more(open_store, directory, slow_disk):
    store = open_store()
    for n in (1, 2):
        save(store, [n, n], flush=False)
    slow_disk.gate.set()
    store.close(LONG_S)
    store.close(LONG_S)
    assert len(files(directory)) == 2
    assert not save(store, [3, 3], flush=False)


def test_closing_does_not_wait_for_ever(open_store, directory, slow_disk, caplog):
    store = open_store()
    for n in (1, 2):
        save(store, [n, n], flush=False)
    assert slow_disk.reached.wait(LONG_S)
    store.close(0)
    assert "were not written" in caplog.text
    # The disk hangs: the directory stays locked until the writer is gone, and then nothing is half there.
    with pytest.raises(StartError, match="in use"):
        open_store()
    slow_disk.gate.set()
    store.close(LONG_S)
    assert files(directory) == files(directory, ".tmp") == []
    open_store()


def test_reading_and_writing_at_the_same_time(open_store, directory):
    store = open_store(5 * SIZE)
    for n in range(100):
        assert save(store, [n, n], bytes([n]) * N, flush=False)
        for before in range(max(n - 8, 0), n):
            assert load(store, [before, before]) in (None, bytes([before]) * N)
    assert store.flush(LONG_S)
    counts = store.counts()
    assert (counts["written"], counts["damaged"], counts["failed"]) == (100, 0, 0)
    assert counts["bytes"] == sum(path.stat().st_size for path in files(directory)) <= 5 * SIZE
