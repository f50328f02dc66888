"""A budget of reasoning tokens: where it is spent, and what then closes the reasoning in each model's format."""

import pytest

from mlx_serve.engine.generate.reasoning import NextToken, ReasoningWatch
from mlx_serve.testing import FakeTokenizer
from mlx_serve.text.formats import formats
from mlx_serve.text.marker_tokens import marker_of
from tests.pure.formatkit import TOOLS, Answer, gpt_oss, llama3, mistral, model, qwen3, split

ANSWER = "It is 4."


def gemma4() -> FakeTokenizer:
    think = ("<|channel>thought", "<channel|>")
    return model(special=("<|channel>", "<channel|>"), think=think)


def olmo3() -> FakeTokenizer:
    """A model whose markers are text, of which some tokens spell more than a part."""
    tokenizer = model(template="<think> </think>")
    for word in ("<th", "ink", ">\n", "</", "think", ">\n\n", " </think>"):
        tokenizer.learn(word)
    tokenizer.n_tokens = 10_100
    return tokenizer


def budget(tokenizer, n_tokens, *, in_reasoning=False, may_call=False):
    found = formats(tokenizer).reasoning_budget(n_tokens, in_reasoning=in_reasoning, may_call=may_call)
    assert found is not None
    return found


def generate(a_budget, written, then=()):
    """The output of a model that wants to write ``written``, and ``then`` once its reasoning was closed."""
    watch, output, wanted = ReasoningWatch(a_budget), [], iter(written)
    closed = 0
    while True:
        following = watch.next(list(output)) if watch.is_due(len(output)) else NextToken()
        # Whoever looks for the first time, or after drafts that were rejected, finds the same.
        assert ReasoningWatch(a_budget).next(list(output)) == following
        watch.next([*output, 1, 2, 3])
        for _ in range(2):
            assert watch.is_due(len(output))
            assert watch.next(list(output)) == following
        if following.token is not None:
            closed += 1
            output.append(following.token)
        else:
            wanted = iter(then) if closed == len(a_budget.closing) else wanted
            closed = 0
            token = next(wanted, None)
            if token is None:
                return output
            assert token not in following.banned
            output.append(token)


def answered(tokenizer, n_tokens, written, then=ANSWER, *, tools=(), **where):
    """What a client sees, and how many tokens there were."""
    spelled = [tokenizer.encode(text, special=False) for text in (written, then)]
    output = generate(budget(tokenizer, n_tokens, **where), *spelled)
    text = tokenizer.decode(output)
    return split(tokenizer, text, tools, in_reasoning=where.get("in_reasoning", False)), len(output)


OPENINGS = [
    (qwen3, "<think>", "</think>"),
    (mistral, "[THINK]", "[/THINK]"),
    (gemma4, "<|channel>thought\n", "<channel|>"),
    (olmo3, "<think>", "</think>"),
    (gpt_oss, "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]


@pytest.mark.parametrize(("make", "opening", "closing"), OPENINGS)
@pytest.mark.parametrize("n_tokens", [0, 1, 3, 20])
def test_reasoning_that_has_spent_its_budget_is_closed_and_the_answer_follows(make, opening, closing, n_tokens):
    n_tokens += opening.endswith("\n")
    got, n_output = answered(make(), n_tokens, opening + "x" * 50)
    thought = "\n" * opening.endswith("\n") + "x" * n_tokens
    assert got == Answer(ANSWER, thought[: max(n_tokens, 0)])
    n_around = sum(len(make().encode(text, special=False)) for text in (opening.rstrip(), closing))
    assert n_output == n_around + n_tokens + len(ANSWER)


@pytest.mark.parametrize(("make", "opening", "closing"), OPENINGS)
def test_reasoning_that_ends_in_time_is_left_alone(make, opening, closing):
    written = f"{opening}x{closing}{ANSWER}{'y' * 50}"
    got, n_output = answered(make(), 20, written)
    assert n_output == len(make().encode(written, special=False))
    assert got.content == ANSWER + "y" * 50


@pytest.mark.parametrize(("make", "opening", "closing"), OPENINGS[:-1])
def test_a_prompt_may_have_opened_the_reasoning(make, opening, closing):
    assert answered(make(), 2, "xxxxx", in_reasoning=True)[0] == Answer(ANSWER, "xx")
    assert answered(make(), 0, "xxxxx", in_reasoning=True)[0] == Answer(ANSWER, "")


@pytest.mark.parametrize("make", [qwen3, gpt_oss, olmo3])
def test_an_answer_without_reasoning_is_left_alone(make):
    before = "<|channel|>final<|message|>" if make is gpt_oss else ""
    written = before + "z" * 20 + "<think>" * (make is not gpt_oss) + "z" * 50
    got, n_output = answered(make(), 0, written)
    assert n_output == len(make().encode(written, special=False))
    assert got.content.startswith("z" * 20)


def test_a_model_that_does_not_think_has_no_budget():
    assert formats(llama3()).reasoning_budget(5, in_reasoning=False, may_call=False) is None


def test_gpt_oss_may_still_call_a_tool_but_not_think_again():
    tokenizer = gpt_oss()
    call = 'commentary to=functions.add<|message|>{"a": 1}'
    got, _ = answered(tokenizer, 3, "<|channel|>analysis<|message|>xxxxxx", call, tools=TOOLS, may_call=True)
    assert got == Answer("", "xxx", [("add", '{"a": 1}')])
    allowed = budget(tokenizer, 3, may_call=True)
    written = tokenizer.encode("<|channel|>analysis<|message|>xxx", special=False)
    watch = ReasoningWatch(allowed)
    assert watch.next([*written, *allowed.closing]) == NextToken(banned=(ord("a"),))
    assert watch.next([*written, *allowed.closing, ord("f")]) == NextToken()
    assert not watch.is_due(10**6)


def test_gpt_oss_may_think_in_several_messages_within_one_budget():
    tokenizer = gpt_oss()
    message = "<|channel|>analysis<|message|>xxx<|end|><|start|>assistant"
    # The token that ends a message is reasoning too, as in the usage.
    got, _ = answered(tokenizer, 6, message + message.replace("xxx", "yyyyyy"))
    assert got == Answer(ANSWER, "xxx\nyy")


def test_the_tokens_are_looked_at_only_where_the_budget_may_be_spent():
    watch = ReasoningWatch(budget(qwen3(), 100, in_reasoning=True))
    assert watch.is_due(0)
    watch.next([])
    assert next(n for n in range(1, 200) if watch.is_due(n)) == 100
    closing = budget(qwen3(), 100).closing
    watch.next([*b"x" * 50, *closing, *b"y" * 49])
    assert not watch.is_due(10**6)


# Markers in tokens


def spelled(text, words):
    found = marker_of(text.encode(), [(i, word.encode()) for i, word in enumerate(words)])
    moves = dict(found.moves)

    def state_after(*tokens):
        state = 0
        for token in tokens:
            state = moves[words.index(token)][state] if words.index(token) in moves else 0
        return state

    return found, state_after


def test_a_marker_is_found_however_tokens_spell_it():
    words = ["<", "/", "</", "think", ">", ">\n\n", "x", "a<", "</think>!", "k"]
    found, state_after = spelled("</think>", words)
    whole = (["<", "/", "think", ">"], ["a<", "/", "think", ">\n\n"], ["x", "</think>!"], ["<", "</", "think", ">"])
    for tokens in whole:
        assert state_after(*tokens) == found.end, tokens
    for tokens in (["<", "/", "x", "think", ">"], ["</", "think"], ["<", "think", ">"]):
        assert state_after(*tokens) != found.end, tokens
    assert words.index("x") not in dict(found.moves)


def test_a_beginning_that_repeats_itself_is_not_lost():
    found, state_after = spelled("aab", ["a", "b", "aa"])
    assert state_after("aa", "a", "b") == found.end
    assert state_after("a", "aa", "b") == found.end
    assert state_after("b", "a", "b") != found.end
