"""Reasoning whose budget is spent, in the MLX backends: its closing tokens come, and then the model's own ones."""

import mlx.core as mx
import pytest
from mlx_lm.utils import load_tokenizer

from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.engine.models.tokenizer import MlxTokenizer
from mlx_serve.text.grammar import Rule, compile_rule
from mlx_serve.values import ApiError, Gate, Grammar, Marker, ReasoningBudget
from tests.engine.test_batch import batch_of, job, offline, run, single_of, tokens
from tests.engine.test_drafts_in_batch import Always, drafting
from tests.engine.tinymodel import EOS, VOCAB_SIZE, loaded, tiny_llama, write_model

# Control tokens of the tiny tokenizer, which the tiny model does not write here by itself.
OPEN, CLOSE = 256, 259
CLOSING = (CLOSE, 33, 34)
MARKERS = (Marker(1, ((OPEN, (1,)),)), Marker(1, ((CLOSE, (1,)),)))
PROMPT = [1, 2, 3]


def budget(n_tokens, *, inside=True, closing=CLOSING):
    return ReasoningBudget(n_tokens, inside, *MARKERS, closing)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def draft_of(model):
    """With drafts, some of which would go past the end of the reasoning."""
    return drafting(loaded(model), "model", Always(3))


def answer(backend, a_job, companions=()):
    for one in (a_job, *companions):
        backend.insert(one)
    return run(backend, [a_job, *companions])[0]


@pytest.mark.parametrize("make", [batch_of, single_of, draft_of])
@pytest.mark.parametrize("n_tokens", [0, 1, 5])
def test_the_tokens_before_and_behind_are_the_model_s_own(model, make, n_tokens):
    out = tokens(answer(make(model), job(PROMPT, 20, reasoning_budget=budget(n_tokens))))
    free = offline(model, PROMPT, 20)
    assert CLOSE not in free
    thought = free[:n_tokens]
    assert out[: n_tokens + len(CLOSING)] == [*thought, *CLOSING]
    assert out[n_tokens + len(CLOSING) :] == offline(model, [*PROMPT, *thought, *CLOSING], 20 - n_tokens - len(CLOSING))


def test_side_by_side_each_is_closed_at_its_own_place(model):
    jobs = [job(PROMPT, 20, reasoning_budget=budget(n)) for n in (2, 7)] + [job(PROMPT, 20)]
    backend = batch_of(model)
    for one in jobs:
        backend.insert(one)
    found = [tokens(events) for events in run(backend, jobs)]
    assert [out.index(CLOSE) for out in found[:2]] == [2, 7]
    assert found[2] == offline(model, PROMPT, 20)


@pytest.mark.parametrize("make", [batch_of, single_of])
@pytest.mark.parametrize("sampling", [{"top_p": 0.9, "min_p": 0.1}, {"xtc_probability": 1.0, "xtc_threshold": 0.05}])
def test_a_seed_gives_the_same_tokens_before_the_close_and_again(model, make, sampling):
    def drawn(n_tokens, prompt, max_tokens):
        a_job = job(prompt, max_tokens, temperature=1.0, seed=5, reasoning_budget=budget(n_tokens), **sampling)
        return tokens(answer(make(model), a_job))

    out = drawn(4, PROMPT, 20)
    assert out[:4] == drawn(99, PROMPT, 20)[:4]
    assert out[4:7] == list(CLOSING)
    assert out == drawn(4, PROMPT, 20)


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_the_log_probabilities_of_closing_tokens_are_the_model_s_own(model, make):
    a_job = job(PROMPT, 8, top_logprobs=2, logit_bias=((9, 5.0),), reasoning_budget=budget(3))
    events = answer(make(model), a_job)
    assert tokens(events)[3:6] == list(CLOSING)
    logits = model(mx.array([[*PROMPT, *tokens(events)[:-1]]]))[0, len(PROMPT) - 1 :]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for row, event in zip(logprobs, events, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-3)
        assert event.top_logprobs[0][1] == pytest.approx(float(mx.max(row)), abs=1e-3)


def test_reasoning_that_the_model_opens_itself_counts_from_there(model):
    # The model is made to open it first.
    opened = job(PROMPT, 12, logit_bias=((OPEN, 100.0),), reasoning_budget=budget(2, inside=False))
    assert tokens(answer(batch_of(model), opened))[:6] == [OPEN, OPEN, OPEN, *CLOSING]


@pytest.mark.parametrize("make", [batch_of, single_of])
def test_a_grammar_holds_behind_the_close(model, make, tmp_path):
    pytest.importorskip("llguidance")
    tokenizer = MlxTokenizer(load_tokenizer(write_model(tmp_path / "m"), {}, eos_token_ids=[EOS]))
    vocabulary = Vocabulary(tokenizer, VOCAB_SIZE)
    grammar = Grammar(compile_rule(Rule("choice", ["yes", "no"], "p")), n_bytes=1)
    gate = Gate(waiting=True, until=(CLOSE,))
    a_job = job(PROMPT, 40, grammar=grammar, gate=gate, reasoning_budget=budget(4, closing=(CLOSE,)))
    out = tokens(answer(make(model, vocabulary=vocabulary), a_job))
    assert out[4] == CLOSE
    assert tokenizer.decode(out[5:-1]) in ("yes", "no")
    assert out[-1] == EOS


def test_ids_that_are_no_tokens_are_refused(model):
    with pytest.raises(ApiError) as refused:
        batch_of(model).insert(job(PROMPT, reasoning_budget=budget(1, closing=(VOCAB_SIZE,))))
    assert refused.value.status == 400
