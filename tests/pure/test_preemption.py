"""Admission by use, and what happens when the running jobs outgrow the memory, on the fake backend, stepped by hand."""

from queue import SimpleQueue

import pytest

from mlx_serve.engine.memory import MemoryBudget
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.testing import EOS, FakeBackend, FakeModels
from mlx_serve.values import ApiError, Failed, Job, Prompt, Sampling, Started, TokenEvent

# Prompts of 100 tokens; two of them fit with what outputs usually come to, but not with more than 900 tokens each.
N_PROMPT = 100
LIMIT = 2500
# A pause comes when both have so many tokens: 256 more of each would not fit.
PAUSED_AT = LIMIT // 2 - N_PROMPT - 256 + 1


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def counting(job):
    """An answer as long as the prompt's first token says, and the end token."""
    length = job.prompt.tokens[0] * 10
    return [*(i % 200 for i in range(length)), EOS]


class Kept(FakeBackend):
    """Keeps ``cache_bytes`` of prefixes, of which ``pinned_bytes`` are of jobs in line."""

    cache_bytes = 0
    in_line = ()
    bad = False

    def pin(self, jobs):
        self.in_line = tuple(jobs)

    def shrink_cache(self, max_bytes, *, pinned=True):
        self.cache_bytes = min(self.cache_bytes, max_bytes)

    def step(self, gap_s):
        if self.bad:
            raise RuntimeError("step")
        return super().step(gap_s)


def make(kv_limit=LIMIT, clock=None, max_loaded=1, capacity=32, **limits):
    backends = {}

    def backend_of(name):
        backends[name] = Kept(capacity=capacity, token_bytes=1, answer=counting)
        return backends[name]

    models = FakeModels(backend_of, kv_limit=kv_limit, max_loaded=max_loaded)
    scheduler = Scheduler(models, Limits(max_queue=1000, **limits), clock or Clock())
    scheduler.load("m")
    return scheduler, backends


def job(length=1500, max_tokens=32_000, *, n_prompt=N_PROMPT, model="m", priority=0):
    """A job whose output has ``length`` tokens."""
    prompt = (length // 10, *[1] * (n_prompt - 1))
    return Job(model, Prompt(prompt), Sampling(max_tokens), 0, SimpleQueue(), priority=priority)


def events_of(a_job):
    out = []
    while not a_job.events.empty():
        out.append(a_job.events.get())
    return out


def run(scheduler, until=lambda: False):
    for _ in range(100_000):
        if until() or not scheduler.step():
            return
    raise AssertionError("the jobs come to no end")


def paused(scheduler):
    return scheduler.stats().paused


def whole(a_job):
    """Whether the job got all of its answer, each token once and in order."""
    events = events_of(a_job)
    assert [type(event) for event in events].count(Started) == 1
    tokens = [event.token for event in events if isinstance(event, TokenEvent)]
    return tokens == counting(a_job) and events[-1].finish == "stop"


def two_of_which_one_is_paused(**options):
    scheduler, backends = make(**options)
    first, second = job(), job()
    scheduler.submit([first, second])
    run(scheduler, lambda: paused(scheduler))
    return scheduler, backends, first, second


@pytest.mark.parametrize("max_tokens", [512, 8192, 32_000, 232_144])
@pytest.mark.parametrize(
    ("gpu_gb", "weights_gb", "token_bytes", "n_at_once"),
    [(51.5, 17.2, 98_304, 10), (77.3, 63.4, 36_864, 11), (154.6, 132.0, 192_512, 3), (154.6, 63.4, 36_864, 16)],
)
def test_agents_are_admitted_by_what_they_use(gpu_gb, weights_gb, token_bytes, n_at_once, max_tokens):
    memory = MemoryBudget(int(gpu_gb * 1e9), least_kv_bytes=int(gpu_gb * 1e9) // 8)
    limit = memory.kv_limit([int(weights_gb * 1e9)])
    scheduler, _ = make(limit // token_bytes)
    scheduler.submit([job(400, max_tokens, n_prompt=30_000) for _ in range(16)])
    scheduler.step()
    # With outputs of 512 tokens at most there is room for one more on some.
    assert scheduler.health().running - n_at_once in ((0, 1) if max_tokens == 512 else (0,))
    run(scheduler)
    assert scheduler.stats().preemptions == 0


def test_short_outputs_let_more_in_and_long_ones_fewer():
    scheduler, _ = make(10_000)
    # A job without a token yet is charged 256 of them at least.
    for length, n_at_once in ((90, 28), (400, 19)):
        scheduler.submit([job(length) for _ in range(16)])
        run(scheduler)
        scheduler.submit([job(length) for _ in range(40)])
        scheduler.step()
        assert scheduler.health().running == n_at_once
        scheduler.cancel([*scheduler._slots["m"].running, *scheduler._waiting])
        scheduler.step()


def test_the_youngest_is_paused_and_goes_on_when_there_is_room():
    scheduler, _, first, second = two_of_which_one_is_paused()
    assert (first.n_output, second.n_output) == (PAUSED_AT, PAUSED_AT)
    assert list(scheduler._slots["m"].paused) == [second]
    assert (scheduler.health().running, scheduler.health().waiting) == (1, 0)
    run(scheduler, lambda: first.n_output > 1400)
    # It would not fit with what outputs usually come to, so it does not come back to be paused again.
    assert second.n_output == PAUSED_AT
    run(scheduler)
    assert whole(first)
    assert whole(second)
    stats = scheduler.stats()
    assert (stats.preemptions, stats.paused, stats.running) == (1, 0, 0)


def test_many_that_outgrow_the_memory_all_get_their_answers_with_few_pauses():
    scheduler, _ = make(4 * LIMIT)
    jobs = [job(1500 + 10 * i) for i in range(20)]
    scheduler.submit(jobs)
    run(scheduler)
    assert all(map(whole, jobs))
    assert 0 < scheduler.stats().preemptions <= len(jobs)


def test_kept_prefixes_go_before_a_job_is_paused():
    scheduler, backends = make()
    backends["m"].cache_bytes = LIMIT
    first, second = job(850), job(850)
    scheduler.submit([first, second])
    for _ in range(3):
        scheduler.step()
    # A 32nd of the limit stays free.
    assert backends["m"].cache_bytes == LIMIT - LIMIT // 32 - 2 * (N_PROMPT + 3 + 256)
    run(scheduler)
    assert scheduler.stats().preemptions == 0
    assert backends["m"].cache_bytes < LIMIT - 2 * N_PROMPT - 850


def test_a_paused_job_is_the_first_in_line():
    scheduler, backends, _, second = two_of_which_one_is_paused()
    third = job(10, 10, n_prompt=2)
    scheduler.submit([third])
    scheduler.step()
    # There would be room for the third.
    assert third.n_output == 0
    backends["m"].cache_bytes = LIMIT
    scheduler.step()
    assert backends["m"].in_line == (second, third)
    run(scheduler)
    assert second.n_output == 1501
    assert third.n_output == 10


def test_the_one_of_least_priority_is_paused_even_if_it_came_first():
    scheduler, _ = make()
    first, second = job(priority=1), job()
    scheduler.submit([first])
    scheduler.submit([second])
    run(scheduler, lambda: paused(scheduler))
    assert list(scheduler._slots["m"].paused) == [first]
    run(scheduler)
    assert whole(first)
    assert whole(second)


def test_an_urgent_job_passes_a_paused_one_only_if_there_is_room():
    scheduler, _, _first, second = two_of_which_one_is_paused()
    large, small = job(10, n_prompt=1000, priority=-100), job(10, 10, n_prompt=2, priority=-100)
    scheduler.submit([small])
    scheduler.step()
    assert small.n_output == 1
    scheduler.submit([large])
    run(scheduler, lambda: large.n_output)
    assert second.n_output <= PAUSED_AT + 1
    run(scheduler)
    assert second.n_output == 1501


def test_a_paused_job_that_is_cancelled_is_gone():
    scheduler, backends, first, second = two_of_which_one_is_paused()
    events_of(second)
    scheduler.cancel([second])
    scheduler.step()
    assert not backends["m"]._paused
    assert paused(scheduler) == 0
    run(scheduler)
    assert whole(first)
    assert events_of(second) == []


def test_the_time_in_the_queue_is_not_that_of_a_paused_job_but_the_time_of_a_request_is():
    clock = Clock()
    scheduler, _, first, second = two_of_which_one_is_paused(clock=clock, queue_timeout_s=5, request_timeout_s=60)
    clock.now += 6
    scheduler.expire()
    assert not any(isinstance(event, Failed) for event in events_of(second))
    clock.now += 60
    scheduler.expire()
    scheduler.step()
    for a_job in (first, second):
        assert events_of(a_job)[-1].error.code == "request_timeout"
    assert (paused(scheduler), scheduler.health().running) == (0, 0)


def test_a_stop_ends_paused_jobs_too():
    scheduler, backends, first, second = two_of_which_one_is_paused()
    scheduler.close()
    assert [events_of(a_job)[-1].error.status for a_job in (first, second)] == [503, 503]
    assert not backends["m"]._paused


def test_a_failed_step_fails_the_paused_jobs_of_its_model():
    scheduler, backends, first, second = two_of_which_one_is_paused()
    backends["m"].bad = True
    with pytest.raises(RuntimeError):
        scheduler.step()
    scheduler.recover(ApiError(500, "failed"))
    assert [events_of(a_job)[-1].error.message for a_job in (first, second)] == ["failed", "failed"]
    again = job(100)
    scheduler.submit([again])
    run(scheduler)
    assert whole(again)


def test_a_paused_job_that_cannot_come_back_gets_the_error():
    scheduler, backends, _first, second = two_of_which_one_is_paused()

    def refuse(a_job):
        raise RuntimeError("insert")

    backends["m"].insert = refuse
    with pytest.raises(RuntimeError):
        run(scheduler)
    scheduler.recover(ApiError(500, "failed"))
    assert events_of(second)[-1].error.message == "failed"
    assert paused(scheduler) == 0


def test_a_paused_job_goes_on_while_an_urgent_one_waits_for_another_model():
    scheduler, _, first, second = two_of_which_one_is_paused()
    other = job(100, model="m2", priority=-100)
    scheduler.submit([other])
    run(scheduler)
    assert all(map(whole, (first, second, other)))


def test_a_model_with_a_paused_job_stays_and_an_idle_one_goes_before_a_job_is_paused():
    clock = Clock()
    scheduler, _, first, second = two_of_which_one_is_paused(max_loaded=2, clock=clock, model_ttl_s=60)
    assert scheduler.health().models == ("m",)
    scheduler, _ = make(max_loaded=2)
    scheduler.load("m2")
    first, second = job(), job()
    scheduler.submit([first, second])
    run(scheduler, lambda: paused(scheduler))
    assert scheduler.health().models == ("m",)
    run(scheduler)
    assert whole(first)
    assert whole(second)


def test_a_job_that_runs_alone_is_never_paused_and_ends_where_the_memory_does():
    scheduler, _ = make()
    a_job = job(2600)
    scheduler.submit([a_job])
    run(scheduler)
    last = events_of(a_job)[-1]
    assert (last.finish, a_job.n_output) == ("length", LIMIT - N_PROMPT)
    assert scheduler.stats().preemptions == 0


def test_only_a_prompt_that_cannot_fit_is_refused_and_told_what_would():
    scheduler, _ = make()
    fits, not_fits = job(10, 32_000, n_prompt=LIMIT - 1), job(10, 32_000, n_prompt=LIMIT)
    scheduler.submit([fits])
    with pytest.raises(ApiError, match=f"has {LIMIT} tokens; {LIMIT - 1} would fit") as refused:
        scheduler.submit([not_fits])
    assert (refused.value.status, refused.value.code) == (400, "kv_cache_exceeded")
    run(scheduler)
    assert events_of(fits)[-1].finish == "length"
