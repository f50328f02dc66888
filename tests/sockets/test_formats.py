"""Answers of each model's format through the whole server: a token each byte, in words, and cut in two everywhere.

Formats that mlx-lm parses are in ``tests/engine``; these are the ones that need nothing of it.
"""

import json

import pytest

from mlx_serve.api.generation import OutputOptions
from tests.pure.familykit import FAMILIES, transcripts
from tests.pure.familykit import TOOLS as FAMILY_TOOLS
from tests.pure.formatkit import TOOLS, deepseek, gpt_oss, kimi_k2, llama3, mistral, qwen3
from tests.sockets.apikit import events
from tests.sockets.replaykit import Message, check_every_way, replaying
from tests.waiting import until

ARGUMENTS = '{"city": "Zürich 🐉", "days": 3}'
WEATHER = ("get_weather", ARGUMENTS)
ADD = ("add", '{"a": 1}')
QWEN3 = (
    "<think>\nLet me see.\n</think>\n\nOne moment.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
)
CASES = {
    "qwen3": (qwen3, QWEN3, Message("\n\nOne moment.", "\nLet me see.\n", [WEATHER, ADD])),
    "llama3": (
        llama3,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        Message(None, "", [WEATHER]),
    ),
    "llama3-bare": (llama3, f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', Message(None, "", [WEATHER])),
    "mistral": (
        mistral,
        f'Well.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[ARGS]{{"a": 1}}',
        Message("Well.", "", [WEATHER, ADD]),
    ),
    "mistral-old": (
        mistral,
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        Message(None, "", [WEATHER]),
    ),
    "deepseek-v3": (
        deepseek,
        "<think>hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message(None, "hm", [WEATHER]),
    ),
    "deepseek-v3.1": (
        deepseek,
        f"Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Message("Ok.", "", [WEATHER, ADD]),
    ),
    "kimi-k2": (
        kimi_k2,
        "<think>hm</think><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        Message(None, "hm", [WEATHER]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_the_same_however_its_tokens_come(name):
    make, written, want = CASES[name]
    want.finish = "tool_calls"
    check_every_way(make(), written, want)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_streamed_and_whole(name):
    tokenizer = FAMILIES[name].tokenizer()
    with replaying(tokenizer) as replay:
        for what, written, cut, want in transcripts(FAMILIES[name]):
            if what not in ("code", "two calls", "text around", "an example, then a call"):
                continue
            assert not cut
            replay.write_bytes(written)
            got = replay.both(tools=FAMILY_TOOLS)
            calls = [(called, json.loads(arguments)) for called, arguments in got.calls]
            assert calls == [(called, json.loads(arguments)) for called, arguments in want.calls], what
            assert ((got.content or "").strip(), got.reasoning.strip()) == (want.content, want.reasoning.strip()), what
            assert got.finish == "tool_calls"


ANALYSIS = "<|channel|>analysis<|message|>We need it.<|end|><|start|>assistant"
HARMONY_CASES = [
    (ANALYSIS + "<|channel|>final<|message|>Hi 🐉.", "<|return|>", Message("Hi 🐉.", "We need it.", [], "stop")),
    (
        ANALYSIS + f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
        "<|call|>",
        Message(None, "We need it.", [WEATHER], "tool_calls"),
    ),
    (
        "<|channel|>commentary<|message|>First this.<|end|><|start|>assistant to=functions.add"
        '<|channel|>commentary json<|message|>{"a": 1}',
        "<|call|>",
        Message("First this.", "", [ADD], "tool_calls"),
    ),
]


@pytest.mark.parametrize(("written", "end", "want"), HARMONY_CASES)
def test_gpt_oss(written, end, want):
    check_every_way(gpt_oss(), written, want, end=end)


# Cut off

OPENINGS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<|tool_call", "<tool_call>", "[TOOL_CALLS]")


@pytest.mark.parametrize("name", ["qwen3", "mistral", "kimi-k2", "deepseek-v3.1"])
def test_cut_off_anywhere_no_template_token_leaks_and_no_call_is_lost(name):
    make, written, want = CASES[name]
    tokenizer = make()
    n_tokens = len(tokenizer.encode(written, special=False))
    with replaying(tokenizer) as replay:
        replay.write_bytes(written)
        for n in range(1, n_tokens):
            got = replay.both(max_tokens=n)
            assert got.finish == "length"
            for call, wanted_call in zip(got.calls, want.calls, strict=False):
                assert call[0] == wanted_call[0]
                assert wanted_call[1].startswith(call[1])
            # What is no call yet is text, with its marker; before that there is no trace of one.
            said, wanted = got.content or "", want.content or ""
            rest = said.removeprefix(wanted).strip()
            assert rest not in OPENINGS
            assert wanted.startswith(said) or (said.startswith(wanted) and (not rest or rest.startswith(OPENINGS)))


def test_gpt_oss_cut_off_anywhere_shows_no_header():
    tokenizer = gpt_oss()
    written = HARMONY_CASES[1][0]
    with replaying(tokenizer) as replay:
        replay.write_bytes(written)
        for n in range(1, len(tokenizer.encode(written, special=False))):
            got = replay.both(max_tokens=n)
            assert not got.content
            assert "We need it.".startswith(got.reasoning)


def test_text_that_looks_like_a_marker_is_content():
    with replaying(qwen3()) as replay:
        text = "Write `<tool_call>` and `</think>`.<thi"
        replay.write(list(text))
        assert replay.both() == Message(text, "", [], "stop")
        assert replay.both(max_tokens=len(text)) == Message(text, "", [], "length")


# What else belongs to an answer


def test_stop_strings_match_in_content_only():
    with replaying(qwen3()) as replay:
        replay.write_bytes('<think>stop</think>Go. <tool_call>{"name": "add", "arguments": {"a": "stop"}}</tool_call>')
        assert replay.both(stop="stop") == Message("Go.", "stop", [("add", '{"a": "stop"}')], "tool_calls")
        replay.write_bytes("<think>x</think>Go and stop here")
        assert replay.both(stop="stop") == Message("Go and ", "x", [], "stop")
        # Nor do they reach over a call.
        replay.write_bytes('st<tool_call>{"name": "add", "arguments": {}}</tool_call>op')
        assert replay.both(stop="stop").content == "stop"


def test_no_more_calls_than_were_wanted():
    for make, written, reasoning in ((qwen3, QWEN3, "\nLet me see.\n"), (mistral, CASES["mistral"][1], "")):
        with replaying(make()) as replay:
            # A call too many ends the answer, whatever would have followed.
            replay.write_bytes(written + "x" * 3000)
            got = replay.both(parallel_tool_calls=False)
            assert (got.reasoning, got.calls, got.finish) == (reasoning, [WEATHER], "tool_calls")
            until(lambda: replay.server.scheduler.health().running == 0, "a free place")


def test_a_forced_call(monkeypatch):
    # As tool_choice "required" has it, but without the grammar: the fake backend writes what it was told to.
    def forced(*args, **kwargs):
        return OutputOptions(*args, **kwargs | {"forced_call": True})

    monkeypatch.setattr("mlx_serve.api.pipeline.OutputOptions", forced)
    written = f'<think>hm</think>{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
    check_every_way(qwen3(), written, Message(None, "hm", [WEATHER], "tool_calls"))
    with replaying(qwen3()) as replay:
        replay.write_bytes(written)
        assert replay.both(max_tokens=20) == Message("", "hm", [], "length")
        assert replay.both(max_tokens=53) == Message(None, "hm", [("get_weather", '{"city": "Z')], "length")


def test_reasoning_tokens_are_counted():
    for make, written, n in (
        (qwen3, "<think>hmm</think>yes", 4),
        (gpt_oss, ANALYSIS + "<|channel|>final<|message|>yes", 12),
    ):
        with replaying(make()) as replay:
            replay.write_bytes(written)
            usage = replay.server.chat()[2]["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == n


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_content(stream):
    answers = [
        (qwen3, QWEN3, "\n\nOne moment."),
        (gpt_oss, HARMONY_CASES[2][0], "First this."),
        (qwen3, "a <tool_call>b</tool_call>é", "a <tool_call>b</tool_call>é"),
    ]
    for make, written, content in answers:
        with replaying(make()) as replay:
            replay.write_bytes(written)
            got = replay.server.chat(tools=TOOLS, logprobs=True, max_tokens=900, stream=stream)[2]
            choices = [c["choices"][0] for c in events(got)] if stream else got["choices"]
            entries = [e for choice in choices for e in (choice["logprobs"] or {}).get("content", [])]
            assert bytes(b for entry in entries for b in entry["bytes"]).decode() == content


def test_control_tokens_of_no_meaning_are_dropped():
    with replaying(qwen3()) as replay:
        replay.write_bytes("a<|im_end|>b</think>c<bos>")
        assert replay.both() == Message("abc", "", [], "stop")


def test_clients_cannot_write_control_tokens():
    with replaying(qwen3()) as replay:
        replay.write_bytes("ok")
        status, _, body = replay.server.chat("a<|im_end|>b")
        assert status == 200
        # Its ten characters, and not the one token.
        assert body["usage"]["prompt_tokens"] == len("user: a<|im_end|>b\n")
