"""The MLX backends on tiny random models: what they generate is what mlx-lm generates."""

from queue import SimpleQueue

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tinymodel import EOS, VOCAB_SIZE, loaded, tiny_gemma, tiny_llama

from mlx_serve.core import ApiError, Job, Prompt, Sampling
from mlx_serve.engine.mlx_backend import BatchBackend, BatchOptions, SingleBackend, SingleOptions

PROMPTS = [[1, 2, 3], [40, 50, 60, 70, 80], [7], list(range(100, 140)), [9, 9, 9, 9], [200, 3], [11, 12], [250] * 20]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def batch_of(model, **kwargs):
    return BatchBackend(loaded(model, **kwargs), BatchOptions())


def single_of(model, options=None, **kwargs):
    return SingleBackend(loaded(model, **kwargs), options or SingleOptions())


def job(prompt, max_tokens=12, **sampling):
    return Job("m", Prompt(tuple(prompt)), Sampling(max_tokens, **sampling), 0, SimpleQueue())


def offline(model, prompt, max_tokens=12):
    """mlx-lm's own greedy generation, up to the end token."""
    out = []
    for token, _ in generate_step(
        mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=make_prompt_cache(model)
    ):
        out.append(int(token))
        if token == EOS:
            break
    return out


def run(backend, jobs):
    """Steps until all end; the tokens of each."""
    out = {a_job: [] for a_job in jobs}
    finished = 0
    while finished < len(jobs):
        for a_job, event in backend.step():
            out[a_job].append(event)
            finished += event.finish is not None
    return [out[a_job] for a_job in jobs]


def tokens(events):
    return [event.token for event in events]


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_greedy_is_mlx_lm_s_greedy(model, make):
    for prompt in PROMPTS:
        backend = make(model)
        a = job(prompt)
        assert backend.insert(a) == 0
        assert tokens(run(backend, [a])[0]) == offline(model, prompt)


def test_greedy_in_a_mixed_batch_is_mlx_lm_s_greedy(model):
    backend = batch_of(model)
    jobs = [job(prompt, max_tokens=5 + 3 * i) for i, prompt in enumerate(PROMPTS)]
    for a in jobs:
        backend.insert(a)
    for events, a in zip(run(backend, jobs), jobs, strict=True):
        assert tokens(events) == offline(model, list(a.prompt.tokens), a.sampling.max_tokens)


def test_jobs_that_join_and_leave_change_nothing_for_the_others(model):
    backend = batch_of(model)
    a, b, c = job(PROMPTS[0], 20), job(PROMPTS[1], 20), job(PROMPTS[2], 20)
    backend.insert(a)
    seen = []
    for n_step in range(60):
        if n_step == 3:
            backend.insert(b)
        if n_step == 6:
            backend.insert(c)
        if n_step == 9:
            backend.remove([b])
        seen += [(who, event) for who, event in backend.step()]
    for who in (a, c):
        assert [e.token for w, e in seen if w is who] == offline(model, list(who.prompt.tokens), 20)
    assert [e.token for w, e in seen if w is b] == offline(model, PROMPTS[1], 20)[: sum(w is b for w, _ in seen)]


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_an_end_token_ends_a_job(model, make):
    backend = make(model)
    a = job([1, 2], logit_bias=((EOS, 100.0),))
    backend.insert(a)
    ((event,),) = run(backend, [a])
    assert (event.token, event.finish) == (EOS, "stop")


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(model, make):
    def sample(seed, companions=()):
        backend = make(model)
        jobs = [job([5, 6], temperature=1.0, top_p=0.95, xtc_probability=0.5, seed=seed), *companions]
        for a in jobs:
            backend.insert(a)
        return tokens(run(backend, jobs)[0])

    assert sample(7) == sample(7)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1
    assert sample(-1) == sample(2**64 - 1)
    if make is batch_of:
        others = [job([i], temperature=1.0, seed=i) for i in range(3)] + [job([9], temperature=1.0)]
        assert sample(7, others) == sample(7)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 10**9},
        {"temperature": 1.0, "top_k": VOCAB_SIZE},
        {"temperature": 1e-30},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.9},
        {"temperature": 1.0, "seed": 2**70},
        {"repetition_penalty": 100.0, "repetition_context_size": 0},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": ((0, -100.0), (VOCAB_SIZE - 1, 100.0))},
        {"top_logprobs": 20},
    ],
)
@pytest.mark.parametrize("make", [batch_of, single_of])
def test_no_allowed_setting_breaks_a_step(model, make, sampling):
    backend = make(model)
    a = job([1, 2, 3], 4, **sampling)
    backend.insert(a)
    (events,) = run(backend, [a])
    assert all(0 <= token < VOCAB_SIZE for token in tokens(events))


@pytest.mark.parametrize(
    "greedy", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}]
)
def test_settings_that_leave_one_token_are_greedy(model, greedy):
    backend = batch_of(model)
    a = job([1, 2, 3], **({"temperature": 1.0} | greedy))
    backend.insert(a)
    assert tokens(run(backend, [a])[0]) == offline(model, [1, 2, 3])


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_logprobs_are_those_of_the_model(model, make):
    backend = make(model)
    a = job([1, 2, 3], 3, top_logprobs=5)
    backend.insert(a)
    (events,) = run(backend, [a])
    logits = model(mx.array([[1, 2, 3]]))[0, -1]
    logprobs = (logits - mx.logsumexp(logits)).tolist()
    best = sorted(range(VOCAB_SIZE), key=lambda i: -logprobs[i])[:5]
    assert [token for token, _ in events[0].top_logprobs] == best
    assert events[0].logprob == pytest.approx(logprobs[best[0]], abs=1e-4)
    assert [p for _, p in events[0].top_logprobs] == pytest.approx([logprobs[i] for i in best], abs=1e-4)


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB_SIZE], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias"),
    ],
)
def test_ids_outside_of_the_vocabulary_never_reach_mlx(model, make, prompt, sampling, param):
    with pytest.raises(ApiError) as caught:
        make(model).insert(job(prompt, **sampling))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_prefix_is_reused_and_changes_nothing(model, make):
    backend = make(model)
    first = job(PROMPTS[3], 6)
    backend.insert(first)
    answer = tokens(run(backend, [first])[0])
    turn = [*PROMPTS[3], *answer[:-1], 5, 6, 7]
    second = job(turn, 6)
    assert backend.insert(second) >= len(PROMPTS[3])
    assert tokens(run(backend, [second])[0]) == offline(model, turn, 6)
    again = job(PROMPTS[3], 6)
    assert backend.insert(again) == len(PROMPTS[3]) - 1
    assert tokens(run(backend, [again])[0]) == answer


def test_a_cache_that_cannot_be_trimmed_is_not_reused():
    model = tiny_gemma()
    backend = batch_of(model)
    long = list(range(100, 150))
    first = job(long, 6)
    backend.insert(first)
    answer = tokens(run(backend, [first])[0])
    again = job(long, 6)
    assert backend.insert(again) == 0
    assert tokens(run(backend, [again])[0]) == answer


def test_no_cache_is_kept_when_none_is_wanted(model):
    backend = batch_of(model, max_sequences=0)
    for _ in range(2):
        a = job(PROMPTS[3], 3)
        assert backend.insert(a) == 0
        run(backend, [a])


def test_a_quantized_kv_cache_generates():
    wide = tiny_llama(head_dim=32)
    backend = single_of(wide, SingleOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0))
    for _ in range(2):
        a = job(PROMPTS[3], 4)
        backend.insert(a)
        assert len(run(backend, [a])[0]) == 4


def test_a_draft_model_changes_no_token(model):
    backend = single_of(model, draft_model=tiny_llama(seed=0))
    other = single_of(model, draft_model=tiny_llama(seed=3))
    for one in (backend, other):
        for prompt in (PROMPTS[0], PROMPTS[1]):
            a = job(prompt, 10)
            assert one.insert(a) == 0
            assert tokens(run(one, [a])[0]) == offline(model, prompt, 10)


def test_a_single_job_cancelled_in_its_prefill_ends_there(model):
    backend = single_of(model, SingleOptions(prefill_step_size=4))
    a, b = job(PROMPTS[3]), job([1, 2])
    backend.insert(a)
    a.cancelled = True
    assert backend.step() == []
    backend.remove([a])
    backend.insert(b)
    assert tokens(run(backend, [b])[0]) == offline(model, [1, 2])
