"""Conversations that a template shortens although its probes were whole: what is missing is noticed each time."""

import json

import pytest

from mlx_serve.text.prompt import chat_prompt
from mlx_serve.text.templates import kept
from mlx_serve.values import ApiError
from tests.pure.formatkit import TOOLS, model
from tests.pure.test_prompt import assistant, calling, system, user
from tests.pure.test_template_probe import Recorder, full, refuse, result


def prompted(template, messages, tools=None) -> Recorder:
    """The template after it was probed, and then given the messages alone."""
    recorder = Recorder(template)
    tokenizer = model(render=recorder)
    chat_prompt(tokenizer, [user("x")], tools=tools)
    recorder.n_renderings = 0
    chat_prompt(tokenizer, messages, tools=tools)
    return recorder


def turn(n: int) -> list[dict]:
    call = calling(json.dumps({"n": n}), "read", call_id := f"call_{n:016}")
    return [assistant("", tool_calls=[call]), result(f"The content of file {n}", call_id)]


AGENT = [user("Look at the files"), *turn(1), *turn(2), *turn(3), *turn(4), assistant("All four are right"), user("x")]


def recent_results(messages, tools, options):
    """Keeps three results, which no probe has more of."""
    old = [message for message in messages if message["role"] == "tool"][:-3]
    return full([message for message in messages if message not in old], tools, options)


def test_a_result_that_a_template_drops_is_given_to_it_in_another_form():
    got = prompted(recent_results, AGENT)
    assert all(f"The content of file {n}" in got.text for n in (1, 2, 3, 4))
    assert all(message["role"] != "tool" for message in got.messages)
    few = [*AGENT[:5], AGENT[-1]]
    got = prompted(recent_results, few)
    assert [message["role"] for message in got.messages] == [message["role"] for message in few]
    assert got.n_renderings == 1


def recent_calls(messages, tools, options):
    """Keeps the calls of three messages."""
    old = [message for message in messages if "tool_calls" in message][:-3]
    return full([message for message in messages if message not in old], tools, options)


def test_a_call_that_a_template_drops_is_noticed():
    got = prompted(recent_calls, AGENT)
    assert all(f'{{"n": {n}}}' in got.text.replace("\\", "") for n in (1, 2, 3, 4))


def recent_answers(messages, tools, options):
    """Keeps three answers."""
    old = [message for message in messages if message["role"] == "assistant"][:-3]
    return full([message for message in messages if not any(message is one for one in old)], tools, options)


def test_a_text_that_stands_in_the_prompt_three_times_is_not_enough_for_four_messages():
    messages = [one for n in range(4) for one in (user(f"File {n} now"), assistant("It is done now"))] + [user("End")]
    assert prompted(recent_answers, messages).text.count("It is done now") == 4


def few_first_paragraphs(messages, tools, options):
    """Six messages, and of each no more than its first paragraph."""
    last = [{**message, "content": (message["content"] or "").partition("\n\n")[0]} for message in messages[-6:]]
    return full(last, tools, options)


def test_what_no_form_keeps_is_refused_with_the_message_that_is_left_out():
    messages = [user("The first of all"), *[one for n in range(4) for one in (assistant(f"a{n}"), user(f"u{n}"))]]
    with pytest.raises(ApiError) as caught:
        prompted(few_first_paragraphs, messages)
    assert caught.value.status == 400
    assert caught.value.param == "messages"
    assert "leaves out message" in caught.value.message
    assert prompted(few_first_paragraphs, messages[-3:]).n_renderings == 1


def tools_at_first(messages, tools, options):
    return full(messages, tools if len(messages) < 7 else None, options)


def test_tools_that_a_template_leaves_out_of_a_long_conversation_are_described():
    got = prompted(tools_at_first, AGENT, TOOLS)
    assert all(tool["function"]["name"] in got.messages[0]["content"] for tool in TOOLS)
    assert prompted(tools_at_first, AGENT[:3], TOOLS).messages[0] == user("Look at the files")


# What templates do to texts, and nothing is missing


def stripped(text: str, role: str) -> str:
    return text.strip()


def escaped(text: str, role: str) -> str:
    return json.dumps(text) if role == "tool" else text


def in_capitals(text: str, role: str) -> str:
    return text.upper()


def without_thoughts(text: str, role: str) -> str:
    return text.rpartition("</think>")[2]


def in_characters(text: str, role: str) -> str:
    return "&".join(text) if "zq" not in text else text


TEXTS = [
    system("Be brief.\n"),
    user("  Zürich & <b>Ω</b>\n\n"),
    assistant("<think>So it is.</think>"),
    user("??"),
    *turn(1)[:1],
    result('{"a": "\\u00fc \n"}', "call_0000000000000001"),
    assistant("<think>So it is.</think>Yes: it is so."),
    user("ok"),
    assistant("ok"),
    user("ok"),
]


@pytest.mark.parametrize("change", [stripped, escaped, in_capitals, without_thoughts, in_characters])
def test_a_text_that_a_template_changes_is_not_missing(change):
    def template(messages, tools, options):
        changed = [{**message, "content": change(message["content"], message["role"])} for message in messages]
        return full(changed, tools, options)

    got = prompted(template, TEXTS)
    assert [message["content"] for message in got.messages if message["role"] == "user"][-1] in ("ok", "zq9zq")
    assert len(got.messages) == len(TEXTS)
    assert got.n_renderings <= 2


def test_what_cannot_be_rendered_with_other_words_is_taken_as_it_is():
    def template(messages, tools, options):
        if "zq0zq" in str(messages):
            refuse("The first message must be a question.")
        return in_capitals(full(messages, tools, options), "")

    assert prompted(template, [user("Is it a question?")]).n_renderings == 2


def test_the_search_for_texts_in_another_order_is_bounded(monkeypatch):
    messages = [user(f"The text of number {n} here") for n in range(100)]
    text = "\n".join(message["content"] for message in reversed(messages))
    marked = []
    assert kept.missing_messages(messages, text, lambda found: marked.append(found) or str(found)) == []
    assert len(marked) == 1
    monkeypatch.setattr(kept, "_MAX_OUT_OF_ORDER", 100)
    assert kept.missing_messages(messages, text, lambda found: marked.append(found) or str(found)) == []
    assert len(marked) == 1
