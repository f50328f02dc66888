"""What MLX holds while sequences start, grow, end and come back: little more than the limit for KV caches."""

import random
from dataclasses import replace
from itertools import count
from queue import SimpleQueue

import mlx.core as mx

from mlx_serve.engine.cache.size import measure
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.testing import FakeModels
from mlx_serve.values import Failed, Job, Prompt, Sampling, TokenEvent
from tests.engine.tinymodel import EOS, loaded, tiny_llama

# 24 KiB a token: 2,048 tokens fit.
LIMIT = 48 << 20


def test_the_peak_is_within_the_limit():
    model = tiny_llama(num_hidden_layers=12, num_attention_heads=1, num_key_value_heads=1, head_dim=256)
    whole = replace(loaded(model, max_sequences=100), kv_size=measure([model]))
    # Short passes, because what a pass takes beside the caches is not part of the limit.
    options, ticks, rng = BatchOptions(prefill_step_size=64), count(), random.Random(0)
    models = FakeModels(lambda _: BatchBackend(whole, options, lambda: next(ticks) / 1000), kv_limit=LIMIT)
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
    # Beside the caches, one of 24 arrays of a batch grows at a time.
    assert 0.85 * LIMIT <= mx.get_peak_memory() - before <= 1.1 * LIMIT
