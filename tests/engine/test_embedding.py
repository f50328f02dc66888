"""Vectors of the MLX backends on tiny random models: those of the model's last hidden states, computed directly."""

from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.backend import StepPlan
from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.embedding import Embedder
from mlx_serve.engine.generate.pooling import LAST_TOKEN, Pooling
from mlx_serve.values import ApiError, Embedded, Inputs, Job, Prompt, Sampling, Started, TokenEvent
from tests.engine.tinymodel import VOCAB_SIZE, loaded, one_by_one, tiny_gemma, tiny_lfm2, tiny_llama

MEAN = Pooling("mean")
INPUTS = [[1, 2, 3], [7], list(range(100, 160)), [9] * 17, [7]]
WIDTH = 32


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def batch_of(model, pooling=LAST_TOKEN):
    return BatchBackend(replace(loaded(model), pooling=pooling), BatchOptions())


def single_of(model, pooling=LAST_TOKEN):
    return one_by_one(replace(loaded(model), pooling=pooling))


def job(inputs, dimensions=None):
    tokens = tuple(map(tuple, inputs))
    longest = Prompt(max(tokens, key=len))
    return Job("m", longest, Sampling(0), 0, SimpleQueue(), inputs=Inputs(tokens, dimensions))


def generating(prompt, max_tokens):
    return Job("m", Prompt(tuple(prompt)), Sampling(max_tokens, ignore_eos=True), 0, SimpleQueue())


def direct(model, tokens, pooling=LAST_TOKEN, dimensions=None):
    """The whole input at once."""
    (hidden,) = model.model(mx.array([tokens]), cache=make_prompt_cache(model)).astype(mx.float32)
    vector = np.array(hidden.mean(axis=0) if pooling == MEAN else hidden[-1])[:dimensions]
    return vector / np.linalg.norm(vector)


def numbers(event):
    return np.frombuffer(event.vector, dtype="<f4")


def run(backend, *jobs, n_tokens=10_000):
    """The vectors of each job."""
    for a_job in jobs:
        backend.insert(a_job)
    vectors = {a_job: [] for a_job in jobs}
    ended = 0
    while ended < len(jobs):
        for a_job, event in backend.run_step(StepPlan(n_tokens)):
            if isinstance(event, Embedded):
                vectors[a_job].append(numbers(event))
                ended += event.is_last
    return [vectors[a_job] for a_job in jobs]


def assert_near(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("n_tokens", [1, 7, 16, 10_000])
@pytest.mark.parametrize("pooling", [LAST_TOKEN, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("make", [batch_of, single_of])
def test_vectors_are_the_pooled_hidden_states_in_chunks_or_whole(model, make, pooling, n_tokens):
    (found,) = run(make(model, pooling), job(INPUTS), n_tokens=n_tokens)
    assert_near(found, [direct(model, tokens, pooling) for tokens in INPUTS])
    np.testing.assert_array_equal(found[1], found[4])


@pytest.mark.parametrize("make_model", [tiny_gemma, tiny_lfm2])
@pytest.mark.parametrize("pooling", [LAST_TOKEN, MEAN], ids=["last", "mean"])
def test_windows_and_recurrent_states_too(make_model, pooling):
    model = make_model()
    (found,) = run(batch_of(model, pooling), job(INPUTS), n_tokens=7)
    assert_near(found, [direct(model, tokens, pooling) for tokens in INPUTS])


def test_a_model_with_its_text_part_inside(model):
    outer = SimpleNamespace(language_model=model, layers=model.layers)
    (event,) = Embedder(loaded(outer)).start(job([[1, 2, 3]])).step(100)[1:]
    assert_near([numbers(event)], [direct(model, [1, 2, 3])])


def test_no_logits_are_computed(model):
    # It has no output layer, and can't be called.
    headless = SimpleNamespace(model=model.model, layers=model.layers)
    started, event = Embedder(loaded(headless)).start(job([[1, 2, 3]])).step(100)
    assert started == Started(0, 0)
    assert_near([numbers(event)], [direct(model, [1, 2, 3])])


@pytest.mark.parametrize("dimensions", [1, 5, WIDTH])
def test_fewer_dimensions_are_of_length_1_again(model, dimensions):
    (found,) = run(batch_of(model), job(INPUTS, dimensions))
    assert_near(found, [direct(model, tokens, dimensions=dimensions) for tokens in INPUTS])
    assert all(len(vector) == dimensions for vector in found)


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_what_is_refused(model, make):
    cases = [
        (job([[1]], WIDTH + 1), "dimensions", str(WIDTH)),
        (job([[1], [VOCAB_SIZE]]), "input", "vocabulary"),
        (job([[1], []]), "input", "empty"),
    ]
    backend = make(model)
    for bad, param, word in cases:
        with pytest.raises(ApiError, match=word) as caught:
            backend.insert(bad)
        assert (caught.value.status, caught.value.param) == (400, param)
    (found,) = run(backend, job([[5]]))
    assert_near(found, [direct(model, [5])])


class _Picky:
    def __init__(self, trunk):
        self._trunk = trunk

    def __call__(self, inputs, mask, cache):
        return self._trunk(inputs, cache=cache)


def _logits(model):
    return lambda inputs, cache: model(inputs, cache=cache)


@pytest.mark.parametrize("parts", [
    lambda model: {},
    lambda model: {"model": None},
    lambda model: {"model": _logits(model)},
    lambda model: {"model": _Picky(model.model)},
])  # fmt: skip
def test_a_model_without_a_trunk_is_a_400(model, parts):
    embedder = Embedder(loaded(SimpleNamespace(layers=model.layers, **parts(model))))
    with pytest.raises(ApiError, match="can't make embeddings") as caught:
        embedder.start(job([[1]]))
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_a_model_whose_vectors_would_be_wrong_is_a_400(model):
    with pytest.raises(ApiError, match="can't make embeddings: its files") as caught:
        batch_of(model, Pooling(fault="its files do not say")).insert(job([[1]]))
    assert caught.value.status == 400


def test_jobs_take_turns_and_one_input_at_a_time_has_a_cache(model):
    backend = batch_of(model)
    long, short = job([list(range(50))] * 3), job([[1], [2]])
    for a_job in (long, short):
        backend.insert(a_job)
    order = []
    while len(order) < 5:
        order += [a_job for a_job, event in backend.run_step(StepPlan(16)) if isinstance(event, Embedded)]
        assert sum(not embedding.is_between for embedding in backend._embedding) <= 1
    assert order == [long, short, long, short, long]


def test_it_runs_beside_generation_and_changes_nothing_of_it(model):
    prompts = [[1, 2, 3], list(range(100, 140))]

    def generate(*others):
        backend = batch_of(model)
        jobs = [generating(prompt, 12) for prompt in prompts]
        for a_job in (*jobs, *others):
            backend.insert(a_job)
        tokens, vectors = {a_job: [] for a_job in jobs}, []
        while any(len(found) < 12 for found in tokens.values()) or (others and len(vectors) < len(INPUTS)):
            for a_job, event in backend.run_step(StepPlan(8)):
                if isinstance(event, TokenEvent):
                    tokens[a_job].append(event.token)
                elif isinstance(event, Embedded):
                    vectors.append(numbers(event))
        return list(tokens.values()), vectors

    alone, _ = generate()
    beside, vectors = generate(job(INPUTS))
    assert beside == alone
    assert_near(vectors, [direct(model, tokens) for tokens in INPUTS])


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_job_that_is_cancelled_in_an_input_leaves_nothing(model, make):
    backend = make(model)
    gone = job([list(range(60))])
    backend.insert(gone)
    ((_, started),) = backend.run_step(StepPlan(16))
    assert started == Started(0, 0)
    backend.remove([gone])
    (found,) = run(backend, job([[1, 2, 3]]))
    assert_near(found, [direct(model, [1, 2, 3])])


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_the_budget_learns_from_full_chunks(model, make):
    backend = make(model)
    backend.insert(job([[1], list(range(200))]))
    first = backend.plan_step(0.2)
    backend.run_step(first)
    assert backend.plan_step(0.2) == first
    backend.run_step(first)
    assert backend.plan_step(1e6).n_tokens > first.n_tokens


def test_admission_counts_one_cache_for_all_that_is_embedded(model):
    size = loaded(model).kv_size
    backend = BatchBackend(replace(loaded(model), kv_size=replace(size, fixed=1000)), BatchOptions())
    embedded = [job([[1]]), job([[1] * 300])]
    assert backend.kv_bytes(dict.fromkeys(embedded, 300)) == 1000
    assert backend.kv_bytes(dict.fromkeys([*embedded, generating([1], 5), generating([1], 5)], 300)) == 3000
    wide = loaded(tiny_llama(head_dim=64))
    whole = replace(wide, kv_size=replace(size, fixed=1000), quantization=Quantization(4))
    assert BatchBackend(whole, BatchOptions()).kv_bytes({embedded[0]: 1}) == 1000
