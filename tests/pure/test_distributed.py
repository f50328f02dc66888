"""Rank 0 and a follower that are joined by queues instead of MLX: the follower does what the leader does, in order."""

import json
from contextlib import nullcontext
from queue import Queue, SimpleQueue
from threading import Barrier, Event, Semaphore, Thread

import pytest

from mlx_serve.engine.backend import EngineLost, StepPlan
from mlx_serve.engine.memory import MemoryUse
from mlx_serve.engine.ranks.follower import Follower
from mlx_serve.engine.ranks.leader import FIRST_REST_S, Leader
from mlx_serve.engine.ranks.protocol import job_data, job_of
from mlx_serve.engine.schedule.scheduler import Scheduler
from mlx_serve.engine.schedule.worker import Worker
from mlx_serve.testing import EOS, FakeBackend
from mlx_serve.values import (
    ApiError,
    Gate,
    Grammar,
    Inputs,
    Job,
    Marker,
    Prompt,
    ReasoningBudget,
    Sampling,
    Started,
)

DEADLINE_S = 60


class Pair:
    """Two ranks' messages. What one rank gathers comes when both have asked."""

    def __init__(self):
        self.messages = Queue()
        self.barrier = Barrier(2)
        self.rows = [[], []]

    def gather(self, rank, values):
        self.barrier.wait(DEADLINE_S)
        self.rows[rank] = list(values)
        self.barrier.wait(DEADLINE_S)
        return [list(row) for row in self.rows]


class FakeRanks:
    def __init__(self, pair, rank):
        self._pair = pair
        self.rank = rank
        self.lost = False
        self.leaving = Event()
        self.posted = []
        self.said = Semaphore(0)

    def post(self, message):
        if self.lost:
            raise EngineLost("gone")
        self.posted.append(message)
        self._pair.messages.put(message)
        self.said.release()
        return False

    def receive(self):
        return self._pair.messages.get(timeout=DEADLINE_S)

    def gather(self, values):
        return self._pair.gather(self.rank, values)

    def stream(self):
        return nullcontext()


class FakePart(FakeBackend):
    """A part of a model that notes what it is told, and keeps a prefix of 100 bytes for every job that it takes in."""

    def __init__(self, kept, **options):
        super().__init__(**options)
        self.done = []
        self.kept = kept
        self.slow = []

    @property
    def cache_bytes(self):
        return 100 * len(self.kept)

    def insert(self, job):
        super().insert(job)
        self.done.append(("insert", job.prompt.tokens, job.sampling))
        self.kept.add(job.prompt.tokens)

    def remove(self, jobs):
        self.done.append(("remove", [job.prompt.tokens for job in jobs]))
        super().remove(jobs)

    def pause(self, jobs):
        self.done.append(("pause", [job.prompt.tokens for job in jobs]))
        return super().pause(jobs)

    def plan_step(self, gap_s):
        return StepPlan(17, decodes=False)

    def run_step(self, plan):
        self.done.append(("step", plan))
        return self.step(0.0)

    def late(self):
        return self.slow

    def give_up(self, jobs):
        self.done.append(("give up", [job.prompt.tokens for job in jobs]))


class FakeKept:
    """Numbered prefixes of 100 bytes. The leader's evicts those with an even number first, as if others were pinned."""

    def __init__(self):
        self.entries = {}

    def __len__(self):
        return len(self.entries)

    def add(self, tokens):
        self.entries[max(self.entries, default=0) + 1] = tokens

    def shrink(self, max_bytes, *, pinned):
        order = sorted(self.entries, key=lambda number: (number % 2, number))
        gone = order[: max(0, len(order) - max_bytes // 100)]
        self.evict(gone)
        return gone

    def evict(self, numbers):
        for number in numbers:
            del self.entries[number]

    def clear(self):
        self.entries.clear()


class FakeStore:
    """Reads a model in ``n_slices``; ``fault`` is raised at the last of them."""

    def __init__(self, n_slices=1, fault=None):
        self.n_slices = n_slices
        self.fault = fault
        self.parts = {}
        self.unloaded = []
        self.closed = False
        self.finished = Semaphore(0)

    tokenizer = vocabulary = None

    def memory(self):
        return MemoryUse()

    def rest(self):
        pass

    def release(self):
        pass

    def weights_bytes(self, name):
        return 0

    def has_room(self, names):
        return len(names) <= 1

    def kv_limit(self, names):
        return None

    def marks(self, names):
        return None

    def check_room(self, name):
        pass

    def read(self, name):
        for _ in range(self.n_slices - 1):
            yield
        if self.fault is not None:
            raise self.fault

    def finish(self, name):
        self.parts[name] = FakePart(FakeKept())
        self.finished.release()
        return self.parts[name]

    def prefix_cache(self, name):
        return self.parts[name].kept

    def unload(self, name):
        self.unloaded.append(name)

    def close(self):
        self.closed = True


class Joined:
    """A leader, and a follower that runs in a thread."""

    def __init__(self, here=None, there=None, cache_bytes=None, expected=""):
        pair = Pair()
        self.here, self.there = here or FakeStore(), there or FakeStore()
        self.ranks = FakeRanks(pair, 0)
        self.leader = Leader(self.here, self.ranks, lambda: None, cache_bytes)
        self._follower = Follower(self.there, FakeRanks(pair, 1))
        self._expected = expected
        self._error = ""
        self._thread = Thread(target=self._follow)
        self._thread.start()

    def _follow(self):
        try:
            self._follower.run()
        except EngineLost as error:
            self._error = str(error)

    def there_is(self, name):
        """The follower's part of a model, once it has one."""
        assert self.there.finished.acquire(timeout=DEADLINE_S)
        return self.there.parts[name]

    def join(self):
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        assert self._error == self._expected

    def open(self, name):
        opening = self.leader.open(name)
        while True:
            try:
                next(opening)
            except StopIteration as opened:
                return opened.value

    def close(self):
        """End both, so that the follower has done all that it was told."""
        self.leader.close()
        self.join()
        assert self.here.closed
        assert self.there.closed


def job(text, **sampling):
    return Job("m", Prompt(tuple(text.encode())), Sampling(max_tokens=9, **sampling), 0, SimpleQueue())


def test_the_follower_does_what_the_leader_does():
    joined = Joined()
    backend = joined.open("m")
    one, two = job("one", temperature=0.5), job("two")
    backend.insert(one)
    backend.step(0.1)
    backend.insert(two)
    backend.step(0.1)
    backend.remove([one])
    for _ in range(4):
        backend.step(0.1)
    joined.close()
    here, there = joined.here.parts["m"], joined.there.parts["m"]
    assert there.done == here.done
    assert here.done[0] == ("insert", (111, 110, 101), Sampling(max_tokens=9, temperature=0.5))
    assert there.n_decoding == 0


def test_a_job_is_paused_and_goes_on_on_all_ranks():
    joined = Joined()
    backend = joined.open("m")
    one, two = job("one"), job("two")
    for a_job in (one, two):
        backend.insert(a_job)
    backend.step(0.1)
    backend.pause([one])
    assert [a_job for a_job, _ in backend.step(0.1)] == [two]
    backend.insert(one)
    assert {a_job: event.token for a_job, event in backend.step(0.1)} == {one: ord("n"), two: ord("o")}
    for _ in range(2):
        backend.step(0.1)
    joined.close()
    here, there = joined.here.parts["m"], joined.there.parts["m"]
    assert there.done == here.done
    assert ("pause", [one.prompt.tokens]) in there.done
    assert there.n_decoding == 0


def numbers(joined, backend):
    """Jobs that each side knows by number: the leader's, and those of both of the follower's tables."""
    part = joined._follower._parts["m"]
    return len(backend._numbers), len(part._jobs), len(part._numbers)


def until_stopped(joined):
    """Wait until the follower has done what it was told, before it closes its backends."""
    reached, go_on = Event(), Event()
    close = joined.there.parts["m"].close

    def wait():
        reached.set()
        assert go_on.wait(DEADLINE_S)
        close()

    joined.there.parts["m"].close = wait
    joined.ranks.post(["stop"])
    assert reached.wait(DEADLINE_S)
    return go_on


@pytest.mark.parametrize("end", ["stop", "cancel", "cancel while paused"])
def test_both_sides_forget_the_jobs_that_have_ended(end):
    joined = Joined()
    backend = joined.open("m")
    joined.there_is("m")
    gone, stays = job("x"), job("y" * 9)
    backend.insert(gone)
    backend.insert(stays)
    for _ in range(2 if end == "stop" else 1):
        backend.step(0.1)
    if end == "cancel while paused":
        backend.pause([gone])
    if end != "stop":
        backend.remove([gone])
    go_on = until_stopped(joined)
    assert numbers(joined, backend) == (1, 1, 1)
    go_on.set()
    joined.join()


def test_a_job_that_is_refused_is_refused_on_all_ranks_and_forgotten():
    joined = Joined()
    backend = joined.open("m")
    bad = Job("m", Prompt((EOS + 1000,)), Sampling(max_tokens=9), 0, SimpleQueue())
    with pytest.raises(ApiError):
        backend.insert(bad)
    good = job("x")
    backend.insert(good)
    backend.step(0.1)
    backend.remove([good])
    joined.close()
    assert joined.there.parts["m"].done == joined.here.parts["m"].done


def test_who_is_late_is_decided_by_the_leader_s_clock():
    joined = Joined()
    backend = joined.open("m")
    late = job("late")
    backend.insert(late)
    joined.here.parts["m"].slow = [late]
    backend.step(0.1)
    backend.close()
    joined.close()
    for store in (joined.here, joined.there):
        assert ("give up", [late.prompt.tokens]) in store.parts["m"].done


def test_prefixes_are_evicted_everywhere_as_the_leader_chooses_by_its_bytes():
    joined = Joined(cache_bytes=250)
    backend = joined.open("m")
    for text in ("one", "two", "three", "four"):
        backend.insert(job(text))
    backend.step(0.1)
    assert len(joined.here.parts["m"].kept) == 2
    backend.shrink_cache(100)
    joined.close()
    kept = {3: tuple(b"three")}
    assert joined.here.parts["m"].kept.entries == kept
    assert joined.there.parts["m"].kept.entries == kept


@pytest.mark.parametrize(("here", "there"), [(1, 4), (4, 1), (3, 3)])
def test_ranks_read_at_their_own_pace(here, there):
    joined = Joined(FakeStore(here), FakeStore(there))
    joined.open("m").close()
    joined.close()
    kinds = [message[0] for message in joined.ranks.posted]
    assert kinds == ["open", *["read"] * (max(here, there) - 1), "close", "stop"]
    assert set(joined.here.parts) == set(joined.there.parts) == {"m"}


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_model_that_one_rank_cannot_read_is_let_go_on_all(where):
    fault = ApiError(500, "no such file", param="model")
    joined = Joined(**{where: FakeStore(2, fault)})
    with pytest.raises(ApiError) as caught:
        joined.open("m")
    assert (caught.value.status, caught.value.param) == (500, "model")
    joined.close()
    assert joined.here.unloaded == joined.there.unloaded == ["m"]
    assert not joined.here.parts
    assert not joined.there.parts


def test_a_job_survives_json():
    sampling = Sampling(
        max_tokens=3,
        logit_bias=((5, -1.5), (7, 2.0)),
        seed=2**63,
        grammar=Grammar("start: /\ud800/", 5, compiled=object()),
        gate=Gate(waiting=True, until=(1, 2), exits=(3,)),
        reasoning_budget=ReasoningBudget(5, True, Marker(1, ((7, (1,)),)), Marker(2, ((8, (1, 2)),)), (8, 9)),
    )
    sent = Job("m", Prompt((1, 2, 3)), sampling, 2, SimpleQueue(), scope="whose")
    received = job_of(json.loads(json.dumps(job_data(sent))))
    assert (received.model, received.prompt, received.sampling, received.index) == ("m", sent.prompt, sampling, 2)
    assert hash(received.sampling) == hash(sampling)
    assert (received.inputs, received.scope) == (None, "whose")


def test_inputs_survive_json():
    inputs = Inputs(((1, 2), (3,)), 5)
    sent = Job("m", Prompt((1, 2)), Sampling(0), 0, SimpleQueue(), inputs=inputs)
    received = job_of(json.loads(json.dumps(job_data(sent))))
    assert (received.prompt, received.inputs) == (sent.prompt, inputs)


def test_a_step_that_fails_ends_the_engine_for_nobody_knows_what_the_others_did():
    joined = Joined()
    scheduler = Scheduler(joined.leader)
    ended = Event()
    worker = Worker(scheduler, "m", joined.leader.close, peers=joined.leader, on_fault=ended.set)
    failing = RuntimeError("out of memory")

    def fail(_):
        raise failing

    worker.start()
    worker.ready.result(DEADLINE_S)
    joined.here.parts["m"].run_step = fail
    asked = job("x")
    scheduler.submit([asked])
    assert ended.wait(DEADLINE_S)
    worker.stop()
    assert worker.fault is failing
    assert asked.events.get(timeout=DEADLINE_S).error.status == 500
    # Nothing is said any more; here the follower is told to end by the test.
    assert joined.ranks.posted[-1][0] == "step"
    joined.ranks.lost = False
    joined.close()


def test_what_fails_alike_on_all_ranks_fails_its_jobs_and_a_new_backend_serves():
    joined = Joined()
    scheduler = Scheduler(joined.leader)
    worker = Worker(scheduler, "m", joined.leader.close, peers=joined.leader)

    def fail(_):
        raise ValueError("shapes do not match")

    worker.start()
    worker.ready.result(DEADLINE_S)
    failed = [joined.here.parts["m"], joined.there_is("m")]
    for part in failed:
        part.run_step = fail
    asked, next_one = job("x"), job("y")
    scheduler.submit([asked])
    assert asked.events.get(timeout=DEADLINE_S).error.status == 500
    scheduler.submit([next_one])
    assert next_one.events.get(timeout=DEADLINE_S) == Started(0, 0)
    worker.stop()
    assert worker.fault is None
    joined.close()
    assert failed[0].done == failed[1].done
    assert joined.here.parts["m"].done == joined.there.parts["m"].done
    assert joined.here.parts["m"] is not failed[0]


def test_a_follower_that_fails_alone_ends():
    joined = Joined(expected="a step failed here, but not on rank 0")
    backend = joined.open("m")

    def fail(_):
        raise ValueError("not enough")

    joined.there_is("m").run_step = fail
    backend.insert(job("x"))
    backend.step(0.1)
    backend.step(0.1)
    joined.join()


def test_while_there_is_nothing_to_do_the_leader_says_so_less_and_less_often():
    joined = Joined()
    worker = Worker(Scheduler(joined.leader), None, joined.leader.close, peers=joined.leader)
    worker.start()
    for _ in range(3):
        assert joined.ranks.said.acquire(timeout=DEADLINE_S)
    worker.stop()
    joined.close()
    assert joined.ranks.posted[:3] == [["rest", FIRST_REST_S * 2**i] for i in range(3)]
