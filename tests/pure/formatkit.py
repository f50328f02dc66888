"""Models' formats as fake tokenizers, and what comes out of their answers when they are split."""

import re
from dataclasses import dataclass, field

from mlx_serve.testing import CONTROL, FakeTokenizer
from mlx_serve.text.formats import formats
from mlx_serve.text.symbols import is_symbol

_FIRST_CONTROL = 300


def tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("add", a={"type": "integer"}, b={"type": "integer"}, list={"type": "array"}),
]


def model(*controls: str, special: tuple[str, ...] = (), **facts) -> FakeTokenizer:
    """A tokenizer with control tokens of its own; ``special`` are those that are never text."""
    ids = {_FIRST_CONTROL + i: text for i, text in enumerate((*controls, *special))}
    hidden = [token for token, text in ids.items() if text in special]
    facts = {"think": None, "tool_call": None, "template": "{{ tools }} {{ tool_calls }}"} | facts
    plain = {token: text for token, text in CONTROL.items() if text in ("<eos>", "<bos>")}
    return FakeTokenizer(controls=plain | ids, special_ids=[*plain, *hidden], **facts)


@dataclass
class Answer:
    """What a client sees of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, piece) -> None:
        assert not any(map(is_symbol, piece.text))
        if piece.kind == "call":
            self.calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + piece.text)
        else:
            setattr(self, piece.kind, getattr(self, piece.kind) + piece.text)


def parts_of(tokenizer: FakeTokenizer, written: str) -> list[str]:
    """A written answer as tokens: control tokens, and the characters between them."""
    controls = "|".join(map(re.escape, sorted(tokenizer.controls.values(), key=len, reverse=True)))
    return re.findall(f"{controls}|.", written, re.DOTALL)


def split(
    tokenizer, written: str, tools=TOOLS, *, cut=False, in_reasoning=False, forced_call=False, sizes=(1,)
) -> Answer:
    """The answer, fed as pieces of so many tokens each, over and over."""
    found = formats(tokenizer)
    symbols = found.symbols(() if forced_call else tools)
    splitter = found.splitter(symbols, tools, in_reasoning=in_reasoning, forced_call=forced_call)
    ids = {text: token for token, text in found.controls.items()}
    atoms = [symbols.char(ids[part]) if part in ids else part for part in parts_of(tokenizer, written)]
    answer, at, turn = Answer(), 0, 0
    while at < len(atoms):
        size = max(1, sizes[turn % len(sizes)])
        for piece in splitter.feed("".join(atoms[at : at + size])):
            answer.add(piece)
        at, turn = at + size, turn + 1
    for piece in splitter.flush(cut=cut):
        answer.add(piece)
    return answer


def each_way(tokenizer, written: str, *args, **kwargs) -> Answer:
    """The answer, which is the same wherever its text is cut in two."""
    n = len(parts_of(tokenizer, written))
    want = split(tokenizer, written, *args, **kwargs)
    for size in range(1, n + 1):
        assert split(tokenizer, written, *args, sizes=(size, n), **kwargs) == want
    return want


THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


def qwen3() -> FakeTokenizer:
    call = ("<tool_call>", "</tool_call>")
    return model(*THINK, *call, special=("<|im_end|>",), think=THINK, tool_call=call, tool_format="json_tools")


def hermes_as_text() -> FakeTokenizer:
    return model(tool_call=("<tool_call>", "</tool_call>"), tool_format="json_tools")


def mistral() -> FakeTokenizer:
    special = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    return model(special=special, tool_call=("[TOOL_CALLS]", ""), tool_format="mistral")


def kimi_k2() -> FakeTokenizer:
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    inner = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    return model(*THINK, special=(*section, *inner), think=THINK, tool_call=section, tool_format="kimi_k2")


def llama3() -> FakeTokenizer:
    special = ("<|python_tag|>", "<|eot_id|>", "<|eom_id|>")
    return model(special=special, template="{{ tools }} <|python_tag|> tool_calls")


DEEPSEEK = tuple(f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))


def deepseek() -> FakeTokenizer:
    return model(*THINK, *DEEPSEEK, think=THINK, template="tool_calls <｜tool▁calls▁begin｜>")


def gpt_oss() -> FakeTokenizer:
    return model(special=HARMONY)
