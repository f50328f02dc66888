"""A fault at any place of the engine concerns its own requests: the others, and the next ones, are served."""

from dataclasses import replace
from queue import SimpleQueue

import mlx.core as mx
import pytest

from mlx_serve.engine.catalog import Catalog
from mlx_serve.engine.generate import token_choice
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.memory import MemoryBudget
from mlx_serve.engine.models.store import ModelStore
from mlx_serve.engine.schedule.scheduler import Scheduler
from mlx_serve.engine.schedule.worker import Worker
from mlx_serve.testing import FakeModels
from mlx_serve.values import ApiError, Failed, Inputs, Job, Prompt, Sampling, Started, TokenEvent
from tests.engine.tinymodel import loaded, one_by_one, tiny_llama, tokens_of, write_model

PROMPT = list(range(20, 60))


class OnCue:
    """A model that raises when it is told to."""

    def __init__(self, model):
        self.model, self.fault = model, None

    def __call__(self, *args, **kwargs):
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return self.model(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)


def job(prompt, max_tokens=8, model="m", **sampling):
    return Job(model, Prompt(tuple(prompt)), Sampling(max_tokens, **sampling), 0, SimpleQueue())


def result(a_job):
    """Its tokens, or the error that it ended with."""
    try:
        return tokens_of(a_job)
    except ApiError as error:
        return error


@pytest.fixture
def running():
    """Starts a scheduler's worker."""
    workers = []

    def start(models):
        scheduler = Scheduler(models)
        workers.append(Worker(scheduler, None, models.close))
        workers[-1].start()
        return scheduler

    yield start
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("fault", [RuntimeError("[metal::malloc] no memory"), MemoryError(), ValueError("shapes")])
def test_a_model_call_that_raises_fails_what_was_running_and_nothing_after_it(running, alone, fault):
    model = OnCue(tiny_llama())
    scheduler = running(
        FakeModels(lambda _: one_by_one(loaded(model)) if alone else BatchBackend(loaded(model), BatchOptions()))
    )
    first = job(PROMPT)
    scheduler.submit([first])
    want = result(first)
    bad = job(PROMPT[1:])
    model.fault = fault
    scheduler.submit([bad])
    error = result(bad)
    assert (error.status, error.type) == (500, "server_error")
    again = job(PROMPT)
    scheduler.submit([again])
    assert result(again) == want
    assert scheduler.health().status == "ok"


PROMPTS_OF = {"plain": {}, "scored": {"prompt_logprobs": 1}}


@pytest.mark.parametrize("kind", [*PROMPTS_OF, "embedded"])
@pytest.mark.parametrize("fault", [RuntimeError("[metal::malloc] too large"), MemoryError(), ValueError("shapes")])
def test_a_prompt_that_cannot_be_prefilled_fails_alone(kind, fault):
    model = OnCue(tiny_llama())
    backend = BatchBackend(loaded(model), BatchOptions())
    good = job(PROMPT, 30)
    backend.insert(good)
    tokens, failed = [], {}

    def step():
        for who, event in backend.step(0.2):
            if isinstance(event, TokenEvent) and who is good:
                tokens.append(event.token)
            elif isinstance(event, Failed):
                failed[who] = event.error.status

    while not tokens:
        step()
    inputs = Inputs(((1, 2, 3),)) if kind == "embedded" else None
    bad = job(PROMPT[::-1], **PROMPTS_OF.get(kind, {}))
    bad.inputs = inputs
    backend._embedder.__dict__["trunk"] = OnCue(model.model.model)
    backend.insert(bad)
    (backend._embedder.trunk if kind == "embedded" else model).fault = fault
    while bad not in failed:
        step()
    assert failed == {bad: 500}
    while len(tokens) < 30:
        step()
    alone = BatchBackend(loaded(tiny_llama()), BatchOptions())
    again = job(PROMPT, 30)
    alone.insert(again)
    want = []
    while len(want) < 30:
        want += [event.token for _, event in alone.step(0.2) if isinstance(event, TokenEvent)]
    assert tokens == want


@pytest.mark.parametrize("fault", [RuntimeError("a rank is gone"), ValueError("shapes")])
def test_with_several_ranks_only_what_all_of_them_raise_fails_one_prompt(fault):
    model = OnCue(tiny_llama())
    backend = BatchBackend(replace(loaded(model), agree=lambda drawn: drawn), BatchOptions())
    bad = job(PROMPT)
    backend.insert(bad)
    model.fault = fault
    if isinstance(fault, RuntimeError):
        with pytest.raises(RuntimeError):
            backend.step(0.2)
    else:
        assert [type(event) for _, event in backend.step(0.2)] == [Started, Failed]


# As pyo3 makes it of a panic in Rust.
PanicException = type("PanicException", (BaseException,), {})


@pytest.mark.parametrize("fault", [IndexError("a processor's own fault"), PanicException("a library's")])
def test_a_logits_processor_that_raises_fails_its_own_job(running, monkeypatch, fault):
    make = token_choice.make_processors

    def raising(context, logits):
        raise fault

    monkeypatch.setattr(token_choice, "make_processors", lambda s, *rest: [raising] if s.seed == 13 else make(s, *rest))
    model = tiny_llama()
    scheduler = running(FakeModels(lambda _: BatchBackend(loaded(model), BatchOptions())))
    good, bad = job(PROMPT, 30), job(PROMPT, 30, seed=13)
    scheduler.submit([good, bad])
    assert result(bad).status == 500
    alone = job(PROMPT, 30)
    tokens = result(good)
    scheduler.submit([alone])
    assert result(alone) == tokens


def test_a_model_that_cannot_be_read_to_its_end_leaves_the_others_alone(running, tmp_path, monkeypatch):
    write_model(tmp_path / "good", seed=1)
    write_model(tmp_path / "bad", seed=2)
    weights = dict(mx.load(str(tmp_path / "bad" / "model.safetensors")))
    weights["model.layers.1.mlp.up_proj.weight"] = mx.zeros((3, 3))
    mx.save_safetensors(str(tmp_path / "bad" / "model.safetensors"), weights, metadata={"format": "mlx"})
    store = ModelStore(
        Catalog(roots=[tmp_path]),
        tokenizer_config={},
        batch=BatchOptions(),
        prompt_cache_size=4,
        prompt_cache_bytes=None,
    )
    scheduler = running(store)
    good = job(PROMPT, 40, model="good")
    bad = [job(PROMPT, model="bad"), job(PROMPT, model="bad")]
    scheduler.submit([good, *bad])
    assert [result(one).param for one in bad] == ["model", "model"]
    assert len(result(good)) == 40
    assert scheduler.health().models == ("good",)


def test_a_model_larger_than_the_budget_is_refused_and_nothing_is_unloaded(running, tmp_path):
    for name in ("small", "large"):
        write_model(tmp_path / name)
    (tmp_path / "large" / "model-2.safetensors").write_bytes(b"\0" * 3_000_000)
    store = ModelStore(
        Catalog(roots=[tmp_path]),
        tokenizer_config={},
        batch=BatchOptions(),
        prompt_cache_size=4,
        prompt_cache_bytes=None,
        budget=MemoryBudget(total_bytes=2**30 + 2_000_000),
    )
    scheduler = running(store)
    small, large = job(PROMPT, model="small"), job(PROMPT, model="large")
    scheduler.submit([small])
    result(small)
    scheduler.submit([large])
    error = result(large)
    assert (error.status, error.code) == (503, "model_too_large")
    assert scheduler.health().models == ("small",)
    with pytest.raises(ApiError, match="--kv-cache-bytes") as caught:
        scheduler.submit([job([5] * 20_000, model="small")])
    assert caught.value.status == 400


def test_a_batch_within_its_budget_is_admitted_as_memory_allows(running):
    from mlx_serve.engine.cache.size import measure

    model = tiny_llama()
    size = measure([model])
    whole = replace(loaded(model), kv_size=size)
    scheduler = running(FakeModels(lambda _: BatchBackend(whole, BatchOptions()), kv_limit=2 * size.bytes(100)))
    jobs = [job([i, *PROMPT], 50) for i in range(6)]
    scheduler.submit(jobs)
    assert all(len(result(one)) <= 50 for one in jobs)
    assert whole.prefix_cache.n_bytes <= 2 * size.bytes(100)
