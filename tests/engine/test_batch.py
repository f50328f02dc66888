"""The batch on tiny random models: what it generates is what mlx-lm generates."""

import json
import random
import re
from dataclasses import replace
from queue import SimpleQueue

import jsonschema
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_tokenizer

from benchmarks.structured import random_schema
from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.engine.cache.size import measure
from mlx_serve.engine.generate import constraints
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.engine.generate.sampling import make_processors
from mlx_serve.engine.models.tokenizer import MlxTokenizer
from mlx_serve.text.grammar import Rule, compile_rule
from mlx_serve.values import ApiError, Failed, Gate, Grammar, Inputs, Job, Prompt, Sampling, Started, TokenEvent
from tests.engine.tinymodel import EOS, VOCAB_SIZE, kv_options, loaded, one_by_one, tiny_llama, write_model

GAP_S = 0.2
PROMPTS = [[1, 2, 3], [40, 50, 60, 70, 80], [7], list(range(100, 140)), [9, 9, 9, 9], [200, 3], [11, 12], [250] * 20]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def batch_of(model, vocabulary=None, **kwargs):
    return BatchBackend(replace(loaded(model, **kwargs), vocabulary=vocabulary), BatchOptions())


def single_of(model, options=None, vocabulary=None, **kwargs):
    return one_by_one(replace(loaded(model, **kwargs), vocabulary=vocabulary), options)


def job(prompt, max_tokens=12, **sampling):
    return Job("m", Prompt(tuple(prompt)), Sampling(max_tokens, **sampling), 0, SimpleQueue())


def offline(model, prompt, max_tokens=12, **options):
    """mlx-lm's own greedy generation, up to the end token."""
    out = []
    for token, _ in generate_step(
        mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=make_prompt_cache(model), **options
    ):
        out.append(int(token))
        if token == EOS:
            break
    return out


def run(backend, jobs):
    """Steps until all end; the events of each that tell of a token."""
    out = {a_job: [] for a_job in jobs}
    finished = 0
    while finished < len(jobs):
        for a_job, event in backend.step(GAP_S):
            if isinstance(event, TokenEvent):
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
        backend.insert(a)
        assert tokens(run(backend, [a])[0]) == offline(model, prompt)


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_only_allowed_tokens_come(model, make):
    allowed = (3, 77, 150)
    wild, tame = job(PROMPTS[0], 30, temperature=1.0, seed=1), job(PROMPTS[0], 30, temperature=1.0, seed=1)
    tame.sampling = replace(tame.sampling, allowed_token_ids=allowed)
    found = []
    for a_job in (wild, tame):
        backend = make(model)
        backend.insert(a_job)
        found.append(tokens(run(backend, [a_job])[0]))
    assert not set(found[0]) <= set(allowed)
    assert set(found[1]) == set(allowed)


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids"])
def test_ids_that_are_no_tokens_are_refused(model, make, field):
    with pytest.raises(ApiError) as refused:
        make(model).insert(job([1], **{field: (VOCAB_SIZE,)}))
    assert (refused.value.status, refused.value.param) == (400, field)


def test_stop_tokens_wait_for_min_tokens(model):
    stops = tuple(token for token in range(VOCAB_SIZE) if token != 9)
    a_job = job([1], 6, min_tokens=4, stop_token_ids=stops)
    backend = batch_of(model)
    backend.insert(a_job)
    assert tokens(run(backend, [a_job])[0])[:4] == [9] * 4


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
        seen += [(who, event) for who, event in backend.step(GAP_S) if isinstance(event, TokenEvent)]
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
@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5}])
def test_logprobs_are_computed_in_float32(make, sampling):
    coarse = tiny_llama()
    coarse.set_dtype(mx.bfloat16)
    backend = make(coarse)
    a = job([1, 2, 3], 4, top_logprobs=3, **sampling)
    backend.insert(a)
    (events,) = run(backend, [a])
    cache = make_prompt_cache(coarse)
    coarse(mx.array([[1, 2]]), cache=cache)
    last = 3
    for event in events:
        logits = coarse(mx.array([[last]]), cache=cache)[0, -1].astype(mx.float32)
        row = logits - mx.logsumexp(logits)
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-5)
        assert [p for _, p in event.top_logprobs] == pytest.approx(sorted(row.tolist())[:-4:-1], abs=1e-5)
        last = event.token


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


def test_predicted_ids_outside_of_the_vocabulary_never_reach_mlx(model):
    one = job([1])
    one.prediction = (2, VOCAB_SIZE)
    with pytest.raises(ApiError) as caught:
        batch_of(model).insert(one)
    assert (caught.value.status, caught.value.param) == (400, "prediction")


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_penalties_do_right_by_a_prompt_of_one_token(model, make):
    backend = make(model)
    a = job([7], 8, presence_penalty=100.0)
    backend.insert(a)
    found = tokens(run(backend, [a])[0])
    assert found[0] == offline(model, [7])[0]
    # No token comes twice.
    assert len(set(found)) == len(found) == 8


def test_a_batch_is_charged_its_longest_sequence_for_each_of_them(model):
    size = measure([model])
    backend = BatchBackend(replace(loaded(model), kv_size=size), BatchOptions())
    short, long, other = job([1] * 10), job([1] * 1000), job([1] * 10)
    assert size.bytes(1500) > size.bytes(30) > 0
    assert backend.kv_bytes({}) == 0
    assert backend.kv_bytes({short: 30}) == size.bytes(30)
    assert backend.kv_bytes({short: 30, long: 1500, other: 30}) == 3 * size.bytes(1500)
    embedding, another = job([1] * 2000, 0), job([1] * 10, 0)
    embedding.inputs = another.inputs = Inputs((embedding.prompt.tokens,))
    # Of what is embedded, one is there at a time, and has no output.
    assert backend.kv_bytes({embedding: 2000, another: 10}) == size.bytes(2000)
    assert backend.kv_bytes({short: 30, long: 1500, embedding: 2000}) == 2 * size.bytes(1500) + size.bytes(2000)


def test_a_quantized_kv_cache_generates_what_mlx_lm_does_with_one():
    wide = tiny_llama(head_dim=32)
    quantization = Quantization(4, 32, 0)
    want = offline(wide, PROMPTS[3], **kv_options(quantization))
    # Four bits are felt, or nothing would be shown here.
    assert want != offline(wide, PROMPTS[3])
    backend = BatchBackend(replace(loaded(wide), quantization=quantization), BatchOptions())
    # The second time out of the prefix cache, which holds the first one's.
    for cached_tokens in (0, len(PROMPTS[3]) - 1):
        a = job(PROMPTS[3])
        backend.insert(a)
        started, *begun = [event for _, event in backend.step(GAP_S)]
        assert started == Started(0, cached_tokens)
        assert tokens([*begun, *run(backend, [a])[0]]) == want


def test_a_single_job_is_cancelled_in_its_prefill(model):
    backend = single_of(model, BatchOptions(prefill_step_size=4))
    a, b = job(PROMPTS[3]), job([1, 2])
    backend.insert(a)
    assert backend.step(GAP_S) == [(a, Started(0, 0))]
    assert backend.step(GAP_S) == []
    assert a.n_prefilled == 8
    backend.remove([a])
    backend.insert(b)
    assert tokens(run(backend, [b])[0]) == offline(model, [1, 2])


def test_a_job_in_the_batch_tells_how_much_of_its_prompt_is_done(model):
    backend = BatchBackend(loaded(model), BatchOptions(prefill_step_size=16))
    a = job(PROMPTS[3])
    backend.insert(a)
    done = []
    while not done or done[-1] < len(PROMPTS[3]) - 1:
        backend.step(GAP_S)
        done.append(a.n_prefilled)
    assert len(done) > 1
    assert done == sorted(set(done))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return MlxTokenizer(load_tokenizer(write_model(tmp_path_factory.mktemp("tiny")), {}, eos_token_ids=[EOS]))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    pytest.importorskip("llguidance")
    return Vocabulary(tokenizer, VOCAB_SIZE)


def grammar(kind, value):
    return Grammar(compile_rule(Rule(kind, value, "p")), n_bytes=1)


def text_of(tokenizer, events):
    return tokenizer.decode([event.token for event in events if event.finish != "stop"])


RECURSIVE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("seed", range(5))
def test_constrained_answers_match_their_schemas(model, vocabulary, tokenizer, seed):
    rng = random.Random(seed)
    schemas = [*(random_schema(rng) for _ in range(8)), RECURSIVE]
    backend = batch_of(model, vocabulary)
    jobs = [
        job([1, 2, i], 200, temperature=1.0, seed=i, grammar=grammar("json_schema", schema))
        for i, schema in enumerate(schemas)
    ]
    for a in jobs:
        backend.insert(a)
    finishes = set()
    for events, schema, a in zip(run(backend, jobs), schemas, jobs, strict=True):
        finishes.add(events[-1].finish)
        if events[-1].finish == "stop":
            jsonschema.validate(
                json.loads(text_of(tokenizer, events)), schema, format_checker=jsonschema.FormatChecker()
            )
        else:
            prefix = tokens(events)
            assert vocabulary.matcher(a.sampling.grammar).validate_tokens(prefix) == len(prefix) == 200
    assert "stop" in finishes


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[ab]{3,5}c", "[ab]{3,5}c"),
        ("choice", ["yes", "no"], "yes|no"),
        ("grammar", 'root ::= "x" digit{2}\ndigit ::= [0-9]', "x[0-9]{2}"),
    ],
)
def test_other_constraints_hold_too(model, vocabulary, tokenizer, make, kind, value, pattern):
    backend = make(model, vocabulary=vocabulary)
    for seed in range(3):
        a = job([5, 6], 50, temperature=1.0, seed=seed, grammar=grammar(kind, value), logit_bias=((EOS, 100.0),))
        backend.insert(a)
        (events,) = run(backend, [a])
        assert events[-1].finish == "stop"
        assert re.fullmatch(pattern, text_of(tokenizer, events))


def test_constrained_jobs_change_nothing_for_the_others(model, vocabulary):
    backend = batch_of(model, vocabulary)
    text = grammar("regex", "[a-z]{40}")
    free = [job(prompt, 20) for prompt in PROMPTS[:4]]
    bound = [job(prompt, 30, temperature=1.0, seed=1, grammar=text) for prompt in PROMPTS[:4]]
    for pair in zip(free, bound, strict=True):
        for a in pair:
            backend.insert(a)
    results = run(backend, [*free, *bound])
    for events, a in zip(results, free, strict=False):
        assert tokens(events) == offline(model, list(a.prompt.tokens), 20)
    alone = batch_of(model, vocabulary)
    again = job(PROMPTS[2], 30, temperature=1.0, seed=1, grammar=text)
    alone.insert(again)
    assert tokens(run(alone, [again])[0]) == tokens(results[4 + 2])


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_grammar_waits_for_the_reasoning_to_end(model, vocabulary, tokenizer, make):
    start, pad = tokenizer.encode("<|x|>", special=False)[0], tokenizer.encode("<|pad|>", special=False)[0]
    backend = make(model, vocabulary=vocabulary)
    gate = Gate(until=(pad,), detours=(start,))
    bias = ((start, 50.0), (pad, 52.0), (EOS, 100.0))
    a = job([1, 2], 200, temperature=1.0, seed=3, grammar=grammar("choice", ["yes"]), gate=gate, logit_bias=bias)
    backend.insert(a)
    (events,) = run(backend, [a])
    out = tokens(events)
    assert out[0] == start
    assert pad in out
    assert tokenizer.decode(out[out.index(pad) + 1 : -1]) == "yes"
    assert events[-1].finish == "stop"


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_grammar_that_fails_while_it_generates_fails_its_job_alone(model, vocabulary, make, monkeypatch):
    monkeypatch.setattr(constraints, "_BUDGET_S", -0.001)
    monkeypatch.setattr(constraints, "_BUDGET_PER_TOKEN_S", 0.0)
    backend = make(model, vocabulary=vocabulary)
    a, b = job([1, 2], 5, grammar=grammar("regex", "a{9}")), job([1, 2, 3], 5)
    backend.insert(a)
    if make is batch_of:
        backend.insert(b)
    seen = {a: [], b: []}
    while not seen[a]:
        for who, event in backend.step(GAP_S):
            if not isinstance(event, Started):
                seen[who].append(event)
    (failed,) = seen[a]
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.index) == (400, 0)
    if make is single_of:
        backend.insert(b)
    assert tokens(seen[b] + run(backend, [b])[0]) == offline(model, [1, 2, 3], 5)


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_grammar_that_cannot_be_compiled_or_served_is_refused(model, vocabulary, make):
    bad = json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]})
    for backend in (make(model), make(model, vocabulary=vocabulary)):
        with pytest.raises(ApiError) as caught:
            backend.insert(job([1], grammar=Grammar(bad, 1)))
        assert caught.value.status == 400


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_the_end_comes_when_it_may(model, make):
    backend = make(model)
    for sampling, n_output in (({"min_tokens": 5}, 6), ({"ignore_eos": True}, 9)):
        a = job([1, 2], 9, logit_bias=((EOS, 100.0),), **sampling)
        backend.insert(a)
        (events,) = run(backend, [a])
        assert len(events) == n_output


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize(
    "sampling",
    [{"logit_bias": ((7, 100.0),)}, {"repetition_penalty": 2.0}, {"min_tokens": 3}, {"presence_penalty": 2.0}],
)
def test_logprobs_are_the_model_s_own_whatever_changes_the_choice(model, make, sampling):
    backend = make(model)
    a = job([1, 2, 3], 4, top_logprobs=2, **sampling)
    backend.insert(a)
    (events,) = run(backend, [a])
    logits = model(mx.array([[1, 2, 3, *tokens(events)[:-1]]]))[0, 2:]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for row, event in zip(logprobs, events, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-3)
        assert event.top_logprobs[0][1] == pytest.approx(float(mx.max(row)), abs=1e-3)


def penalized(sampling, prompt, output):
    """The logits of zeros after so many steps."""
    processors = make_processors(Sampling(9, **sampling))
    logits = mx.zeros((1, 8))
    for n in range(len(output) + 1):
        result = logits
        for processor in processors:
            result = processor(mx.array(prompt + output[:n]), result)
    return result[0].tolist()


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        ({"presence_penalty": 1.0}, [0, -1, -1, -1, 0, 0, 0, 0]),
        ({"frequency_penalty": 0.5}, [0, -1.5, -0.5, -0.5, 0, 0, 0, 0]),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, [0, -2.5, -1.5, -1.5, 0, 0, 0, 0]),
        ({"presence_penalty": -1.0, "presence_context_size": 2}, [0, 1, 0, 1, 0, 0, 0, 0]),
        ({"frequency_penalty": 1.0, "frequency_context_size": 3}, [0, -2, 0, -1, 0, 0, 0, 0]),
    ],
)
def test_penalties_look_at_the_output_alone(sampling, want):
    assert penalized(sampling, [5, 6, 5], [1, 2, 1, 1, 3]) == want
    assert penalized(sampling, [5, 6, 5], []) == [0] * 8


def test_xtc_drops_all_tokens_over_the_threshold_but_the_least_likely():
    from mlx_serve.engine.generate.sampling import make_sampler

    probs = mx.array([[0.4, 0.3, 0.2, 0.1]])
    always = Sampling(1, temperature=1.0, xtc_probability=1.0, xtc_threshold=0.15)
    draw = make_sampler(always, vocab_size=4, kept_by_xtc=())
    assert {int(draw(mx.log(probs))[0]) for _ in range(200)} == {2, 3}
    keep = make_sampler(always, vocab_size=4, kept_by_xtc=(0,))
    assert 0 in {int(keep(mx.log(probs))[0]) for _ in range(200)}


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_what_all_logits_have_in_common_changes_no_draw(model, make):
    """The filters sum exponentials, and a bias may move those of the logits out of the range of float32."""

    def drawn(more):
        backend = make(model)
        bias = tuple((token, more) for token in range(VOCAB_SIZE))
        one = job([1, 2, 3], 20, temperature=1.0, top_p=0.6, seed=4, logit_bias=bias)
        backend.insert(one)
        return tokens(run(backend, [one])[0])

    assert drawn(-100.0) == drawn(0.0) == drawn(100.0)


@pytest.mark.parametrize("top_p", [1e-46, 1e-40, 1e-9])
def test_a_nucleus_too_small_for_float32_is_the_likeliest_token(model, top_p):
    backend = batch_of(model)
    a = job([1, 2, 3], temperature=1.0, top_p=top_p)
    backend.insert(a)
    assert tokens(run(backend, [a])[0]) == offline(model, [1, 2, 3])
