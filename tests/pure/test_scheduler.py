"""The scheduler on the fake backend, stepped by hand, and under the worker thread."""

import threading
from queue import SimpleQueue

import pytest

from mlx_serve.core import ApiError, Failed, Job, Prompt, Sampling, Started, TokenEvent
from mlx_serve.engine.fake_backend import EOS, FakeBackend, FakeModels
from mlx_serve.engine.scheduler import Limits, Scheduler
from mlx_serve.engine.worker import Worker

DEADLINE_S = 20


def job(text="ab", *, model="m", max_tokens=100, index=0, events=None):
    queue = events if events is not None else SimpleQueue()
    return Job(model, Prompt(tuple(text.encode())), Sampling(max_tokens), index, queue)


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


def make(capacity=4, max_queue=8, backend=FakeBackend):
    opened = []

    def open_backend(name):
        if name == "broken":
            raise ApiError(500, "cannot load", type="server_error")
        opened.append((name, backend(capacity=capacity)))
        return opened[-1][1]

    return Scheduler(FakeModels(open_backend), Limits(max_queue=max_queue)), opened


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_worker_nobody_is_left_waiting():
    def end(_jobs):
        raise SystemExit

    scheduler = Scheduler(FakeModels(lambda _: FakeBackend(on_step=end)), Limits(max_queue=8))
    a = job()
    scheduler.submit([a])
    worker = worker_of(scheduler)
    assert wait(a)[-1].error.status == 503
    worker.join(DEADLINE_S)
    assert scheduler.health().status == "stopped"


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
