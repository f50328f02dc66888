"""Constraints on what is generated: masks, where a grammar takes hold, and what a failing one costs."""

import json
import random
from itertools import count
from queue import SimpleQueue
from threading import Thread
from types import MappingProxyType

import numpy as np
import pytest

from mlx_serve.engine.generate import constraints, grammars
from mlx_serve.engine.generate.constraints import Constraint
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.engine.generate.look_ahead import LookAhead
from mlx_serve.text.grammar import Rule, compile_rule
from mlx_serve.values import ApiError, Gate, Grammar, Sampling

pytest.importorskip("llguidance")

END, PAD, THINK, UNTHINK, CALL = 256, 257, 258, 259, 260
N_TOKENS = 261
WIDTH = 272  # the model's output is padded
ENDS = {END, PAD}


class Bytes:
    """A token for each byte, and control tokens."""

    n_tokens = N_TOKENS
    eos_ids = frozenset(ENDS)
    special_ids = frozenset([END, PAD])
    controls = MappingProxyType({THINK: "<think>", UNTHINK: "</think>", CALL: "<call>"})

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else self.controls.get(token, "").encode()


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(Bytes(), WIDTH)


def grammar(kind, value):
    return Grammar(compile_rule(Rule(kind, value, "p")), n_bytes=1)


AB = grammar("regex", "ab*")


def constraint(vocabulary, text=AB, **sampling):
    matcher = vocabulary.matcher(text) if text is not None else None
    return Constraint(Sampling(99, **sampling), ENDS, matcher)


def allowed(a_constraint, width=WIDTH):
    mask = a_constraint.allowed(len(a_constraint.taken), width)
    return None if mask is None else set(np.flatnonzero(mask).tolist())


def take(a_constraint, text):
    for token in text.encode() if isinstance(text, str) else text:
        a_constraint.take(token)


def test_only_what_continues_the_grammar_is_allowed(vocabulary):
    c = constraint(vocabulary)
    assert allowed(c) == {ord("a")}
    take(c, "a")
    assert allowed(c) == {ord("b")} | ENDS
    take(c, "bb")
    assert allowed(c) == {ord("b")} | ENDS
    take(c, [END])
    # mlx-lm works a token ahead: it asks once more.
    assert allowed(c) == ENDS
    assert not c.fault


@pytest.mark.parametrize("width", [100, 256, 258, 300])
def test_a_mask_has_the_width_of_the_model_s_output(vocabulary, width):
    c = constraint(vocabulary)
    take(c, "a")
    assert allowed(c, width) == {token for token in {ord("b")} | ENDS if token < width}


def test_a_text_that_can_only_end_ends(vocabulary):
    c = constraint(vocabulary, grammar("choice", ["yes"]), min_tokens=50, ignore_eos=True)
    take(c, "yes")
    assert allowed(c) == ENDS


def test_the_end_waits_for_min_tokens(vocabulary):
    c = constraint(vocabulary, min_tokens=3)
    take(c, "ab")
    assert allowed(c) == {ord("b")}
    take(c, "b")
    assert allowed(c) == {ord("b")} | ENDS


def test_without_a_grammar_only_the_end_is_held_back():
    c = constraint(None, None, min_tokens=2)
    assert not c.follows_tokens
    everything = set(range(WIDTH))
    assert [c.allowed(n, WIDTH) is None for n in range(4)] == [False, False, True, True]
    assert set(np.flatnonzero(c.allowed(1, WIDTH)).tolist()) == everything - ENDS
    endless = constraint(None, None, ignore_eos=True)
    assert set(np.flatnonzero(endless.allowed(10**6, WIDTH)).tolist()) == everything - ENDS


def looking_ahead(vocabulary, *rule, taken="", **sampling):
    """A look-ahead behind one token of a prompt and what was taken, and its constraint, that has made a mask."""
    c = constraint(vocabulary, grammar(*rule), **sampling)
    take(c, taken)
    allowed(c)
    texts = [*map(bytes, zip(range(256), strict=True)), b"", b"", b"<think>", b"</think>", b"<call>"]
    return LookAhead(c, texts, n_prompt=1), c


def draft_of(look_ahead, c, proposed="", n=9):
    tokens = [0, *c.taken]
    return bytes(look_ahead.draft(tokens[:-1], tokens[-1], list(proposed.encode()), n)[0]).decode()


@pytest.mark.parametrize(
    ("rule", "taken", "proposed", "draft"),
    [
        (("choice", ["yes, sir", "yes, madam"]), "", "", "yes, "),
        (("choice", ["yes, sir", "yes, madam"]), "yes, s", "", "ir"),
        # Proposed tokens as long as they are allowed, then forced ones.
        (("choice", ["yes, sir", "yes, madam"]), "", "yes, mother", "yes, madam"[:9]),
        (("choice", ["yes, sir", "yes, madam"]), "", "no", "yes, "),
        (("regex", "[a-y]*z"), "", "abcz!", "abcz"),
        (("regex", "[a-y]*z"), "", "A", ""),
        (("regex", "a{99}"), "aa", "", "a" * 9),
        (("regex", "ab?"), "", "", "a"),
    ],
)
def test_proposed_tokens_are_drafted_within_the_grammar_and_then_forced_ones(vocabulary, rule, taken, proposed, draft):
    look_ahead, c = looking_ahead(vocabulary, *rule, taken=taken)
    before = allowed(c)
    assert draft_of(look_ahead, c, proposed) == draft
    # A mask for each of them, and behind the last. The constraint is where it was.
    assert sorted(c.noted) == [*range(len(taken), len(taken) + len(draft) + 1)]
    for n, token in enumerate(draft.encode(), start=len(taken)):
        assert c.noted[n][token]
    assert c.taken == list(taken.encode())
    assert allowed(c) == before


def test_the_end_is_not_drafted(vocabulary):
    look_ahead, c = looking_ahead(vocabulary, "regex", "ab?")
    assert look_ahead.draft([], 0, [ord("a"), END, END], 5) == ([ord("a")], [])
    assert look_ahead.guess([], None) == [ord("a")]
    take(c, "ab")
    allowed(c)
    assert look_ahead.guess([0, ord("a"), ord("b")], None) == []


def test_drafts_follow_what_came_meanwhile(vocabulary):
    look_ahead, c = looking_ahead(vocabulary, "choice", ["yes, sir", "yes, madam"])
    said = list(b"yes, mad")
    assert look_ahead.guess([0, *said[:-2]], said[-2]) == [ord("d")]
    assert c.noted.pop(7)[ord("d")]
    assert look_ahead.draft([0, *said[:-1]], said[-1], [], 1) == ([ord("a")], [ord("m")])
    assert c.taken == said


def test_text_before_the_grammar_is_drafted_as_proposed(vocabulary):
    look_ahead, c = looking_ahead(vocabulary, "choice", ["yes"], gate=BEHIND)
    assert look_ahead.draft([], 0, [ord("z"), UNTHINK, ord("n")], 5) == ([ord("z"), UNTHINK, *b"yes"], [])
    assert c.noted[0][ord("z")]


def test_drafts_that_take_too_long_end_and_fail_nothing(vocabulary, monkeypatch):
    look_ahead, c = looking_ahead(vocabulary, "regex", "a{99}")
    monkeypatch.setattr(constraints, "_BUDGET_PER_TOKEN_S", 0.0)
    monkeypatch.setattr(constraints, "_BUDGET_S", 1e-9)
    spent_s = c.spent_s
    assert draft_of(look_ahead, c) == ""
    assert c.noted == {}
    assert (c.fault, c.spent_s) == ("", spent_s)
    # Then the grammar's state is not even copied.
    monkeypatch.setattr(Constraint, "_charge", lambda *_: pytest.fail("time is spent"))
    assert draft_of(look_ahead, c) == ""
    assert look_ahead.has_ended


@pytest.mark.parametrize("n_masks", [0, 1, 3])
def test_what_the_grammar_cannot_follow_is_not_drafted(vocabulary, n_masks, monkeypatch):
    look_ahead, c = looking_ahead(vocabulary, "regex", "a{99}")
    whole = Constraint._of_grammar

    def of_grammar(self, width):
        if len(self.taken) >= n_masks:
            self._fail("too complex")
            return None
        return whole(self, width)

    monkeypatch.setattr(Constraint, "_of_grammar", of_grammar)
    n = max(n_masks - 1, 0)
    assert draft_of(look_ahead, c) == "a" * n
    assert sorted(c.noted) == list(range(n_masks))
    assert not c.fault


BEHIND = Gate(waiting=True, until=(UNTHINK,))


def test_the_grammar_waits_for_the_end_of_the_reasoning(vocabulary):
    c = constraint(vocabulary, gate=BEHIND)
    everything = set(range(WIDTH))
    assert allowed(c) == everything - ENDS
    take(c, "zab")
    assert allowed(c) == everything - ENDS
    take(c, [UNTHINK])
    assert allowed(c) == {ord("a")}
    take(c, "a")
    assert allowed(c) == {ord("b")} | ENDS


def test_a_model_may_open_its_reasoning_itself_and_only_at_the_start(vocabulary):
    gate = Gate(until=(UNTHINK,), detours=(THINK,))
    c = constraint(vocabulary, gate=gate)
    assert allowed(c) == {ord("a"), THINK}
    take(c, [THINK, 1, 2, UNTHINK])
    assert allowed(c) == {ord("a")}
    other = constraint(vocabulary, gate=gate)
    take(other, "a")
    assert allowed(other) == {ord("b")} | ENDS


def test_a_marker_of_several_tokens_is_finished_once_it_is_almost_there(vocabulary):
    c = constraint(vocabulary, gate=Gate(waiting=True, until=(THINK, 102, UNTHINK)))
    take(c, [THINK])
    assert len(allowed(c)) > 200
    take(c, [102])
    assert allowed(c) == {UNTHINK}
    take(c, [UNTHINK])
    assert allowed(c) == {ord("a")}


@pytest.mark.parametrize("before", [[], [THINK, 5, UNTHINK], [THINK, 5]])
def test_a_call_leaves_the_grammar(vocabulary, before):
    c = constraint(vocabulary, gate=Gate(until=(UNTHINK,), detours=(THINK,), exits=(CALL,)))
    take(c, before)
    assert CALL in allowed(c)
    take(c, [CALL])
    assert allowed(c) is None
    take(c, [1, 2, UNTHINK])
    assert allowed(c) is None
    assert not c.fault


@pytest.mark.parametrize("before", [[], [5, 6]])
def test_a_call_that_ends_the_output_leaves_the_reasoning(vocabulary, before):
    # gpt-oss ends a call with an end token: it is out of reach while reasoning, unless it is an exit.
    c = constraint(vocabulary, gate=Gate(waiting=True, until=(UNTHINK,), exits=(END,)), min_tokens=9)
    take(c, before)
    assert allowed(c) == set(range(WIDTH)) - {PAD}
    take(c, [END])
    assert allowed(c) == set(range(WIDTH)) - ENDS
    take(c, [5, UNTHINK])
    # The end of a thought means nothing any more.
    assert ord("z") in allowed(c)
    assert not c.fault


def test_an_exit_while_reasoning_leaves_the_grammar_for_good(vocabulary):
    c = constraint(vocabulary, gate=Gate(waiting=True, until=(UNTHINK,), exits=(CALL,)))
    take(c, [5, CALL, 7, UNTHINK, ord("z")])
    assert allowed(c) is None
    assert not c.fault


def test_a_token_that_the_grammar_does_not_know_is_a_fault(vocabulary):
    c = constraint(vocabulary)
    take(c, "a!")
    assert c.fault
    assert c.fault_at == 2
    assert allowed(c) is None


def test_a_grammar_that_takes_too_long_is_a_fault(vocabulary, monkeypatch):
    monkeypatch.setattr(constraints, "_BUDGET_S", -1.0)
    c = constraint(vocabulary)
    assert allowed(c) is None
    assert c.fault.startswith("it takes too long: ")
    assert c.fault_at == 0


@pytest.mark.parametrize(("per_token_s", "n_tokens"), [(0.01, 3), (0.2, None)])
def test_the_time_of_masks_and_tokens_adds_up_and_each_token_allows_more(
    vocabulary, monkeypatch, per_token_s, n_tokens
):
    # A mask takes 0.1 s, and so does a token.
    ticks = count()
    monkeypatch.setattr(constraints.time, "thread_time", lambda: next(ticks) / 10)
    monkeypatch.setattr(constraints, "_BUDGET_PER_TOKEN_S", per_token_s)
    c = constraint(vocabulary)
    for token in "a" + "b" * 30:
        if allowed(c) is None:
            break
        take(c, token)
    assert bool(c.fault) == (n_tokens is not None)
    if n_tokens is not None:
        assert c.fault_at == n_tokens
        assert "0.70 s of CPU time for 3 tokens, of which 0.53 s are allowed" in c.fault


def test_a_single_mask_that_takes_long_is_a_fault_and_time_off_the_processor_is_none(vocabulary, monkeypatch):
    now = iter([0.0, 0.2, 10.0, 10.3])
    monkeypatch.setattr(constraints.time, "thread_time", lambda: next(now))
    monkeypatch.setattr(constraints.time, "perf_counter", lambda: pytest.fail("other processes' time counts"))
    c = constraint(vocabulary)
    assert allowed(c) == {ord("a")}
    assert allowed(c) is None
    assert "0.30 s for one" in c.fault


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(.*a.{1000}){50}"),
        ("grammar", 'start: s\ns: s s s | s s | "a" |'),
        ("json_schema", {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79, 73)]}),
    ],
)
def test_a_hostile_grammar_fails_or_stays_small(vocabulary, kind, value):
    c = constraint(vocabulary, grammar(kind, value))
    rng = random.Random(1)
    for _ in range(200):
        tokens = allowed(c)
        if tokens is None or tokens <= ENDS:
            break
        c.take(rng.choice(sorted(tokens - ENDS)))
    assert c.spent_s < 3


def test_a_grammar_that_does_not_compile_says_so_and_fails_its_job_alone(vocabulary):
    bad = Grammar(json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]}), 1)
    for refused in (lambda: vocabulary.matcher(bad), lambda: vocabulary.keep("k", bad.text, 1)):
        with pytest.raises(ApiError, match="nothing") as caught:
            refused()
        assert caught.value.status == 400
    assert vocabulary.kept("k") is None


@pytest.fixture
def compiled(monkeypatch):
    """The grammars that were compiled, in order."""
    texts = []
    compile_one = grammars.compile_matcher
    monkeypatch.setattr(grammars, "compile_matcher", lambda trie, text: texts.append(text) or compile_one(trie, text))
    return texts


def test_kept_grammars_are_bounded_by_bytes_and_given_up_in_turn(monkeypatch):
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 25)
    vocabulary = Vocabulary(Bytes(), WIDTH)
    for key in "xyz":
        vocabulary.keep(key, grammar("regex", key).text, 10)
        assert vocabulary.kept("x")
    assert [bool(vocabulary.kept(key)) for key in "xyz"] == [True, False, True]
    assert vocabulary.keep("large", AB.text, 26)
    assert not vocabulary.kept("large")


def test_a_grammar_that_is_no_longer_kept_is_compiled_no_second_time(monkeypatch, compiled):
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 5)
    vocabulary = Vocabulary(Bytes(), WIDTH)
    held = vocabulary.keep("k", AB.text, 10)
    assert not vocabulary.kept("k")
    assert allowed(constraint(vocabulary, held)) == {ord("a")}
    assert compiled == [AB.text]


def test_another_rank_compiles_what_it_is_told_and_keeps_it(compiled):
    vocabulary = Vocabulary(Bytes(), WIDTH)
    for _ in range(3):
        assert allowed(constraint(vocabulary, AB)) == {ord("a")}
    assert compiled == [AB.text]


def test_the_grammars_that_requests_hold_are_bounded(monkeypatch):
    monkeypatch.setattr(grammars, "MAX_HELD_BYTES", 25)
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 5)
    vocabulary = Vocabulary(Bytes(), WIDTH)
    held = [vocabulary.keep(key, AB.text, 10) for key in "xy"]
    with pytest.raises(ApiError, match="MB") as caught:
        vocabulary.keep("z", AB.text, 10)
    assert caught.value.status == 503
    held.pop()
    assert vocabulary.keep("z", AB.text, 10)


def test_jobs_of_one_grammar_do_not_share_their_place(vocabulary):
    first, second = constraint(vocabulary), constraint(vocabulary)
    take(first, "abb")
    assert allowed(second) == {ord("a")}


def test_no_text_is_spelled_with_control_tokens(vocabulary):
    c = constraint(vocabulary, grammar("regex", ".*"))
    assert allowed(c).isdisjoint({THINK, UNTHINK, CALL})
    assert ord("<") in allowed(c)
    take(c, "<think>")
    assert not c.fault


def test_threads_share_a_vocabulary():
    vocabulary = Vocabulary(Bytes(), WIDTH)
    results = SimpleQueue()

    def work(n):
        text = grammar("regex", f"a{{{n % 3 + 1}}}b")
        for _ in range(20):
            c = constraint(vocabulary, text)
            take(c, "a" * (n % 3 + 1))
            results.put(allowed(c) == {ord("b")})

    threads = [Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results.get_nowait() for _ in range(results.qsize())] == [True] * 120
