"""Drafts in the batch change no token, whatever is drafted and however tokens are chosen."""

import random
from dataclasses import replace
from functools import cache
from itertools import count
from queue import SimpleQueue
from types import MappingProxyType

import pytest

from mlx_serve.engine.backend import StepPlan
from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.draft_length import LENGTHS, DraftLength
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.text.grammar import Rule, compile_rule
from mlx_serve.values import Gate, Grammar, Job, Prompt, Sampling, Started
from tests.engine.fuzz import LONGCAT
from tests.engine.tinymodel import (
    EOS,
    LATENT,
    VOCAB_SIZE,
    loaded,
    nearly,
    one_by_one,
    tiny,
    tiny_gemma,
    tiny_lfm2,
    tiny_llama,
)

# Texts that repeat themselves, so that drafts are made, and of different lengths.
PROMPTS = [[1, 2, 3, 4, 5] * 6, [9, 8, 7] * 20, [5, 6, 5, 6, 5, 6], [*range(40, 60), 3, *range(40, 52)]]


class Always(DraftLength):
    """Drafts so many tokens whether it pays or not."""

    def __init__(self, n=None, seed=0):
        super().__init__()
        self._n, self._rng = n, random.Random(seed)

    def choose(self, shape, rows):
        return self._rng.choice([0, *LENGTHS]) if self._n is None else self._n


def step(backend):
    return backend.run_step(StepPlan(64, n_drafts=backend._rows.plan()))


def drafting(whole, proposers, length, draft_model=None, make=BatchBackend):
    """A backend with drafts of these proposers, whose lengths ``length`` chooses."""
    if "model" in proposers:
        draft_model = nearly(tiny_llama()) if draft_model is None else draft_model
        whole = replace(whole, draft_model=draft_model, prefix_cache=PrefixCache(10, None))
    backend = make(whole, BatchOptions(draft_ngram="look-up" in proposers))
    backend._rows.draft_length = length
    return backend


def job(prompt, max_tokens=24, **sampling):
    return Job("m", Prompt(tuple(prompt)), Sampling(max_tokens, **sampling), 0, SimpleQueue())


def run(backend, jobs):
    """What comes of jobs that are inserted in turn, with some steps between."""
    events, waiting = {one: [] for one in jobs}, list(jobs)
    while waiting or any(not seen or getattr(seen[-1], "finish", "end") is None for seen in events.values()):
        if waiting:
            backend.insert(waiting.pop(0))
        for _ in range(3):
            for one, event in step(backend):
                if not isinstance(event, Started):
                    events[one].append(event)
    return [[(event.token, event.finish, event.top_logprobs) for event in events[one]] for one in jobs]


def replace_queue(one, prediction=()):
    return Job(one.model, one.prompt, one.sampling, one.index, SimpleQueue(), prediction=prediction)


SAMPLINGS = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 3},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 4},
    "top-k and min-p": {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": 5},
    "xtc": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 6},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "penalties and a seed": {"temperature": 0.7, "seed": 8, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((5, 4.0), (9, 3.0))},
    "min_tokens": {"min_tokens": 9, "logit_bias": ((EOS, 5.0),)},
    "an early end": {"logit_bias": ((EOS, 1.0),)},
}


@cache
def without_drafts(name):
    jobs = [job(prompt, n, **SAMPLINGS[name]) for prompt, n in zip(PROMPTS * 2, [1, 2, 24, 40] * 2, strict=True)]
    return jobs, run(BatchBackend(loaded(tiny_llama()), BatchOptions()), jobs)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(
    ("proposer", "length"),
    [
        ("look-up", 7),
        ("look-up", None),
        ("prediction", None),
        ("look-up, prediction", None),
        ("model", 3),
        ("model", None),
        ("look-up, prediction, model", None),
    ],
)
def test_drafts_change_no_token(name, proposer, length):
    jobs, want = without_drafts(name)
    predicts = "prediction" in proposer
    again = [
        replace_queue(one, prediction=edited([token for token, *_ in output]) if predicts else ())
        for one, output in zip(jobs, want, strict=True)
    ]
    backend = drafting(loaded(tiny_llama()), proposer, Always(length))
    assert run(backend, again) == want
    n_drafted, n_accepted = backend._rows.n_drafted, backend._rows.n_accepted
    assert n_drafted > 5
    counts = sum(one.n_accepted for one in again), sum(one.n_rejected for one in again)
    if predicts:
        assert all(counts)
        assert n_accepted > 5
    if proposer in ("look-up", "prediction", "model"):
        assert counts == ((n_accepted, n_drafted - n_accepted) if predicts else (0, 0))


def edited(tokens):
    """The output as a client might predict it: a token is missing, another is wrong, and one was not foreseen."""
    return (*tokens[:5], *tokens[6:11], 1, *tokens[12:20], 2, *tokens[20:])


@pytest.mark.parametrize(
    "make",
    [tiny_gemma, lambda: tiny(LATENT), lambda: tiny(LONGCAT), lambda: tiny_llama(head_dim=32)],
    ids=["windows", "latent", "lists", "quantized"],
)
@pytest.mark.parametrize("how", ["look-up", "look-up, alone", "model"])
def test_drafts_change_no_token_with_any_cache(make, how, request):
    model = make()
    whole = loaded(model)
    if "quantized" in request.node.name:
        whole = replace(whole, quantization=Quantization(8, 32, start=0))
    jobs = [job(prompt, 30) for prompt in PROMPTS]
    want = run(BatchBackend(whole, BatchOptions()), jobs)
    again = list(map(replace_queue, jobs))
    if how == "look-up, alone":
        seen = [run(drafting(whole, "look-up", Always(3), make=one_by_one), [one])[0] for one in again]
    else:
        backend = drafting(whole, how, Always(5), nearly(make()))
        seen = run(backend, again)
        assert backend._rows.n_accepted > 0
    assert [[token for token, *_ in one] for one in seen] == [[token for token, *_ in one] for one in want]


@pytest.mark.parametrize("start", [37, 40, 43])
def test_drafts_do_not_delay_the_quantization_of_a_cache(start):
    # So few bits that the tokens tell where they begin.
    whole = replace(loaded(tiny_llama(head_dim=32)), quantization=Quantization(2, 32, start=start))
    jobs = [job(PROMPTS[0], 30)]
    want = run(BatchBackend(whole, BatchOptions()), jobs)
    whole = replace(whole, prefix_cache=PrefixCache(10, None))
    backend = drafting(whole, "prediction", Always(7))
    assert run(backend, [replace_queue(jobs[0], prediction=[token for token, *_ in want[0]])]) == want
    assert backend._rows.n_accepted > 20


class Words:
    """A token for each byte, two that end the output, and words."""

    words = (
        *("{", '{"', 'name": ', '": ', '", "', "name", "na", "am"),
        *("tru", "true", "fa", ", ", "12", '["', "ab", "abab"),
    )
    n_tokens = VOCAB_SIZE + len(words)
    eos_ids = frozenset([EOS, 258])
    special_ids = frozenset([256, 259])
    controls = MappingProxyType({EOS: "<end>"})

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b"" if token < VOCAB_SIZE else self.words[token - VOCAB_SIZE].encode()


def record(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


RECORD = record(name={"type": "string", "maxLength": 3})
RULES = [
    ("json_schema", record(name={"type": "boolean"}, nature={"enum": ["naive", "name"]}, fame={"type": "integer"})),
    ("json_schema", {"type": "array", "items": RECORD, "minItems": 3, "maxItems": 4}),
    ("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 12}),
    ("choice", ["true", "trust no name", "abababababab"]),
    ("regex", "(ab){3,20}(name|\\{true)+!"),
]
GRAMMARS = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "min_tokens": {"min_tokens": 12, "temperature": 1.0, "seed": 5, "logit_bias": ((EOS, 9.0), (258, 9.0))},
    "behind reasoning": {
        "gate": Gate(waiting=True, until=(260,)),
        "logit_bias": ((260, 3.0),),
        "temperature": 1.0,
        "seed": 6,
    },
    "calls": {"gate": Gate(exits=(50, 51), until=(7,), detours=(6,)), "logit_bias": ((6, 3.0), (7, 4.0), (50, 4.0))},
}


@pytest.fixture(scope="module")
def vocabulary():
    pytest.importorskip("llguidance")
    return Vocabulary(Words(), Words.n_tokens)


@pytest.mark.parametrize("name", GRAMMARS)
def test_drafts_change_no_token_of_a_grammar(name, vocabulary):
    model = tiny_llama(vocab_size=Words.n_tokens + 3)
    whole = replace(loaded(model), vocabulary=vocabulary, vocab_size=Words.n_tokens + 3, eos_ids=Words.eos_ids)
    grammars = [Grammar(compile_rule(Rule(*rule, "p")), n_bytes=1) for rule in RULES]
    jobs = [
        job(prompt, 60, **GRAMMARS[name] | {"grammar": grammar})
        for prompt, grammar in zip([*PROMPTS, PROMPTS[0], PROMPTS[1]], [*grammars, None], strict=False)
    ]
    want = run(BatchBackend(whole, BatchOptions()), jobs)
    for seed, proposers in enumerate(["look-up", "prediction", "model", "look-up, model"]):
        again = [
            replace_queue(one, prediction=edited([token for token, *_ in output]) if "prediction" in proposers else ())
            for one, output in zip(jobs, want, strict=True)
        ]
        backend = drafting(whole, proposers, Always(seed=seed), nearly(tiny_llama(vocab_size=Words.n_tokens + 3)))
        assert run(backend, again) == want
        assert backend._rows.n_drafted > 20
        # The draft model knows of no grammar, which cuts its drafts.
        assert backend._rows.n_accepted > 20 or proposers == "model"


@pytest.mark.parametrize("proposer", ["look-up", "model"])
def test_log_probabilities_of_drafted_tokens_are_theirs(proposer):
    model = tiny_llama()
    jobs = [job(PROMPTS[0], 20, top_logprobs=2), job(PROMPTS[1], 20, top_logprobs=2, temperature=1.0, seed=1)]
    want = run(BatchBackend(loaded(model), BatchOptions()), jobs)
    backend = drafting(loaded(model), proposer, Always(3))
    got = run(backend, [replace_queue(one) for one in jobs])
    for one, other in zip(got, want, strict=True):
        for (token, _, top), (right, _, right_top) in zip(one, other, strict=True):
            assert token == right
            assert [n for n, _ in top] == [n for n, _ in right_top]
            assert [p for _, p in top] == pytest.approx([p for _, p in right_top], abs=1e-3)


def test_what_cannot_be_cut_back_drafts_nothing():
    model = tiny_lfm2()
    want = run(BatchBackend(loaded(model), BatchOptions()), jobs := [job(prompt) for prompt in PROMPTS])
    backend = drafting(loaded(model), "look-up", Always(3))
    assert run(backend, [replace_queue(one) for one in jobs]) == want
    assert backend._rows.n_drafted == 0


@pytest.mark.parametrize("proposer", ["look-up", "prediction"])
def test_a_model_whose_drafts_cannot_be_checked_gets_none(proposer):
    whole = replace(loaded(tiny_llama()), undrafted="a test says so")
    want = run(BatchBackend(whole, BatchOptions()), jobs := [job(prompt) for prompt in PROMPTS])
    backend = drafting(whole, proposer, Always(3))
    again = [replace_queue(one, [token for token, *_ in seen]) for one, seen in zip(jobs, want, strict=True)]
    assert run(backend, again) == want
    assert backend._rows.n_drafted == 0


def test_a_step_may_give_several_tokens_of_a_job():
    """The model repeats its prompt where each token's likeliest follower is fixed by a bias to one token."""
    backend = drafting(loaded(tiny_llama()), "look-up", Always(7))
    one = job([4] * 30, 20, logit_bias=((4, 100.0),))
    backend.insert(one)
    n_steps, tokens = 0, []
    while len(tokens) < 20:
        tokens += [event.token for _, event in step(backend) if not isinstance(event, Started)]
        n_steps += 1
    assert tokens == [4] * 20
    assert n_steps < 12
    assert backend._rows.n_accepted >= 10


def test_a_bank_that_drafts_nothing_keeps_no_other_from_it(monkeypatch):
    monkeypatch.setattr("mlx_serve.engine.cache.banks._FIRST_BANK", 512)
    whole = replace(loaded(tiny_llama()), eos_ids=frozenset())
    long, answer = job([9, 8, 7] * 200, 400), 150
    ((*tokens,),) = run(
        BatchBackend(replace(whole, prefix_cache=PrefixCache(0, None)), BatchOptions()), [job(PROMPTS[0], answer)]
    )
    predicted = replace_queue(job(PROMPTS[0], answer), [token for token, *_ in tokens])
    backend = BatchBackend(replace(whole, prefix_cache=PrefixCache(0, None)), BatchOptions())
    # Each reading of the clock is a second later, so a step costs the same with drafts and without.
    backend._rows._clock = map(float, count()).__next__
    for one in (long, predicted):
        backend.insert(one)
    n_steps = n_banks = 0
    while predicted.n_output < answer and n_steps < answer:
        n_steps += 1
        n_banks = max(n_banks, len(backend._rows._banks))
        predicted.n_output += sum(one is predicted and not isinstance(event, Started) for one, event in step(backend))
    assert n_banks == 2
    assert n_steps < answer / 4
