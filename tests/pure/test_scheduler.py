"""The scheduler on the fake backend, stepped by hand, and under the worker thread."""

import threading
import time
from queue import SimpleQueue
from typing import ClassVar

import pytest

from mlx_serve.engine.backend import is_last
from mlx_serve.engine.memory import MemoryUse
from mlx_serve.engine.schedule.scheduler import Health, Limits, Scheduler
from mlx_serve.engine.schedule.worker import Worker
from mlx_serve.testing import EOS, FakeBackend, FakeModels
from mlx_serve.values import ApiError, Failed, Inputs, Job, Prompt, Sampling, Started, TokenEvent

DEADLINE_S = 20


def job(text="ab", *, model="m", max_tokens=100, index=0, events=None, **sampling):
    queue = events if events is not None else SimpleQueue()
    return Job(model, Prompt(tuple(text.encode())), Sampling(max_tokens, **sampling), index, queue)


def events_of(a_job):
    out = []
    while not a_job.events.empty():
        out.append(a_job.events.get())
    return out


def tokens_of(events):
    return [event.token for event in events if isinstance(event, TokenEvent)]


def run(scheduler):
    while scheduler.step():
        pass


class Failing(FakeBackend):
    """Fails on cue: in insert for a prompt that says so, in a step while ``bad`` is set."""

    bad = False

    def insert(self, a_job):
        if bytes(a_job.prompt.tokens) == b"refuse":
            raise ApiError(400, "no")
        if bytes(a_job.prompt.tokens) == b"crash":
            raise RuntimeError("insert")
        return super().insert(a_job)

    def step(self, gap_s):
        if self.bad:
            raise RuntimeError("step")
        return super().step(gap_s)


def make(capacity=4, max_queue=8, backend=FakeBackend, max_loaded=1, kv_limit=None, clock=time.monotonic, limits=None):
    """A scheduler, and the list of the backends that it opens. A token takes one byte of KV cache."""
    opened = []

    def make_backend(name):
        if name == "broken":
            raise ApiError(500, "cannot load", type="server_error")
        opened.append((name, backend(capacity=capacity, token_bytes=1)))
        return opened[-1][1]

    models = FakeModels(make_backend, max_loaded=max_loaded, kv_limit=kv_limit)
    return Scheduler(models, Limits(max_queue=max_queue, **(limits or {})), clock), opened


def test_a_job_starts_gives_its_tokens_and_ends():
    scheduler, _ = make()
    a = job("ab")
    scheduler.submit([a])
    run(scheduler)
    assert events_of(a) == [Started(0, 0), TokenEvent(0, 97), TokenEvent(0, 98), TokenEvent(0, EOS, "stop")]


def test_max_tokens_ends_a_job():
    scheduler, _ = make()
    a = job("abc", max_tokens=2)
    scheduler.submit([a])
    run(scheduler)
    assert events_of(a)[-1] == TokenEvent(0, 98, "length")


def test_jobs_join_and_leave_at_any_step():
    scheduler, _ = make()
    scheduler.load("m")
    a, b = job("aaaa"), job("bb")
    scheduler.submit([a])
    scheduler.step()
    scheduler.submit([b])
    scheduler.step()
    assert (tokens_of(events_of(a)), tokens_of(events_of(b))) == ([97, 97], [98])
    run(scheduler)
    assert tokens_of(events_of(b)) == [98, EOS]


def test_no_more_run_than_the_backend_takes_and_the_first_come_first():
    scheduler, _ = make(capacity=2)
    scheduler.load("m")
    jobs = [job("abcd"[: i + 1]) for i in range(4)]
    scheduler.submit(jobs)
    scheduler.step()
    assert (scheduler.health().running, scheduler.health().waiting) == (2, 2)
    assert [bool(events_of(j)) for j in jobs] == [True, True, False, False]
    run(scheduler)
    assert tokens_of(events_of(jobs[3])) == [*b"abcd", EOS]


def test_the_queue_is_bounded_and_says_when_to_come_back():
    scheduler, _ = make(max_queue=2)
    scheduler.submit([job(), job()])
    with pytest.raises(ApiError, match="--max-queue") as caught:
        scheduler.submit([job()])
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert dict(caught.value.headers)["Retry-After"] == "2"


def test_the_jobs_of_a_request_are_queued_all_or_none():
    scheduler, _ = make(max_queue=3)
    scheduler.submit([job(), job()])
    with pytest.raises(ApiError):
        scheduler.submit([job(), job()])
    assert scheduler.health().waiting == 2


def test_a_request_that_could_never_be_queued_is_not_told_to_come_back():
    scheduler, _ = make(max_queue=2)
    with pytest.raises(ApiError) as caught:
        scheduler.submit([job(), job(), job()])
    assert (caught.value.status, caught.value.param) == (400, "n")


def test_cancelling_frees_a_place_waiting_or_running():
    scheduler, _ = make(capacity=1)
    scheduler.load("m")
    a, b, c = job("aaaa"), job("bbbb"), job("cc")
    scheduler.submit([a, b, c])
    scheduler.step()
    scheduler.cancel([a, b])
    run(scheduler)
    assert tokens_of(events_of(c)) == [99, 99, EOS]
    assert len(events_of(a)) == 2
    assert events_of(b) == []
    scheduler.cancel([a, b, c])  # harmless for those that ended
    assert scheduler.step() is False


def test_another_model_waits_until_the_running_jobs_end():
    scheduler, opened = make()
    a, b, c = job("aa", model="m1"), job("bb", model="m2"), job("cc", model="m1")
    scheduler.submit([a, b, c])
    run(scheduler)
    assert [name for name, _ in opened] == ["m1", "m2", "m1"]
    assert tokens_of(events_of(b)) == [98, 98, EOS]


def worker_of(scheduler, first_model=None):
    worker = Worker(scheduler, first_model, lambda: None)
    worker.start()
    return worker


def wait(a_job):
    """All events up to the last one."""
    out = []
    while not out or not (isinstance(out[-1], Failed) or getattr(out[-1], "finish", None)):
        out.append(a_job.events.get(timeout=DEADLINE_S))
    return out


@pytest.fixture
def failing():
    scheduler, opened = make(backend=Failing)
    worker = worker_of(scheduler, "m")
    worker.ready.result(DEADLINE_S)
    yield scheduler, opened
    worker.stop()
    assert not worker.is_alive()


@pytest.mark.parametrize(("prompt", "status"), [("refuse", 400), ("crash", 500)])
def test_a_job_that_fails_on_its_way_in_fails_alone(failing, prompt, status):
    scheduler, opened = failing
    good, bad, after = job("ab"), job(prompt), job("cd")
    scheduler.submit([good, bad, after])
    assert wait(bad)[-1].error.status == status
    assert tokens_of(wait(good)) == [*b"ab", EOS]
    assert tokens_of(wait(after)) == [*b"cd", EOS]
    assert len(opened) == 1


def test_a_failing_step_fails_its_batch_and_the_next_request_works(failing):
    scheduler, opened = failing
    opened[0][1].bad = True
    a, b = job("ab"), job("cd")
    scheduler.submit([a, b])
    for failed in (a, b):
        error = wait(failed)[-1].error
        assert (error.status, error.type) == (500, "server_error")
        assert "step" not in error.message.split()[:1]
    c = job("ef")
    scheduler.submit([c])
    assert tokens_of(wait(c)) == [*b"ef", EOS]
    assert len(opened) == 2
    assert scheduler.health().status == "ok"


def test_a_model_that_cannot_be_loaded_fails_those_who_wait_for_it_and_no_others(failing):
    scheduler, _ = failing
    a, b, c = job(model="broken"), job(model="broken"), job("ok")
    scheduler.submit([a, b, c])
    assert [wait(j)[-1].error.message for j in (a, b)] == ["cannot load"] * 2
    assert tokens_of(wait(c)) == [*b"ok", EOS]


def test_a_first_model_that_cannot_be_loaded_is_told_to_who_waits():
    scheduler, _ = make()
    worker = worker_of(scheduler, "broken")
    with pytest.raises(ApiError, match="cannot load"):
        worker.ready.result(DEADLINE_S)
    worker.join(DEADLINE_S)
    assert scheduler.health().status == "stopped"


def test_stopping_tells_everyone_and_refuses_the_next():
    hold, started = threading.Event(), SimpleQueue()
    models = FakeModels(
        lambda _: FakeBackend(capacity=1, on_step=lambda jobs: (started.put(jobs), hold.wait(DEADLINE_S)))
    )
    scheduler = Scheduler(models, Limits(max_queue=8))
    worker = worker_of(scheduler)
    running, waiting = job("aaaa"), job("bbbb")
    scheduler.submit([running, waiting])
    assert isinstance(started.get(timeout=DEADLINE_S), list)
    scheduler.stop()
    hold.set()
    worker.join(DEADLINE_S)
    assert wait(running)[-1].error.status == 503
    assert wait(waiting)[-1].error.status == 503
    with pytest.raises(ApiError) as caught:
        scheduler.submit([job()])
    assert caught.value.status == 503


class Panic(BaseException):
    """As what comes out of Rust (pyo3's PanicException)."""


def held(on_step):
    """A worker whose one place runs a job, with another one behind it; what the worker's owner is told."""
    scheduler = Scheduler(FakeModels(lambda _: FakeBackend(capacity=1, on_step=on_step)), Limits(max_queue=8))
    told = threading.Event()
    worker = Worker(scheduler, None, lambda: None, on_fault=told.set)
    running, waiting = job(), job()
    scheduler.submit([running, waiting])
    return scheduler, worker, told, running, waiting


@pytest.mark.parametrize("error", [Panic("index out of bounds"), SystemExit(), KeyboardInterrupt()])
def test_whatever_ends_the_worker_all_jobs_and_its_owner_are_told(error):
    def end(_jobs):
        raise error

    scheduler, worker, told, running, waiting = held(end)
    worker.start()
    assert wait(running)[-1].error.status == 500
    assert wait(waiting)[-1].error.status == 503
    assert told.wait(DEADLINE_S)
    worker.join(DEADLINE_S)
    assert worker.fault is error
    assert scheduler.health().status == "stopped"


def test_a_recovery_that_fails_ends_the_worker_and_nobody_is_left_waiting():
    class Unrecoverable(Failing):
        def shrink_cache(self, max_bytes, *, pinned=True):
            raise MemoryError

    scheduler, opened = make(capacity=1, backend=Unrecoverable)
    worker = worker_of(scheduler, "m")
    worker.ready.result(DEADLINE_S)
    opened[0][1].bad = True
    running, waiting = job(), job()
    scheduler.submit([running, waiting])
    assert wait(running)[-1].error.status == 500
    assert wait(waiting)[-1].error.status == 503
    worker.join(DEADLINE_S)
    assert isinstance(worker.fault, MemoryError)


def test_a_backend_that_cannot_be_closed_does_not_keep_the_models_from_being_released():
    class Unclosable(FakeBackend):
        def close(self):
            raise RuntimeError("close")

    released = threading.Event()
    scheduler, _ = make(backend=Unclosable)
    worker = Worker(scheduler, "m", released.set)
    worker.start()
    worker.ready.result(DEADLINE_S)
    assert worker.stop(DEADLINE_S)
    assert released.is_set()
    assert str(worker.fault) == "close"


def test_steps_that_fail_again_and_again_with_nobody_to_blame_end_the_worker(monkeypatch):
    scheduler, _ = make()
    broken = RuntimeError("no device")

    def fail(_models):
        # Not before the job runs: a worker that ends while it is idle would refuse it.
        if scheduler.health().running:
            raise broken
        return MemoryUse()

    monkeypatch.setattr(FakeModels, "memory", fail)
    worker = worker_of(scheduler)
    a = job("a" * 90)
    scheduler.submit([a])
    assert wait(a)[-1].error.status == 500
    worker.join(DEADLINE_S)
    assert worker.fault is broken


def test_a_load_that_panics_is_told_to_who_waits_for_it():
    def load(_name):
        raise Panic

    worker = Worker(Scheduler(FakeModels(load)), "m", lambda: None)
    worker.start()
    assert isinstance(worker.ready.exception(DEADLINE_S), Panic)
    worker.join(DEADLINE_S)
    assert isinstance(worker.fault, Panic)


@pytest.fixture
def hanging():
    """A worker whose first step does not end before the test does."""
    hold, began = threading.Event(), threading.Event()

    def hang(_jobs):
        began.set()
        hold.wait(DEADLINE_S)

    clock = Clock()
    models = FakeModels(lambda _: FakeBackend(capacity=1, on_step=hang))
    limits = Limits(max_queue=1, queue_timeout_s=5, request_timeout_s=9)
    scheduler = Scheduler(models, limits, clock)
    worker = worker_of(scheduler, "m")
    worker.ready.result(DEADLINE_S)
    running = job("a" * 50)
    scheduler.submit([running])
    assert began.wait(DEADLINE_S)
    yield scheduler, worker, clock, running, hold
    hold.set()
    assert worker.stop(DEADLINE_S)


def test_time_outs_are_told_while_a_step_hangs(hanging):
    scheduler, _, clock, running, _ = hanging
    waiting = job()
    scheduler.submit([waiting])
    clock.now += 6
    assert wait(waiting)[-1].error.code == "queue_timeout"
    clock.now += 6
    assert wait(running)[-1].error.code == "request_timeout"


def test_who_leaves_the_queue_while_a_step_hangs_makes_room_at_once(hanging):
    scheduler, *_ = hanging
    first = job()
    scheduler.submit([first])
    with pytest.raises(ApiError, match="--max-queue"):
        scheduler.submit([job()])
    scheduler.cancel([first])
    scheduler.submit([job()])


def test_stopping_tells_everyone_while_a_step_hangs(hanging):
    scheduler, worker, _, running, _ = hanging
    waiting = job()
    scheduler.submit([waiting])
    assert not worker.stop(timeout_s=0)
    assert [wait(one)[-1].error.status for one in (running, waiting)] == [503, 503]


def test_a_job_that_was_told_is_out_of_its_batch_after_the_step(hanging):
    scheduler, _, clock, running, hold = hanging
    clock.now += 20
    assert wait(running)[-1].error.code == "request_timeout"
    next_one = job()
    scheduler.submit([next_one])
    hold.set()
    assert tokens_of(wait(next_one)) == [*b"ab", EOS]
    assert scheduler.health().running == 0


def test_health_tells_of_a_step_that_hangs_and_the_log_where(hanging, caplog, monkeypatch):
    scheduler, _, clock, running, hold = hanging
    logged = threading.Event()
    monkeypatch.setattr(caplog.handler, "flush", logged.set)
    assert scheduler.health().status == "ok"
    with caplog.at_level("ERROR", "mlx_serve.engine.schedule.watch"):
        clock.now += 130
        wait(running)
        assert logged.wait(DEADLINE_S)
    assert "in hang" in caplog.text
    health = scheduler.health()
    assert (health.status, health.running) == ("stalled", 1)
    assert "a step of m for 130 s" in health.reason
    hold.set()
    next_one = job()
    scheduler.submit([next_one])
    wait(next_one)
    assert scheduler.health().status == "ok"


def test_many_threads_each_get_their_own_tokens_while_others_cancel():
    scheduler, _ = make(capacity=8, max_queue=200)
    worker = worker_of(scheduler)
    results = {}

    def client(i):
        mine = job(f"client {i}" * 5)
        scheduler.submit([mine])
        if i % 3 == 0:
            mine.events.get(timeout=DEADLINE_S)
            scheduler.cancel([mine])
        else:
            results[i] = bytes(tokens_of(wait(mine))[:-1]).decode()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    worker.stop()
    assert results == {i: f"client {i}" * 5 for i in range(64) if i % 3}
    assert (scheduler.health().waiting, scheduler.health().running) == (0, 0)


# Several models


def test_models_with_room_for_both_decode_in_turn():
    scheduler, opened = make(max_loaded=2)
    a, b = job("aaaa", model="m1"), job("bbbb", model="m2")
    scheduler.submit([a])
    while not tokens_of(events_of(a)):
        scheduler.step()
    scheduler.submit([b])
    seen_b = []
    while not seen_b:
        scheduler.step()
        seen_b = tokens_of(events_of(b))
    assert scheduler.health().models == ("m1", "m2")
    assert scheduler.health().running == 2
    run(scheduler)
    assert [name for name, _ in opened] == ["m1", "m2"]
    assert tokens_of(events_of(b)) == [98, 98, 98, EOS]


def test_a_model_loads_while_another_decodes():
    scheduler, _ = make(max_loaded=2)
    scheduler.load("m1")
    a, b = job("a" * 20, model="m1"), job("b", model="m2")
    scheduler.submit([a, b])
    scheduler.step()
    assert scheduler.health().models == ("m1",)
    assert tokens_of(events_of(a)) == [97]
    scheduler.step()
    assert tokens_of(events_of(a)) == [97]
    scheduler.step()
    assert scheduler.health().models == ("m1", "m2")


def test_the_idle_model_used_longest_ago_gives_room():
    scheduler, opened = make(max_loaded=2)
    for model in ("m1", "m2", "m1", "m3"):
        one = job("a", model=model)
        scheduler.submit([one])
        run(scheduler)
        assert tokens_of(events_of(one)) == [97, EOS]
    assert scheduler.health().models == ("m1", "m3")
    assert [name for name, _ in opened] == ["m1", "m2", "m3"]


def test_a_job_for_a_model_without_room_is_not_passed_by_for_ever():
    scheduler, _ = make(max_loaded=1)
    scheduler.load("m1")
    first, other = job("aaaa", model="m1"), job("b", model="m2")
    scheduler.submit([first])
    scheduler.step()
    scheduler.submit([other])
    late = job("c", model="m1")
    scheduler.submit([late])
    while scheduler.health().models != ("m2",):
        assert scheduler.step()
        assert not events_of(late)
    run(scheduler)
    assert tokens_of(events_of(other)) == [98, EOS]
    assert tokens_of(events_of(late)) == [99, EOS]


def test_one_model_s_failing_step_leaves_the_other_one_alone():
    scheduler, opened = make(max_loaded=2, backend=Failing)
    scheduler.load("m1")
    scheduler.load("m2")
    a, b = job("aaa", model="m1"), job("bbb", model="m2")
    scheduler.submit([a, b])
    scheduler.step()
    opened[0][1].bad = True
    with pytest.raises(RuntimeError):
        scheduler.step()
    scheduler.recover(ApiError(500, "failed"))
    run(scheduler)
    assert isinstance(events_of(a)[-1], Failed)
    assert tokens_of(events_of(b)) == [98, 98, 98, EOS]
    again = job("a", model="m1")
    scheduler.submit([again])
    run(scheduler)
    assert tokens_of(events_of(again)) == [97, EOS]


def test_only_the_first_load_is_told_as_loading():
    scheduler, _ = make(max_loaded=2)
    assert scheduler.health().status == "ok"
    scheduler.submit([job("a", model="m1")])
    scheduler.step()
    assert scheduler.health().status == "loading"
    run(scheduler)
    scheduler.submit([job("a", model="m2")])
    scheduler.step()
    assert scheduler.health() == Health("ok", ("m1",), 1, 0)
    run(scheduler)
    assert scheduler.health() == Health("ok", ("m1", "m2"), 0, 0)


def test_a_load_that_fails_half_way_fails_those_who_wait_for_it():
    class HalfWay(FakeModels):
        def open(self, name):
            yield
            raise ApiError(500, "cannot load")

    scheduler = Scheduler(HalfWay())
    jobs = [job("a"), job("b")]
    scheduler.submit(jobs)
    run(scheduler)
    assert [events_of(one)[-1].error.status for one in jobs] == [500, 500]
    assert scheduler.health() == Health("ok", (), 0, 0)


def test_a_model_that_nobody_uses_is_let_go():
    clock = Clock()
    scheduler, _ = make(limits={"model_ttl_s": 60}, clock=clock)
    scheduler.load("m")
    clock.now += 59
    scheduler.step()
    assert scheduler.health().models == ("m",)
    clock.now += 1
    scheduler.step()
    assert scheduler.health().models == ()


# Memory


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(("max_tokens", "given"), [(100, 20), (2**31, 20), (20, 20), (19, 19)])
def test_an_output_limit_is_lowered_to_what_there_is_room_for(is_loaded, max_tokens, given):
    scheduler, _ = make(kv_limit=30)
    if is_loaded:
        scheduler.submit([job("ab", max_tokens=1)])
        run(scheduler)
    a = job("x" * 10, max_tokens=max_tokens)
    scheduler.submit([a])
    run(scheduler)
    assert len(tokens_of(events_of(a))) == 11
    assert a.sampling.max_tokens == given


def test_a_prompt_without_room_for_a_token_is_refused():
    scheduler, _ = make(kv_limit=30)
    a = job("x" * 30, max_tokens=100)
    scheduler.submit([a])
    run(scheduler)
    [failed] = events_of(a)
    assert (failed.error.status, failed.error.code) == (400, "kv_cache_exceeded")
    assert "29 would fit" in failed.error.message


def test_a_job_waits_until_its_kv_cache_fits():
    scheduler, _ = make(kv_limit=30)
    scheduler.load("m")
    a, b, small = job("aaaa", max_tokens=16), job("bbbb", max_tokens=16), job("c", max_tokens=1)
    scheduler.submit([a, b, small])
    scheduler.step()
    # The small one would fit, but a stream of such ones would keep the large one out for ever.
    assert (scheduler.health().running, scheduler.health().waiting) == (1, 2)
    run(scheduler)
    assert [tokens_of(events_of(one))[-1] for one in (a, b)] == [EOS, EOS]


def test_a_job_that_can_never_fit_is_refused_at_once():
    scheduler, _ = make(kv_limit=30)
    scheduler.load("m")
    with pytest.raises(ApiError, match="--kv-cache-bytes") as caught:
        scheduler.submit([job("a" * 31, max_tokens=27)])
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert scheduler.health().waiting == 0


def test_what_can_never_be_embedded_names_its_input():
    scheduler, _ = make(kv_limit=30)
    scheduler.load("m")
    embedding = job("a" * 31, max_tokens=0)
    embedding.inputs = Inputs((embedding.prompt.tokens,))
    with pytest.raises(ApiError, match="longest input has 31 tokens") as caught:
        scheduler.submit([embedding])
    assert (caught.value.status, caught.value.param) == (400, "input")


def test_a_job_that_can_never_fit_fails_when_its_model_is_loaded():
    scheduler, _ = make(kv_limit=30)
    large, other = job("a" * 31, max_tokens=27), job("a", max_tokens=5)
    scheduler.submit([large, other])
    run(scheduler)
    assert events_of(large)[-1].error.status == 400
    assert tokens_of(events_of(other)) == [97, EOS]


class Keeping(FakeBackend):
    """Keeps 10 bytes of each job that has ended."""

    cache_bytes = 0

    def step(self, gap_s):
        events = super().step(gap_s)
        self.cache_bytes += 10 * sum(is_last(event) for _, event in events)
        return events

    def shrink_cache(self, max_bytes, *, pinned=True):
        self.cache_bytes = min(self.cache_bytes, max_bytes)


def test_kept_prefixes_yield_to_jobs_and_are_bounded():
    scheduler, opened = make(kv_limit=30, backend=Keeping)
    scheduler.load("m")
    backend = opened[0][1]
    for _ in range(5):
        one = job("a", max_tokens=9)
        scheduler.submit([one])
        run(scheduler)
        assert backend.cache_bytes <= 30
    assert backend.cache_bytes == 30
    large = job("a", max_tokens=24)
    scheduler.submit([large])
    scheduler.step()
    assert scheduler.health().running == 1
    assert backend.cache_bytes <= 5


class Noting(Keeping):
    """Notes what is kept while a job begins."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept_at_begin = []

    def step(self, gap_s):
        if self._fresh:
            self.kept_at_begin.append(self.cache_bytes)
        return super().step(gap_s)


def test_kept_prefixes_have_yielded_when_a_job_begins():
    scheduler, opened = make(kv_limit=30, backend=Noting)
    scheduler.load("m")
    backend = opened[0][1]
    backend.cache_bytes = 30
    fits, larger = job("a", max_tokens=9), job("a", max_tokens=24)
    for one in (fits, larger):
        scheduler.submit([one])
        run(scheduler)
    # Beside 10 and 25 bytes that the jobs can come to; the first one leaves 10 more.
    assert backend.kept_at_begin == [20, 5]


def test_kept_prefixes_that_leave_room_stay():
    scheduler, opened = make(kv_limit=30, backend=Noting)
    scheduler.load("m")
    opened[0][1].cache_bytes = 20
    scheduler.submit([job("a", max_tokens=9)])
    scheduler.step()
    assert opened[0][1].kept_at_begin == [20]


def test_the_prefixes_of_the_model_used_longest_ago_go_first():
    scheduler, opened = make(kv_limit=30, backend=Keeping, max_loaded=2)
    for name in ("m1", "m2", "m1"):
        scheduler.submit([job("a", model=name, max_tokens=1)])
        run(scheduler)
    kept = dict(opened)
    kept["m1"].cache_bytes, kept["m2"].cache_bytes = 20, 15
    # With room for 20 bytes beside it.
    scheduler.submit([job("a", model="m1", max_tokens=9)])
    scheduler.step()
    assert {name: backend.cache_bytes for name, backend in kept.items()} == {"m1": 20, "m2": 0}


def test_the_jobs_in_line_pin_their_prefixes_before_any_is_evicted():
    class Pinning(Keeping):
        pinned = ""

        def pin(self, jobs):
            self.pinned = [bytes(one.prompt.tokens) for one in jobs]

        def shrink_cache(self, max_bytes, *, pinned=True):
            evicted.append((self.pinned, pinned))
            if pinned:
                super().shrink_cache(max_bytes)

    evicted = []
    scheduler, opened = make(kv_limit=30, backend=Pinning, max_loaded=2, capacity=1)
    for name in ("m1", "m2"):
        scheduler.submit([job("a", model=name, max_tokens=1)])
        run(scheduler)
    for _, backend in opened:
        backend.cache_bytes = 14
    evicted.clear()
    scheduler.submit([job(text, model=model, max_tokens=9) for text, model in (("a", "m2"), ("b", "m1"), ("c", "m2"))])
    scheduler.step()
    # The pinned prefixes of m1 stay until the others of m2 are gone too.
    assert evicted[:3] == [([b"b"], False), ([b"c"], False), ([b"b"], True)]


class Conversing(FakeBackend):
    """Keeps 10 bytes of each conversation, named by its first letter. A prompt takes 5 s that is not kept."""

    def __init__(self, **options):
        super().__init__(answer=lambda _: [97] * 100, **options)
        self.kept = []
        self.wanted = True

    @property
    def cache_bytes(self):
        return 10 * len(self.kept)

    def insert(self, a_job):
        self.kept = [name for name in self.kept if name != chr(a_job.prompt.tokens[0])]
        super().insert(a_job)

    def step(self, gap_s):
        events = super().step(gap_s)
        self.kept += [chr(one.prompt.tokens[0]) for one, event in events if is_last(event)]
        return events

    def missing(self, a_job):
        return (0, 0.0) if chr(a_job.prompt.tokens[0]) in self.kept else (len(a_job.prompt.tokens), 5.0)

    def wanted_bytes(self, within_s):
        return self.cache_bytes if self.wanted else 0

    def shrink_cache(self, max_bytes, *, pinned=True):
        while self.cache_bytes > max_bytes:
            self.kept.pop(0)


def conversing(*kept, clock=None):
    """A scheduler with room for three conversations, of which one runs and the others are kept."""
    scheduler, opened = make(kv_limit=30, backend=Conversing, clock=clock or Clock())
    scheduler.load("m")
    running = job("r", max_tokens=9)
    scheduler.submit([running])
    scheduler.step()
    opened[0][1].kept = [*kept]
    return scheduler, opened[0][1], running


def begun(*jobs):
    return [one for one in jobs if tokens_of(events_of(one))]


def test_a_new_conversation_displaces_a_kept_one_only_now_and_then():
    clock = Clock()
    scheduler, backend, running = conversing("a", "b", clock=clock)
    c, d = job("c", max_tokens=9), job("d", max_tokens=9)
    scheduler.submit([c, d])
    scheduler.step()
    # The first one may. It takes 5 s, so for 20 s none may follow.
    assert (begun(c, d), backend.kept) == ([c], ["b"])
    b = job("b", max_tokens=9)
    scheduler.submit([b])
    scheduler.cancel([running])
    backend.kept = ["b", "r"]
    scheduler.step()
    # One that goes on with what is kept passes.
    assert (begun(d, b), backend.kept) == ([b], ["r"])
    scheduler.cancel([c])
    backend.kept = ["r", "c"]
    clock.now += 19
    scheduler.step()
    assert begun(d) == []
    clock.now += 1
    scheduler.step()
    assert (begun(d), backend.kept) == ([d], ["c"])


@pytest.mark.parametrize("case", ["nothing runs", "there is room", "nobody will use them", "refused"])
def test_a_new_conversation_need_not_wait(case):
    clock = Clock()
    scheduler, backend, running = conversing("a", "b", clock=clock)
    c, d = job("c", max_tokens=9), job("d", max_tokens=9)
    scheduler.submit([c])
    scheduler.step()
    backend.kept = ["a"]
    match case:
        case "nothing runs":
            scheduler.cancel([running, c])
            backend.kept = ["a", "b", "c"]
        case "there is room":
            scheduler.cancel([running])
        case "nobody will use them":
            backend.wanted = False
        case "refused":
            # It used nothing up.
            clock.now += 20
            refused = job("c", max_tokens=8)
            refused.prompt = Prompt((ord("c"), 10**9))
            scheduler.submit([refused])
    scheduler.submit([d])
    scheduler.step()
    assert begun(d) == [d]


def test_a_new_conversation_of_low_priority_is_passed_for_a_while_only():
    clock = Clock()
    scheduler, backend, _ = conversing("a", "b", clock=clock)
    first, low = job("c", max_tokens=9), job("d", max_tokens=9)
    low.priority = 1
    scheduler.submit([first, low])
    n_others = 0
    while not begun(low):
        scheduler.step()
        clock.now += 5
        backend.kept = ["a", "b"]
        scheduler.cancel([first])
        first = job("e", max_tokens=9)
        scheduler.submit([first])
        n_others += 1
        assert n_others < 50


def test_prefixes_go_after_a_failed_step():
    class Forgetting(Keeping, Failing):
        pass

    scheduler, opened = make(kv_limit=30, backend=Forgetting, max_loaded=2)
    for name in ("m1", "m2"):
        scheduler.submit([job("a", model=name, max_tokens=1)])
        run(scheduler)
    (_, failed), (_, other) = opened
    failed.bad = True
    scheduler.submit([job("a", model="m1", max_tokens=1)])
    with pytest.raises(RuntimeError):
        run(scheduler)
    assert failed.cache_bytes == 10
    scheduler.recover(ApiError(500, "failed"))
    assert (failed.cache_bytes, other.cache_bytes) == (0, 10)


# Order and time


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_priority_goes_before_arrival_but_not_for_ever():
    clock = Clock()
    scheduler, _ = make(capacity=1, clock=clock)
    scheduler.load("m")
    running = job("aaaa")
    scheduler.submit([running])
    scheduler.step()
    late, urgent, patient = job("b"), job("c"), job("d")
    urgent.priority, patient.priority = -1, 10**30
    scheduler.submit([patient])
    scheduler.submit([late])
    scheduler.submit([urgent])
    order = []
    while scheduler.step():
        order += [one for one in (late, urgent, patient) if tokens_of(events_of(one))]
    assert list(dict.fromkeys(order)) == [urgent, late, patient]


def test_a_job_that_has_waited_long_passes_urgent_ones():
    clock = Clock()
    scheduler, _ = make(capacity=1, clock=clock)
    scheduler.load("m")
    scheduler.submit([job("aaaa")])
    scheduler.step()
    old = job("b")
    scheduler.submit([old])
    clock.now += 100
    urgent = job("c")
    urgent.priority = -3
    scheduler.submit([urgent])
    while not (first := [one for one in (old, urgent) if tokens_of(events_of(one))]):
        scheduler.step()
    assert first == [old]


def test_who_waits_too_long_is_told():
    clock = Clock()
    scheduler, _ = make(capacity=1, clock=clock, limits={"queue_timeout_s": 5})
    scheduler.load("m")
    running, waiting = job("a" * 50), job("b")
    scheduler.submit([running, waiting])
    scheduler.step()
    clock.now += 6
    scheduler.expire()
    (failed,) = events_of(waiting)
    assert (failed.error.status, failed.error.code) == (503, "queue_timeout")
    run(scheduler)
    assert tokens_of(events_of(running))[-1] == EOS


def test_what_takes_too_long_is_ended():
    clock = Clock()
    scheduler, _ = make(capacity=1, clock=clock, limits={"request_timeout_s": 5})
    scheduler.load("m")
    running, waiting = job("a" * 50), job("b")
    scheduler.submit([running, waiting])
    scheduler.step()
    clock.now += 6
    scheduler.expire()
    assert [events_of(one)[-1].error.code for one in (running, waiting)] == ["request_timeout"] * 2
    scheduler.step()
    assert scheduler.health().running == 0
    assert not scheduler.step()


class Stuck(FakeBackend):
    """Fails to remove jobs while ``bad`` is set."""

    bad = False

    def remove(self, jobs):
        if self.bad:
            raise RuntimeError("remove")
        super().remove(jobs)


def stuck_model(which, clock=time.monotonic, **limits):
    """Two models of which one removes nothing, a job running on each, and one that waits."""
    scheduler, opened = make(capacity=1, max_loaded=2, backend=Stuck, clock=clock, limits=limits)
    jobs = [job("a" * 50, model="m1"), job("b" * 50, model="m2"), job("c", model="m1")]
    for name in ("m1", "m2"):
        scheduler.load(name)
    scheduler.submit(jobs)
    scheduler.step()
    opened[which][1].bad = True
    return scheduler, jobs


def test_who_took_too_long_is_told_even_when_another_model_fails_to_let_go():
    clock = Clock()
    scheduler, jobs = stuck_model(1, clock, request_timeout_s=5)
    clock.now += 6
    scheduler.expire()
    assert [events_of(one)[-1].error.code for one in jobs] == ["request_timeout"] * 3
    with pytest.raises(RuntimeError):
        scheduler.step()
    scheduler.recover(ApiError(500, "failed"))
    scheduler.step()
    assert scheduler.health().running == 0


def test_the_cancelled_jobs_behind_a_model_that_fails_to_let_go_are_dropped_too():
    scheduler, jobs = stuck_model(0)
    scheduler.cancel(jobs)
    with pytest.raises(RuntimeError):
        scheduler.step()
    scheduler.recover(ApiError(500, "failed"))
    scheduler.step()
    assert scheduler.health().running == 0


def test_prefill_gets_as_long_as_streams_may_pause():
    class Gaps(FakeBackend):
        gaps: ClassVar = []

        def step(self, gap_s):
            self.gaps.append(gap_s)
            return super().step(gap_s)

    scheduler, _ = make(backend=Gaps, limits={"max_gap_s": 0.1})
    scheduler.load("m")
    scheduler.submit([job("a")])
    run(scheduler)
    assert set(Gaps.gaps) == {0.1}
