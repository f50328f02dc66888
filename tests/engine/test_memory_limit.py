"""What MLX holds while sequences start, grow, end and come back: little more than the limit for KV caches."""

import random
from dataclasses import replace
from itertools import count
from queue import SimpleQueue

import mlx.core as mx
import pytest

from mlx_serve.engine.cache.rows import MAX_PASS
from mlx_serve.engine.cache.size import measure
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.schedule.charges import tokens_now
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.testing import FakeModels
from mlx_serve.values import Failed, Job, Prompt, Sampling, TokenEvent
from tests.engine.test_drafts_in_batch import Always, drafting, step
from tests.engine.tinymodel import EOS, loaded, tiny_llama

# 24 KiB a token: 2,048 tokens fit.
LIMIT = 48 << 20


@pytest.mark.parametrize("n_drafts", [0, MAX_PASS - 1])
def test_the_peak_is_within_the_limit(n_drafts):
    model = tiny_llama(num_hidden_layers=24, num_attention_heads=1, num_key_value_heads=1, head_dim=128)
    whole = replace(loaded(model, max_sequences=100), kv_size=measure([model]))
    # Short passes, because what a pass takes beside the caches is not part of the limit.
    options, ticks, rng = BatchOptions(prefill_step_size=64, draft_ngram=True), count(), random.Random(0)

    def backend(_):
        made = BatchBackend(whole, options, lambda: next(ticks) / 1000)
        made._rows.draft_length = Always(n_drafts)
        return made

    models = FakeModels(backend, kv_limit=LIMIT)
    scheduler = Scheduler(models, Limits(max_queue=100))
    scheduler.load("m")
    shared = rng.choices(range(250), k=200)
    jobs = []
    for i in range(12):
        prompt = [*(shared if i % 3 else []), *rng.choices(range(250), k=rng.randrange(20, 260))]
        # Some end while others go on.
        sampling = Sampling(120 if i in (1, 2) else rng.randrange(5, 30), logit_bias=((EOS, -100.0),))
        jobs.append(Job("m", Prompt(tuple(prompt)), sampling, 0, SimpleQueue()))
    scheduler.submit(jobs)
    before, most, left = mx.get_active_memory(), 0, set(jobs)
    mx.reset_peak_memory()
    while left:
        scheduler.step()
        most = max(most, scheduler.health().running)
        for job in list(left):
            while not job.events.empty():
                event = job.events.get()
                assert not isinstance(event, Failed)
                if isinstance(event, TokenEvent) and event.finish:
                    left.discard(job)
    # The memory was short, and was used.
    assert whole.prefix_cache.n_evicted
    assert most >= 3
    # Beside the caches, one of 48 arrays of a batch grows at a time.
    assert 0.85 * LIMIT <= mx.get_peak_memory() - before <= 1.05 * LIMIT


@pytest.mark.parametrize("n_drafts", [0, MAX_PASS - 1])
def test_rows_take_no_more_than_they_are_charged(n_drafts):
    model = tiny_llama()
    whole = replace(loaded(model), kv_size=measure([model]), eos_ids=frozenset())
    backend = drafting(whole, "look-up", Always(n_drafts))
    # All of them end where their arrays do.
    running = [
        Job("m", Prompt((1, 2, 3, 4) * n), Sampling(256 - 4 * n), 0, SimpleQueue()) for n in (30, 50, 60, 62, 63)
    ]
    for one in running:
        backend.insert(one)
    while running:
        before = {one: tokens_now(one) for one in running}
        for one, event in step(backend):
            if isinstance(event, TokenEvent):
                one.n_output += 1
                if event.finish:
                    running.remove(one)
        caches = [bank._cache for bank in backend._rows._banks.values()]
        assert sum(each.nbytes - each.spare_bytes for each in caches) <= backend.kv_bytes(before)
    assert bool(backend.n_drafted) == bool(n_drafts)
