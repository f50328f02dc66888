"""A backend over a disk: tokens after a restart, jobs that wait for files, and jobs that do not wait for them."""

from dataclasses import replace
from threading import Event

import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.backend import NO_GAP, StepPlan
from mlx_serve.engine.cache import file
from mlx_serve.engine.cache.disk import DiskCache
from mlx_serve.engine.cache.kinds import Quantization, always_trims
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from tests.engine.test_prefixes import Seen, job
from tests.engine.tinymodel import loaded, one_by_one, tiny_gemma, tiny_lfm2, tiny_llama

LONG_S = 60
ALONE = "one by one"
PROMPT = [(7 * i + i // 50) % 250 for i in range(600)]


@pytest.fixture
def start(tmp_path):
    """A server's backend on the one directory, after the one before has ended."""
    disks = []

    def one(model=None, *, single=None, clock=lambda: 0.0):
        for disk in disks:
            disk.close(LONG_S)
        disks.append(DiskCache(tmp_path / "c", 10**9, clock=clock))
        model = model or tiny_llama()
        trimmable = always_trims(make_prompt_cache(model))
        prefixes = PrefixCache(10, None, tier=disks[-1].tier("m"))
        whole = replace(loaded(model), trimmable=trimmable, prefix_cache=prefixes)
        if isinstance(single, Quantization):
            whole = replace(whole, quantization=single)
        backend = one_by_one(whole) if single == ALONE else BatchBackend(whole, BatchOptions())
        seen = Seen(backend)
        seen.disk = disks[-1]
        return seen

    yield one
    for disk in disks:
        disk.close(LONG_S)


@pytest.fixture
def hanging(monkeypatch):
    """Reads wait for ``gate``."""

    class Hanging:
        gate, reached = Event(), Event()

    read = file.read

    def wait(*args):
        Hanging.reached.set()
        assert Hanging.gate.wait(LONG_S)
        return read(*args)

    monkeypatch.setattr(file, "read", wait)
    yield Hanging
    Hanging.gate.set()


def tokens_of(seen, *jobs):
    """The tokens of jobs that run together."""
    for one in jobs:
        seen.backend.insert(one)
    return finish(seen, *jobs)


def finish(seen, *jobs, timeout_s=LONG_S):
    while any(len(seen.tokens.get(one, [])) < one.sampling.max_tokens for one in jobs):
        seen.backend.wait_for_disk(timeout_s)
        seen.step(StepPlan(200))
    return [seen.tokens[one] for one in jobs]


KINDS = {
    "plain": (tiny_llama, None, 599),
    "windows": (tiny_gemma, None, None),
    "mixed": (tiny_lfm2, None, None),
    "one by one": (tiny_llama, ALONE, 599),
    "in 8 bits": (
        lambda: tiny_llama(head_dim=32),
        Quantization(8, 32, 0),
        599,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_the_tokens_are_the_same(start, kind):
    make, single, n_again = KINDS[kind]
    model = make()
    first = start(model, single=single)
    a_job = job(PROMPT)
    (answer,) = tokens_of(first, a_job)
    turn = [*PROMPT, *answer, 5, 6, 7]
    (want,) = tokens_of(first, job(turn))
    after = start(model, single=single)
    next_turn, again = job(turn), job(PROMPT)
    assert tokens_of(after, next_turn) == [want]
    assert after.cached[next_turn] >= len(PROMPT) + len(answer) - 1
    again_after = start(model, single=single)
    assert tokens_of(again_after, again) == [answer]
    if n_again is not None:
        assert again_after.cached[again] == n_again


def test_while_one_job_waits_for_the_disk_the_others_go_on(start, hanging):
    model = tiny_llama()
    (answer,) = tokens_of(start(model), job(PROMPT))
    seen = start(model)
    waiting, other, late = job(PROMPT), job([1, 2, 3]), job([4, 5])
    seen.backend.insert(waiting)
    assert len(tokens_of(seen, other)[0]) == 6
    assert hanging.reached.wait(LONG_S)
    assert len(tokens_of(seen, late)[0]) == 6
    assert waiting not in seen.cached
    # With nothing else to do, a step waits a moment for the disk instead of running in circles.
    waited = []
    seen.backend.wait_for_disk = waited.append
    seen.backend.step(NO_GAP)
    seen.backend.step(0.2)
    assert len(waited) == 1
    del seen.backend.wait_for_disk
    hanging.gate.set()
    assert finish(seen, waiting) == [answer]
    assert seen.cached[waiting] == 599


@pytest.mark.parametrize("single", [None, ALONE])
def test_a_job_goes_on_without_a_disk_that_hangs(start, hanging, single):
    model, now = tiny_llama(), [0.0]
    (answer,) = tokens_of(start(model, single=single), job(PROMPT))
    seen = start(model, single=single, clock=lambda: now[0])
    waiting = job(PROMPT)
    seen.backend.insert(waiting)
    for _ in range(3):
        seen.step(StepPlan(200))
    assert waiting not in seen.cached
    assert hanging.reached.wait(LONG_S)
    # At a thousand tokens a second, computing would be done.
    now[0] = 0.7
    assert finish(seen, waiting, timeout_s=0) == [answer]
    assert seen.cached[waiting] == 0
    # And the next one does not wait at all.
    again = job([*PROMPT[:300], 9])
    seen.backend.shrink_cache(0)
    seen.backend.insert(again)
    assert finish(seen, again)
    assert seen.disk.counts()["given_up"] == 1


@pytest.mark.parametrize("single", [None, ALONE])
def test_a_job_that_is_cancelled_while_it_waits_leaves_nothing(start, hanging, single):
    model = tiny_llama()
    tokens_of(start(model, single=single), job(PROMPT))
    seen = start(model, single=single)
    waiting = job(PROMPT)
    seen.backend.insert(waiting)
    while not hanging.reached.is_set():
        seen.step(StepPlan(200))
        hanging.reached.wait(0.01)
    seen.backend.remove([waiting])
    hanging.gate.set()
    assert len(tokens_of(seen, job([1, 2]))[0]) == 6
    assert seen.disk.counts()["loaded"] == 0


def test_what_waits_to_be_written_counts_as_kept(start, monkeypatch):
    gate, create = Event(), file.create
    monkeypatch.setattr(file, "create", lambda path: gate.wait(LONG_S) and create(path))
    seen = start()
    tokens_of(seen, job(PROMPT))
    n_bytes = seen.backend.cache_bytes
    for _ in range(2):
        seen.backend.shrink_cache(n_bytes // 2)
        assert (seen.backend.n_cached, seen.backend.cache_bytes > 0) == (0, True)
    gate.set()
    assert seen.disk.flush(LONG_S)
    assert seen.backend.cache_bytes == 0


def test_prompts_that_share_files_read_them_once(start):
    model = tiny_llama()
    (answer,) = tokens_of(start(model), job(PROMPT))
    seen = start(model)
    jobs = [job(PROMPT) for _ in range(4)]
    assert tokens_of(seen, *jobs) == [answer] * 4
    assert [seen.cached[one] for one in jobs] == [599] * 4
    assert seen.disk.counts()["loaded"] == 1


def test_a_job_that_memory_serves_reads_nothing(start):
    model = tiny_llama()
    tokens_of(start(model), job(PROMPT))
    seen = start(model)
    for n in range(2):
        one = job([*PROMPT[:550], n])
        tokens_of(seen, one)
        assert seen.cached[one] == 550
    assert seen.disk.counts()["loaded"] == 1
