"""What the scheduler tells the metrics, on the fake backend, stepped by hand."""

from queue import SimpleQueue

import pytest

from mlx_serve.engine.memory import MemoryUse
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.testing import FakeBackend, FakeModels
from mlx_serve.values import ApiError, EngineStats, Job, ModelStats, Prompt, Sampling


class Kept(FakeBackend):
    """A backend that has kept, and given up, prefixes."""

    cache_bytes = 7
    n_cached = 2
    n_evicted = 3
    alone = "it is a test"
    undrafted = "nobody drafts"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.n_drafted, self.n_accepted = 5, 4


class Weighed(FakeModels):
    """Models of 100 bytes, under an MLX that says so."""

    def weights_bytes(self, name):
        return 100

    def memory(self):
        return MemoryUse(active_bytes=1, peak_bytes=2, cache_bytes=3)


def scheduler_of(max_loaded=2):
    models = Weighed(lambda _: Kept(capacity=1, token_bytes=1), max_loaded=max_loaded)
    return Scheduler(models, Limits())


def job(model, text="ab"):
    return Job(model, Prompt(tuple(text.encode())), Sampling(8), 0, SimpleQueue())


def test_nothing_is_known_at_first():
    assert scheduler_of().stats() == EngineStats()


def test_each_model_has_its_figures():
    scheduler = scheduler_of()
    scheduler.load("a")
    scheduler.load("b")
    scheduler.submit([job("a"), job("a"), job("b", "x"), job("c"), job("c")])
    scheduler.step()
    stats = scheduler.stats()
    # 2 and 1 bytes of prompt, and 8 for the output.
    by_name = {model.name: model for model in stats.models}
    alike = {"weights_bytes": 100, "capacity": 1, "alone": "it is a test", "undrafted": "nobody drafts"}
    assert by_name["a"] == ModelStats("a", waiting=1, running=1, kv_bytes=10, **alike)
    assert by_name["b"] == ModelStats("b", waiting=0, running=1, kv_bytes=9, **alike)
    assert (stats.waiting, stats.running, stats.kv_bytes, stats.weights_bytes) == (3, 2, 19, 200)
    assert (stats.prefix_cache_bytes, stats.prefix_cache_entries, stats.evictions) == (14, 4, 6)
    assert (stats.drafted, stats.accepted) == (10, 8)
    assert (stats.active_bytes, stats.peak_bytes, stats.cache_bytes) == (1, 2, 3)


def test_evictions_never_go_down():
    scheduler = scheduler_of(max_loaded=1)
    scheduler.load("a")
    scheduler.load("b")
    stats = scheduler.stats()
    assert [model.name for model in stats.models] == ["b"]
    assert stats.evictions == 6


@pytest.mark.parametrize("loads_another", [False, True])
def test_counts_go_on_after_a_step_that_failed(loads_another):
    """The new backend has the prefixes of the one that failed, unless the model had to be unloaded."""
    scheduler = scheduler_of()
    scheduler.load("a")
    scheduler.submit([job("a")])
    scheduler.step()
    backend = scheduler._slots["a"].backend
    backend.n_drafted = 9
    backend.step = None
    if loads_another:
        scheduler.submit([job("b")])
    with pytest.raises(TypeError):
        scheduler.step()
    assert scheduler.recover(ApiError(500, "step"))
    scheduler.step()
    scheduler.step()
    # Each backend that is made counts 3, 5 and 4 at once.
    stats = scheduler.stats()
    assert (stats.drafted, stats.accepted) == (9 + 5, 4 + 4)
    assert stats.evictions == (3 + 3 if loads_another else 3)


def test_the_memory_is_told_as_soon_as_a_model_is_loaded():
    scheduler = scheduler_of()
    scheduler.load("a")
    assert scheduler.stats().active_bytes == 1
