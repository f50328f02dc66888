"""The directory of cache files: blocks, limit, order, failures, crashes, two servers. Without MLX."""

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
from mlx_serve.engine.cache.store import CacheStore
from mlx_serve.engine.cache.writer import CacheWriter
from mlx_serve.values import StartError
from tests.pure.cachekit import LONG_S, STATEFUL, WHOLE, Disk, check, save_of, size_of, small_blocks

SIZE = size_of(2)


@pytest.fixture(autouse=True)
def blocks_of_two_tokens(monkeypatch):
    small_blocks(monkeypatch)


@pytest.fixture
def open_disk(tmp_path):
    opened = []

    def open_one(max_bytes=100 * SIZE, directory=tmp_path / "c", **kwargs):
        opened.append(Disk(directory, max_bytes, **kwargs))
        return opened[-1]

    yield open_one
    for disk in opened:
        disk.close()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "c"


def files(directory, suffix=".kv"):
    return sorted(path for path in directory.iterdir() if path.suffix == suffix)


def file_of(directory, disk, tokens):
    """The file of a prompt's last block."""
    return directory / f"{disk.store.find('m', cache_file.to_key(tokens)).blocks[-1].name}.kv"


@pytest.mark.parametrize("form", [WHOLE, STATEFUL])
def test_what_was_saved_is_there_after_a_restart(open_disk, directory, form):
    disk = open_disk()
    assert disk.save([1, 2, 3, 4, 5], form)
    assert disk.load([1, 2, 3, 4, 5, 6]) == 5
    disk.close()
    again = open_disk()
    assert again.load([1, 2, 3, 4, 5, 6]) == 5
    assert again.load([1, 2, 3, 9]) == (3 if form is WHOLE else 0)
    assert again.load([2]) == 0
    assert again.load([1, 2, 3, 4, 5], owner="another") == 0
    assert again.counts("files", "bytes") == [3, sum(path.stat().st_size for path in files(directory))]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_only_what_is_new_is_written(open_disk, directory):
    disk = open_disk()
    disk.save(list(range(4)))
    before = {path: path.stat().st_ino for path in files(directory)}
    disk.save(list(range(8)))
    assert disk.counts("written", "bytes_written") == [4, 4 * SIZE]
    disk.save(list(range(6)))
    disk.save([0, 1, 2, 3, 9, 9])
    assert disk.counts("written") == 5
    assert all(path.stat().st_ino == inode for path, inode in before.items())
    assert disk.load([0, 1, 2, 3, 4, 5, 6, 7]) == 8
    assert disk.load([0, 1, 2, 3, 9, 9]) == 6


def test_a_last_block_gives_way_to_a_longer_one(open_disk):
    disk = open_disk()
    disk.save([1, 2, 3])
    disk.save([1, 2, 3, 4, 5])
    assert disk.counts("files", "written", "evicted") == [3, 4, 0]
    # Where the last block has states, it serves other prompts than a longer one.
    disk.save([1, 2, 3], STATEFUL)
    disk.save([1, 2, 3, 4, 5], STATEFUL)
    assert disk.counts("files") == 7
    assert disk.load([1, 2, 3, 7]) == 3


def test_states_at_several_positions_share_the_blocks_before_them(open_disk):
    disk = open_disk()
    tokens = list(range(1, 10))
    for n in (3, 4, 7, 9):
        disk.save(tokens[:n], STATEFUL)
    # Four full blocks, and one file for each position.
    assert disk.counts("written") == 8
    assert [disk.load([*tokens[:n], 99]) for n in range(1, 10)] == [0, 0, 3, 4, 4, 4, 7, 7, 9]


def test_the_limit_is_kept_and_the_path_used_longest_ago_goes_first(open_disk, directory):
    disk = open_disk(6 * SIZE)
    for n in (1, 2, 3):
        disk.save([n] * 4)
    assert disk.load([1] * 4) == 4
    disk.save([4] * 2)
    assert [disk.covers([n] * 4) for n in (1, 2, 3, 4)] == [4, 2, 4, 2]
    disk.save([5] * 4)
    assert [disk.covers([n] * 4) for n in (1, 2, 3, 4, 5)] == [4, 0, 2, 2, 4]
    assert sum(path.stat().st_size for path in files(directory)) == disk.counts("bytes") == 6 * SIZE
    assert disk.counts("evicted") == 3


def test_a_save_that_files_cover_counts_as_a_use(open_disk):
    disk = open_disk(2 * SIZE)
    for tokens in ([1, 1], [2, 2], [1, 1], [3, 3]):
        disk.save(tokens)
    assert [disk.covers([n, n]) for n in (1, 2, 3)] == [2, 0, 2]


def test_what_is_continued_does_not_make_room_for_it(open_disk):
    disk = open_disk(4 * SIZE)
    disk.save([1] * 4)
    disk.save([2] * 4)
    disk.save([1] * 8)
    assert [disk.load([n] * 8) for n in (1, 2)] == [8, 0]


def test_the_order_of_use_survives_a_restart(open_disk, directory):
    disk = open_disk()
    for n in (1, 2, 3):
        disk.save([n] * 4)
    disk.close()
    for path in files(directory):
        os.utime(path, (1, 1))
    disk = open_disk()
    assert disk.load([2] * 4) == 4
    disk.close()
    disk = open_disk(2 * SIZE)
    assert disk.covers([2] * 4) == 4
    assert disk.counts("files") == len(files(directory)) == 2


def test_a_path_that_was_being_written_keeps_its_beginning(open_disk, directory):
    disk = open_disk()
    disk.save([1] * 6)
    disk.save([2] * 2)
    blocks = disk.store.find("m", cache_file.to_key([1] * 6)).blocks
    disk.close()
    # As after a crash in the middle: the last block is the newest file, its path was not yet touched.
    for n, block in enumerate(blocks):
        os.utime(directory / f"{block.name}.kv", (n + 1, n + 1))
    os.utime(directory / f"{blocks[-1].name}.kv", (2**40, 2**40))
    disk = open_disk(3 * SIZE)
    assert disk.load([1] * 6) == 6


def test_a_cache_larger_than_the_limit_is_not_kept(open_disk):
    disk = open_disk(2 * SIZE)
    disk.save([1, 1])
    assert not disk.save([2] * 8)
    assert disk.counts("skipped_large") == 1
    assert disk.load([1, 1]) == 2


def test_a_path_that_does_not_fit_is_written_as_far_as_it_fits(open_disk):
    disk = open_disk(2 * SIZE + 100)
    disk.save(list(range(5)))
    assert disk.counts("files") <= 2
    assert disk.load(list(range(5))) in (0, 2, 4)


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


def test_a_full_disk_is_said_once_a_spell_and_leaves_nothing_behind(open_disk, directory, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mlx_serve")
    disk = open_disk()
    disk.save([1, 1])
    for spell in range(2):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(cache_file, "create", FullFile)
            for n in (2, 3, 4):
                assert disk.save([n, spell, n, spell])
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "No space left" in caplog.text
        assert files(directory, ".tmp") == []
        assert disk.writer.pending_bytes == 0
        assert disk.save([5, spell])
        assert caplog.records[-1].levelname == "INFO"
    assert disk.counts("failed", "files") == [6, 3]
    assert disk.load([1, 1]) == 2
    assert disk.load([2, 0]) == 0


def test_a_directory_that_became_read_only_fails_nothing(open_disk, directory, monkeypatch, caplog):
    disk = open_disk(2 * SIZE)
    disk.save([1] * 4)

    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "create", fail)
        patch.setattr(Path, "unlink", fail)
        patch.setattr(os, "utime", fail)
        assert disk.load([1] * 4) == 4
        disk.save([2, 2])
    assert "Read-only" in caplog.text
    assert len(files(directory)) == 2
    disk.save([3, 3])
    assert disk.load([3, 3]) == 2


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_late_leaves_nothing_either(open_disk, directory, monkeypatch, call):
    disk = open_disk()

    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    disk.save([1] * 4)
    assert files(directory) == files(directory, ".tmp") == []
    monkeypatch.undo()
    assert disk.save([1] * 4)
    assert disk.load([1] * 4) in (2, 4)


class CrashError(BaseException):
    pass


@pytest.mark.parametrize("step", range(1, 40))
def test_a_crash_at_any_step_leaves_a_directory_that_gives_right_caches(open_disk, directory, monkeypatch, step):
    disk = open_disk(6 * SIZE)
    disk.save([1, 2, 3, 4, 5])
    disk.save([8] * 4)
    disk.close()
    left = [step]

    def dying(call):
        def one(*args, **kwargs):
            left[0] -= 1
            if left[0] <= 0:
                # Nothing after this happens: as if the process were gone.
                raise CrashError
            return call(*args, **kwargs)

        return one

    store = CacheStore(directory, 6 * SIZE)
    with monkeypatch.context() as patch:
        for place, name in ((os, "fsync"), (os, "utime"), (Path, "replace"), (Path, "unlink"), (cache_file, "create")):
            patch.setattr(place, name, dying(getattr(place, name)))
        patch.setattr(
            cache_file, "_pieces", lambda *args, pieces=cache_file._pieces: map(dying(lambda x: x), pieces(*args))
        )
        try:
            write_all(store, save_of([1, 2, 3, 4, 6, 7, 8, 9]))
            is_dead = False
        except CrashError:
            is_dead = True
    assert is_dead == (left[0] <= 0)
    store.close()
    disk = open_disk(6 * SIZE)
    assert files(directory, ".tmp") == []
    assert disk.counts("damaged") == 0
    assert disk.counts("bytes") == sum(path.stat().st_size for path in files(directory)) <= 6 * SIZE
    got = disk.load([1, 2, 3, 4, 6, 7, 8, 9])
    assert got == 8 if not is_dead else got >= 4
    disk.save([1, 2, 3, 4, 6, 7, 8, 9])
    assert disk.load([1, 2, 3, 4, 6, 7, 8, 9]) == 8


def write_all(store, save):
    """Write a save on this thread."""
    writer = object.__new__(CacheWriter)
    writer._store, writer._abandoned = store, False
    writer._write(save)


def test_a_damaged_file_is_dropped_when_it_is_read_and_what_came_before_it_is_used(open_disk, directory, caplog):
    disk = open_disk()
    disk.save([1, 2, 3, 4, 5, 6])
    path = file_of(directory, disk, [1, 2, 3, 4])
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    assert disk.load([1, 2, 3, 4, 5, 6]) == 2
    assert path.name in caplog.text
    assert disk.counts("damaged", "files", "loaded") == [1, 1, 0]
    assert len(files(directory)) == 1
    assert disk.save([1, 2, 3, 4, 5, 6])
    assert disk.load([1, 2, 3, 4, 5, 6]) == 6


def test_a_file_that_somebody_removed_is_forgotten(open_disk, directory):
    disk = open_disk()
    disk.save([1, 1])
    files(directory)[0].unlink()
    assert disk.load([1, 1]) == 0
    assert disk.counts("files") == 0
    assert disk.save([1, 1])
    assert disk.load([1, 1]) == 2


@pytest.mark.parametrize(("number", "kept"), [(errno.EMFILE, True), (errno.EIO, False)])
def test_a_file_is_not_dropped_for_what_is_not_its_fault(open_disk, directory, monkeypatch, number, kept):
    disk = open_disk()
    disk.save([1, 1])

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "read", fail)
        assert disk.load([1, 1]) == 0
    assert bool(disk.load([1, 1])) == bool(files(directory)) == kept


def test_a_start_drops_what_is_damaged_and_what_a_crash_left_and_nothing_else(open_disk, directory, caplog):
    disk = open_disk()
    for n in (1, 2, 3):
        disk.save([n, n])
    disk.close()
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
    disk = open_disk()
    assert {path.name for path in directory.iterdir()} == strangers | {
        *("lock", good.name),
        *(f"{'3' * 64}.kv", f"{'4' * 64}.kv"),
    }
    assert disk.counts("files", "damaged") == [1, 3]
    assert len([r for r in caplog.records if "dropped" in r.message]) == 3


def test_a_start_removes_what_no_path_leads_to(open_disk, directory):
    disk = open_disk()
    disk.save([1, 2, 3, 4, 5, 6])
    disk.save([7, 8])
    path = file_of(directory, disk, [1, 2, 3, 4])
    disk.close()
    path.unlink()
    disk = open_disk()
    assert (disk.covers([1, 2, 3, 4, 5, 6]), disk.covers([7, 8])) == (2, 2)
    assert disk.counts("files", "damaged") == [len(files(directory)), 0] == [2, 0]


def test_a_file_that_claims_another_owner_than_the_block_before_it_is_not_used(open_disk, directory):
    disk = open_disk()
    disk.save([1, 2])
    parent = disk.store.find("m", cache_file.to_key([1, 2])).blocks[0]
    disk.close()
    key = cache_file.to_key([3, 4])
    save = save_of([3, 4])
    header = cache_file.Header("thief", WHOLE, parent.name, key, [])
    path = directory / f"{cache_file.name(parent.name, key)}.kv"
    assert cache_file.write(path, cache_file.head(header), [save.growing[0].tobytes()], lambda: True)
    disk = open_disk()
    assert (disk.covers([1, 2, 3, 4]), disk.covers([1, 2, 3, 4], owner="thief")) == (2, 0)


def test_a_file_put_in_another_one_s_place_is_not_taken_for_it(open_disk, directory):
    disk = open_disk()
    disk.save([1, 2])
    disk.save([3, 4])
    file_of(directory, disk, [1, 2]).write_bytes(file_of(directory, disk, [3, 4]).read_bytes())
    assert [disk.load([1, 2]), disk.load([3, 4])] == [0, 2]
    assert disk.counts("damaged") == 1


def test_a_file_that_cannot_be_opened_is_passed_over(open_disk, directory, monkeypatch):
    disk = open_disk()
    disk.save([1, 1])
    disk.close()

    def fail(*_):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(cache_file, "read_header", fail)
    disk = open_disk()
    assert disk.counts("files") == 0
    assert len(files(directory)) == 1


def test_a_directory_that_others_write_in_is_warned_of(open_disk, directory, caplog):
    open_disk().close()
    assert caplog.records == []
    directory.chmod(0o770)
    open_disk()
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


def test_two_servers_do_not_share_a_directory_and_a_killed_one_gives_it_back(open_disk, directory):
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, directory], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout.readline() == b"open\n"
            with pytest.raises(StartError, match="in use by another server"):
                open_disk()
            assert len(files(directory, ".tmp")) == 1
        finally:
            other.kill()
    disk = open_disk()
    assert files(directory, ".tmp") == []
    with pytest.raises(StartError, match="in use"):
        open_disk()
    assert disk.save([1, 1])


def test_a_link_in_the_place_of_a_file_is_neither_read_nor_written(open_disk, directory, tmp_path):
    disk = open_disk()
    assert disk.save([1, 1])
    (file,) = files(directory)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    before = elsewhere.stat().st_mtime_ns
    assert disk.load([1, 1]) == 0
    assert (disk.counts("damaged"), file.is_symlink()) == (1, False)
    assert elsewhere.stat().st_mtime_ns == before
    stranger = tmp_path / "stranger"
    stranger.write_bytes(b"theirs")
    file.with_suffix(".tmp").symlink_to(stranger)
    disk.save([1, 1])
    assert stranger.read_bytes() == b"theirs"
    assert disk.save([1, 1])
    assert disk.load([1, 1]) == 2


def test_a_link_in_the_place_of_the_lock_is_refused(directory, tmp_path):
    directory.mkdir()
    (directory / "lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(StartError, match="cannot use the prompt cache directory"):
        CacheStore(directory, 100)
    assert not (tmp_path / "theirs").exists()


class Slow:
    """Calls wait for ``gate``; ``reached`` tells that one does."""

    def __init__(self, call):
        self.gate, self.reached = Event(), Event()
        self._call = call

    def __call__(self, *args):
        self.reached.set()
        assert self.gate.wait(LONG_S)
        return self._call(*args)


@pytest.fixture
def slow_writes(monkeypatch):
    slow = Slow(cache_file.create)
    monkeypatch.setattr(cache_file, "create", slow)
    yield slow
    slow.gate.set()


@pytest.fixture
def slow_reads(monkeypatch):
    slow = Slow(cache_file.read)
    monkeypatch.setattr(cache_file, "read", slow)
    yield slow
    slow.gate.set()


def test_beyond_its_bytes_nothing_waits_for_the_disk(open_disk, slow_writes):
    n_bytes = save_of([1, 1]).n_bytes
    disk = open_disk(max_pending_bytes=2 * n_bytes)
    assert disk.save([1, 1], flush=False)
    assert slow_writes.reached.wait(LONG_S)
    assert disk.save([2, 2], flush=False)
    assert not disk.save([3, 3], flush=False)
    assert disk.writer.pending_bytes == 2 * n_bytes
    slow_writes.gate.set()
    assert disk.writer.flush(LONG_S)
    # What is larger than the limit is written when nothing else waits: while it is kept, it takes no memory.
    assert disk.save([4] * 6)
    assert disk.counts("skipped_busy", "skipped_large", "written") == [1, 0, 5]
    assert (disk.writer.pending_bytes, disk.writer.unkept_bytes("m")) == (0, 0)


def test_what_only_a_save_holds_counts_whole_and_is_given_up_when_it_is_too_much(open_disk, slow_writes):
    disk = open_disk(max_pending_bytes=2 * save_of([1] * 4).n_bytes)
    saves = [save_of([n] * 4) for n in range(3)]
    for save in saves:
        # A few new tokens of a long conversation.
        save.n_bytes //= 4
        assert disk.writer.put(save)
    assert slow_writes.reached.wait(LONG_S)
    assert disk.writer.unkept_bytes("m") == 0
    for save in saves[:2]:
        disk.writer.release(save)
    assert disk.writer.unkept_bytes("m") == saves[0].held_bytes
    disk.writer.release(saves[2])
    assert disk.writer.unkept_bytes("m") == 2 * saves[0].held_bytes
    slow_writes.gate.set()
    assert disk.writer.flush(LONG_S)
    assert [disk.covers([n] * 4) for n in range(3)] == [4, 0, 4]
    assert (disk.writer.unkept_bytes("m"), disk.counts("skipped_busy")) == (0, 1)


def test_closing_waits_for_what_is_queued_and_takes_nothing_more(open_disk, directory, slow_writes):
    disk = open_disk()
    for n in (1, 2):
        disk.save([n, n], flush=False)
    slow_writes.gate.set()
    disk.close()
    disk.close()
    assert len(files(directory)) == 2
    assert not disk.save([3, 3], flush=False)


def test_closing_does_not_wait_for_ever(open_disk, directory, slow_writes, caplog):
    disk = open_disk()
    for n in (1, 2):
        disk.save([n, n], flush=False)
    assert slow_writes.reached.wait(LONG_S)
    disk.close(0)
    assert "were not written" in caplog.text
    # The disk hangs: the directory stays locked until the writer is gone, and then nothing is half there.
    with pytest.raises(StartError, match="in use"):
        open_disk()
    slow_writes.gate.set()
    disk.close()
    assert files(directory) == files(directory, ".tmp") == []
    open_disk()


def test_a_reader_that_hangs_holds_up_neither_writing_nor_the_end(open_disk, slow_reads):
    disk = open_disk()
    disk.save([1, 1])
    read = disk.read([1, 1])
    assert slow_reads.reached.wait(LONG_S)
    assert disk.save([2, 2])
    disk.close(0)
    assert read.state == "dropped"
    with pytest.raises(StartError, match="in use"):
        open_disk()
    slow_reads.gate.set()
    disk.close()
    open_disk()


def test_from_a_disk_that_has_not_answered_nothing_more_is_read(open_disk, slow_reads):
    disk = open_disk()
    disk.save([1, 1])
    first = disk.read([1, 1])
    assert slow_reads.reached.wait(LONG_S)
    assert disk.reader.is_worth(1, 1.0)
    disk.reader.drop(first)
    assert not disk.reader.is_worth(1, 1.0)
    second = disk.read([1, 1])
    disk.reader.drop(second)
    slow_reads.gate.set()
    assert disk.load([1, 1]) == 2
    assert (first.n_tokens, second.n_tokens) == (0, 0)


def test_what_the_disk_takes_longer_for_is_not_worth_reading_until_it_is_forgiven(open_disk):
    now = [0.0]
    disk = open_disk(clock=lambda: now[0])
    assert disk.reader.is_worth(10**12, 0.001)
    disk.save([1] * 4)
    clock, disk.reader._clock = disk.reader._clock, lambda: now.__setitem__(0, now[0] + 1) or now[0]
    assert disk.load([1] * 4) == 4
    disk.reader._clock = clock
    # A file a second.
    assert disk.reader.is_worth(SIZE, 1.1)
    n_refused = 0
    while not disk.reader.is_worth(2 * SIZE, 1.1):
        n_refused += 1
    assert 5 <= n_refused <= 9


def test_reading_and_writing_at_the_same_time(open_disk, directory):
    disk = open_disk(9 * SIZE)
    for n in range(60):
        disk.writer.put(save_of([n % 9, 1, n, n, n]))
        for before in range(max(n - 5, 0), n):
            tokens = [before % 9, 1, before, before, before]
            read = disk.read(tokens)
            if read is not None:
                disk.reader.wait(read, LONG_S)
                check(read, tokens)
    assert disk.writer.flush(LONG_S)
    assert disk.counts("damaged", "failed") == [0, 0]
    assert disk.counts("bytes") == sum(path.stat().st_size for path in files(directory)) <= 9 * SIZE


def test_an_error_that_nobody_expects_loses_one_file_and_not_the_thread(open_disk, monkeypatch, caplog):
    disk = open_disk()

    def fail(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "write", fail)
        disk.save([1, 1])
    disk.save([2, 2])
    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "read", fail)
        assert disk.load([2, 2]) == 0
    assert caplog.text.count("ZeroDivisionError") >= 2
    assert (disk.load([1, 1]), disk.load([2, 2])) == (0, 2)
