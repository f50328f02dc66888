"""What the process holds by the system's count, the marks for it, and what happens above them."""

import ctypes
import logging
import os
import subprocess
import sys
from threading import Thread

import pytest

from mlx_serve.engine.footprint import darwin_footprint, footprint_bytes, linux_footprint
from mlx_serve.engine.memory import Marks, MemoryBudget, MemoryState, MemoryUse
from mlx_serve.engine.schedule import scheduler as scheduling
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.testing import FakeBackend, FakeModels
from tests.pure.test_scheduler import events_of, job, run, tokens_of
from tests.waiting import DEADLINE_S, until

MB = 2**20
MARKS = Marks(850, 950)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# The system's count


@linux
def test_the_footprint_follows_what_the_process_holds():
    before = footprint_bytes()
    held = bytearray(b"x") * (64 * MB)
    assert 60 * MB < footprint_bytes() - before < 80 * MB
    del held
    assert footprint_bytes() - before < 20 * MB


# Pieces that are too small for mappings of their own, with something behind them that stays.
FREEING = """
from mlx_serve.engine.footprint import footprint_bytes, return_freed
before = footprint_bytes()
pieces = [bytes(8000) for _ in range(8000)]
stays = bytes(8000)
held = footprint_bytes() - before
pieces.clear()
return_freed()
print(held, footprint_bytes() - before)
"""


@linux
def test_freed_memory_that_the_library_keeps_is_returned():
    # A process of its own: in this one other tests have left free memory behind.
    done = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, text=True, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 50 * MB
    assert left < held // 4


def test_mapped_files_do_not_count_on_linux():
    page = os.sysconf("SC_PAGE_SIZE")
    assert linux_footprint("9000 500 120 1 0 300 0\n") == 380 * page


class FakeLibrary:
    """macOS's library: at byte 72 of the record is the footprint."""

    def __init__(self, result):
        self.result = result

    def proc_pid_rusage(self, pid, flavor, record):
        assert (pid, flavor) == (os.getpid(), 0)
        address = ctypes.cast(record, ctypes.c_void_p).value
        ctypes.c_uint64.from_address(address + 72).value = 12345
        return self.result


def test_macos_tells_the_footprint():
    assert darwin_footprint(FakeLibrary(0)) == 12345
    assert darwin_footprint(FakeLibrary(-1)) == 0


# The marks


def test_the_marks_divide_what_the_weights_leave():
    budget = MemoryBudget(1000)
    assert budget.marks([]) == Marks(850, 950)
    assert budget.marks([500, 100]) == Marks(940, 980)
    assert MemoryBudget(None, 500).marks([100]) is None
    # A total that the operator did not choose leaves some bytes beside any weights.
    assert MemoryBudget(1000, least_kv_bytes=100).marks([2000]) == Marks(2085, 2095)


def test_what_counts_is_the_larger_of_both_counts():
    assert MemoryUse(active_bytes=5, footprint_bytes=7).held_bytes == 7
    assert MemoryUse(active_bytes=5).held_bytes == 5


def test_a_mark_counts_until_it_is_well_undercut():
    state, found = MemoryState(), []
    for held in (849, 850, 801, 799, 849, 950, 901, 900, 899, 949, 1000, 800, 799):
        state = state.after(MemoryUse(held), MARKS)
        found.append(state.pressure)
    assert found == ["none", "soft", "soft", "none", "none", *["hard"] * 3, "soft", "soft", "hard", "soft", "none"]
    assert state.after(MemoryUse(2000), None).pressure == "none"


@pytest.mark.parametrize("held", [850, 900, 2000])
def test_without_the_excess_no_mark_counts(held):
    state = MemoryState().after(MemoryUse(held), MARKS)
    use = MemoryUse(held - state.excess_bytes)
    assert state.after(use, MARKS).pressure == "none"
    assert state.after(MemoryUse(use.active_bytes + 1), MARKS).pressure != "none"
    assert MemoryState().after(MemoryUse(10), MARKS).excess_bytes == 0


# The scheduler


class Keeping(FakeBackend):
    """Keeps prefixes, whose bytes the test sets."""

    cache_bytes = 0

    def shrink_cache(self, max_bytes, *, pinned=True):
        if pinned:
            self.cache_bytes = min(self.cache_bytes, max_bytes)


class Held(FakeModels):
    """A process that holds ``others`` bytes beside the kept prefixes, and ``freed`` until they are returned."""

    def __init__(self, marks: Marks | None = MARKS):
        self.backend = Keeping()
        super().__init__(lambda _: self.backend)
        self.limit = marks
        self.others = 100
        self.freed = 0
        self.n_releases = 0

    def marks(self, names):
        return self.limit

    def memory(self):
        return MemoryUse(footprint_bytes=self.others + self.freed + self.backend.cache_bytes)

    def release(self):
        self.freed = 0
        self.n_releases += 1


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def scheduler(held):
    made = Scheduler(held, Limits(), Clock())
    made.load("m")
    return made


def pressure(scheduler):
    stats = scheduler.stats()
    return stats.pressure, stats.footprint_bytes


def test_kept_prefixes_are_dropped_until_there_is_some_way_to_the_mark(held, scheduler):
    held.backend.cache_bytes, held.others = 700, 149
    scheduler.step()
    assert (held.backend.cache_bytes, pressure(scheduler)) == (700, ("none", 849))
    held.others += 1
    scheduler.step()
    assert (held.backend.cache_bytes, pressure(scheduler)) == (649, ("none", 799))
    assert (scheduler.stats().soft_mark_bytes, scheduler.stats().hard_mark_bytes) == (850, 950)


def test_freed_memory_is_returned_before_any_prefix_is_dropped(held, scheduler):
    held.backend.cache_bytes, held.freed = 690, 500
    scheduler.step()
    assert (held.backend.cache_bytes, pressure(scheduler)) == (690, ("none", 790))


def test_nothing_starts_beside_what_runs_until_the_memory_is_back(held, scheduler):
    scheduler.submit([job("a" * 20)])
    scheduler.step()
    # What was found behind the last step holds for the next one.
    for others, n_running in ((900, 1), (900, 1), (810, 1), (790, 1), (790, 3)):
        held.others = others
        if n_running == 1 and not scheduler.health().waiting:
            scheduler.step()
            scheduler.submit([job("b" * 20), job("c" * 20)])
        scheduler.step()
        assert scheduler.health().running == n_running


def test_a_job_alone_starts_and_runs_whatever_the_memory(held, scheduler):
    held.others = 2000
    scheduler.step()
    jobs = [job(text) for text in ("ab", "cd", "ef")]
    scheduler.submit(jobs)
    n_running = []
    while scheduler.step():
        n_running.append(scheduler.health().running)
    assert max(n_running) == 1
    assert [len(tokens_of(events_of(one))) for one in jobs] == [3, 3, 3]


def test_above_the_hard_mark_the_youngest_pauses_until_one_is_left(held, scheduler):
    jobs = [job(text * 9) for text in "abc"]
    for one in jobs:
        scheduler.submit([one])
        scheduler.step()
    held.others = 900
    scheduler.step()
    assert scheduler.stats().running == 3
    held.others = 960
    for n_running in (2, 1, 1):
        scheduler.step()
        assert (scheduler.stats().running, scheduler.stats().paused) == (n_running, 3 - n_running)
    held.others = 100
    run(scheduler)
    assert [bytes(tokens_of(events_of(one))[:-1]) for one in jobs] == [text * 9 for text in (b"a", b"b", b"c")]


def test_the_log_says_once_that_nothing_is_left_to_drop(held, scheduler, caplog):
    caplog.set_level(logging.WARNING)
    scheduler.submit([job("abcdef")])
    held.others = 960
    for _ in range(3):
        scheduler.step()
    assert [record.getMessage().count("hard mark") for record in caplog.records] == [1]
    held.others = 100
    scheduler.step()
    held.others = 860
    scheduler.step()
    assert [record.getMessage().count("soft mark") for record in caplog.records] == [0, 1]


def test_memory_goes_back_when_the_engine_has_rested_and_then_not_again(held):
    clock = Clock()
    scheduler = Scheduler(held, Limits(), clock)
    scheduler.load("m")
    for n_releases in (1, 2):
        scheduler.submit([job()])
        run(scheduler)
        scheduler.wait(0)
        assert held.n_releases == n_releases - 1, "the next request may come at once"
        clock.now += 2
        for _ in range(3):
            assert not scheduler.step()
            scheduler.wait(0)
            assert held.n_releases == n_releases


def test_an_idle_engine_wakes_up_to_give_memory_back(held, monkeypatch):
    monkeypatch.setattr(scheduling, "_RELEASE_AFTER_S", 0.01)
    scheduler = Scheduler(held, Limits())
    scheduler.load("m")
    scheduler.submit([job()])

    def live():
        while not scheduler.stopped:
            if not scheduler.step():
                scheduler.wait()

    thread = Thread(target=live)
    thread.start()
    until(lambda: held.n_releases, "the memory to go back")
    scheduler.stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_above_a_mark_freed_memory_is_returned_again_after_a_while(held):
    clock = Clock()
    scheduler = Scheduler(held, Limits(), clock)
    scheduler.load("m")
    held.others = 900
    for _ in range(5):
        scheduler.step()
    assert held.n_releases == 1
    clock.now += 60
    scheduler.step()
    assert held.n_releases == 2


def test_without_a_limit_nothing_is_dropped():
    held = Held(None)
    scheduler = Scheduler(held, Limits(), Clock())
    scheduler.load("m")
    held.backend.cache_bytes = held.others = 10**12
    scheduler.step()
    assert held.backend.cache_bytes == 10**12
    assert scheduler.stats().soft_mark_bytes == 0
