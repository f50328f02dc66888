"""Jobs that are taken out of a backend and put back: their tokens are those that would have come."""

from dataclasses import replace
from queue import SimpleQueue

import pytest

from mlx_serve.engine.backend import StepPlan, is_last
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.text.grammar import Rule, compile_rule
from mlx_serve.values import Grammar, Job, Prompt, PromptLogprobs, Sampling, Started, TokenEvent
from tests.engine.test_drafts_in_batch import Always, drafting
from tests.engine.tinymodel import EOS, VOCAB_SIZE, loaded, mlx_tokenizer, one_by_one, tiny_gemma, tiny_lfm2, tiny_llama

PROMPT = tuple(range(100, 140))
# Everything that has a state beside the KV cache.
ALL = {
    "temperature": 1.0,
    "seed": 7,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": ((ord("a"), 2.0),),
    "top_logprobs": 2,
    "min_tokens": 3,
}


def batch_of(model, vocabulary=None):
    return BatchBackend(replace(loaded(model), vocabulary=vocabulary), BatchOptions())


def single_of(model, vocabulary=None):
    return one_by_one(replace(loaded(model), vocabulary=vocabulary))


def drafts_of(model, vocabulary=None):
    return drafting(replace(loaded(model), vocabulary=vocabulary), "look-up, model", Always())


MAKES = [batch_of, single_of, drafts_of]


def job(max_tokens=16, **sampling):
    return Job("m", Prompt(PROMPT), Sampling(max_tokens, **sampling), 0, SimpleQueue())


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def vocabulary():
    pytest.importorskip("llguidance")
    return Vocabulary(mlx_tokenizer(), VOCAB_SIZE)


def run(backend, a_job, between=list, n_tokens=64):
    """The job's events; those that ``between`` returns, called after each step, come between them."""
    backend.insert(a_job)
    events = []
    while not (events and is_last(events[-1])):
        plan = StepPlan(n_tokens, n_drafts=backend._rows.plan())
        events += [event for _, event in backend.run_step(plan)]
        if not (events and is_last(events[-1])):
            events += between()
    return events


def paused(backend, a_job, *, evicts=False):
    """A function that pauses a job and puts it back, and returns the events of that; its cache may be evicted."""

    def pause():
        if evicts and not backend.n_decoding:
            # A prompt that loses its cache again and again would never end.
            return []
        events = [event for _, event in backend.pause([a_job])]
        if not any(map(is_last, events)):
            assert backend.n_decoding == 0
            if evicts:
                backend.shrink_cache(0)
            backend.insert(a_job)
        return events

    return pause


def same(got, want):
    """Whether two lists of events are alike, but for rounding and for what a pause may have computed before."""
    assert [type(event) for event in got] == [type(event) for event in want]
    tokens = [(event.token, event.finish) for event in want if isinstance(event, TokenEvent)]
    assert [(event.token, event.finish) for event in got if isinstance(event, TokenEvent)] == tokens
    for one, other in zip(got, want, strict=True):
        if isinstance(one, TokenEvent) and one.logprob is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]
        if isinstance(one, PromptLogprobs):
            scores = [score for score, _ in other.logprobs]
            assert [score for score, _ in one.logprobs] == pytest.approx(scores, abs=1e-3)


@pytest.mark.parametrize(
    ("make", "evicts"),
    [(batch_of, False), (batch_of, True), (single_of, False), (single_of, True), (drafts_of, False), (drafts_of, True)],
)
def test_a_job_goes_on_as_if_nothing_had_been(model, vocabulary, make, evicts):
    text = Grammar(compile_rule(Rule("regex", "[a-z]{9}[0-9]{2}[A-Z]*", "p")), n_bytes=1)
    for sampling in (ALL, ALL | {"grammar": text}):
        want = run(make(model, vocabulary), job(12, **sampling))
        assert len(want) > 9
        a_job, backend = job(12, **sampling), make(model, vocabulary)
        same(run(backend, a_job, paused(backend, a_job, evicts=evicts)), want)


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize("model_of", [tiny_gemma, tiny_lfm2])
def test_caches_that_cannot_be_cut_back_are_no_obstacle(make, model_of):
    model = model_of()
    want = run(make(model), job(24, **ALL))
    a_job, backend = job(24, **ALL), make(model)
    same(run(backend, a_job, paused(backend, a_job)), want)


@pytest.mark.parametrize("model_of", [tiny_llama, tiny_gemma, tiny_lfm2])
def test_a_kept_cache_is_not_computed_again(model_of):
    backend, a_job = batch_of(model_of()), job(24)
    computed = []
    run_prefill = backend._budget.note
    backend._budget.note = lambda n, seconds: (computed.append(n), run_prefill(n, seconds))
    run(backend, a_job, paused(backend, a_job))
    assert sum(computed) == len(PROMPT) - 1


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_pause_in_the_prompt_tells_its_start_and_its_scores_once(model, make):
    for sampling in ({"prompt_logprobs": 0}, {}):
        want = run(make(model), job(4, **sampling), n_tokens=8)
        assert [type(event) for event in want].count(Started) == 1
        a_job, backend = job(4, **sampling), make(model)
        # Scoring begins again each time, so it has to be left alone at last.
        pauses = [paused(backend, a_job)] * 4
        same(run(backend, a_job, lambda pauses=pauses: pauses.pop()() if pauses else [], n_tokens=8), want)


@pytest.mark.parametrize("bits", [None, 8])
def test_what_paused_jobs_have_left_is_dropped_and_taken_over_for_no_other(bits):
    """Samples of one prompt, and others that generate the same while they are paused."""
    model = tiny_llama(hidden_size=128)
    backend = BatchBackend(replace(loaded(model), prefix_cache=PrefixCache(10, None, bits=bits)), BatchOptions())
    kept = backend._loaded.prefix_cache
    samples = [job(40, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2)]
    twins = [job(60, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2)]
    n_tokens = dict.fromkeys([*samples, *twins], 0)

    def note(events):
        for one, event in events:
            n_tokens[one] += isinstance(event, TokenEvent)

    def run_until(jobs, n):
        while any(n_tokens[one] < n for one in jobs):
            note(backend.run_step(StepPlan(64)))

    for one in samples:
        backend.insert(one)
    run_until(samples, 5)
    note(backend.pause(samples))
    left = {one: kept._left[one].cache for one in samples}
    # One begins beside a paused job, is taken out before it is ready, and comes back.
    backend.insert(samples[0])
    backend.pause(samples[:1])
    for one in twins:
        backend.insert(one)
    run_until(twins, 60)
    went_on_with = {}
    join = backend._rows.join
    backend._rows.join = lambda row, cache: (went_on_with.update({len(row.tokens): cache}), join(row, cache))
    for one in samples:
        backend.insert(one)
        assert kept._claims[one].cache is left[one]
        went_on_with.clear()
        note(backend.run_step(StepPlan(64)))
        assert all(a is b for a, b in zip(*went_on_with.values(), left[one], strict=True))
    run_until(samples, 40)
    assert not kept._left
    assert not kept._places


def test_the_token_that_was_drawn_may_be_the_last(model):
    backend = batch_of(model)
    want = [event.token for event in run(batch_of(model), job(8)) if isinstance(event, TokenEvent)]
    for sampling, finish in ((Sampling(2), "length"), (Sampling(9, logit_bias=((EOS, 1e4),), min_tokens=1), "stop")):
        a_job = replace(job(), sampling=sampling)
        backend.insert(a_job)
        events = []
        while not any(isinstance(event, TokenEvent) for event in events):
            events = [event for _, event in backend.run_step(StepPlan(64))]
        [(_, last)] = backend.pause([a_job])
        assert last.finish == finish
        assert last.token == (want[1] if finish == "length" else EOS)
        assert not backend.run_step(StepPlan(64))


@pytest.mark.parametrize("make", MAKES)
def test_a_job_that_is_removed_while_it_is_paused_leaves_nothing(model, make):
    backend, a_job = make(model), job(**ALL)
    backend.insert(a_job)
    events = []
    while not any(isinstance(event, TokenEvent) for event in events):
        events = [event for _, event in backend.run_step(StepPlan(64))]
    backend.pause([a_job])
    backend.remove([a_job])
    # From its beginning.
    assert any(isinstance(event, Started) for event in run(backend, a_job))
