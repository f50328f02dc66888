"""A server whose model gives a written answer, token by token, and what a client sees of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from mlx_serve.testing import EOS, FakeBackend, FakeTokenizer
from tests.pure.formatkit import TOOLS, parts_of
from tests.sockets import apikit


@dataclass
class Message:
    """An answer as a client puts it together."""

    content: str | None = None
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str | None = None


class Replay:
    """A server that gives the answer of the moment: ``tokens``."""

    def __init__(self, tokenizer: FakeTokenizer, *, end: int = EOS) -> None:
        self.tokenizer = tokenizer
        self.end = end
        self.tokens: list[int] = []
        self.server: apikit.Running

    def answer(self, _job) -> list[int]:
        return [*self.tokens, self.end]

    def write(self, parts: Sequence[str]) -> None:
        """The next answers are made of these tokens; a part of several characters is one token."""
        self.tokens = [self.tokenizer.learn(part) for part in parts]

    def write_bytes(self, text: str) -> None:
        """The next answers are made of control tokens and bytes."""
        self.tokens = self.tokenizer.encode(text, special=False)

    def whole(self, **request) -> Message:
        """What comes in one piece."""
        status, _, body = self.server.chat(**{"tools": TOOLS, "max_tokens": 4000} | request)
        assert status == 200, body
        (choice,) = body["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls", [])]
        calls = [(function["name"], function["arguments"]) for function in functions]
        return Message(message["content"], message.get("reasoning_content", ""), calls, choice["finish_reason"])

    def streamed(self, **request) -> Message:
        """What a stream's deltas add up to, with OpenAI's rules checked on the way."""
        text = self.server.chat(**{"tools": TOOLS, "max_tokens": 4000, "stream": True} | request)[2]
        out = Message()
        for chunk in apikit.events(text):
            (choice,) = chunk["choices"]
            out.finish = choice["finish_reason"] or out.finish
            _add(out, choice["delta"])
        out.content = None if out.calls and not out.content else out.content
        return out

    def both(self, **request) -> Message:
        """The answer, which is the same streamed and not."""
        message = self.whole(**request)
        assert self.streamed(**request) == message
        return message


def _add(message: Message, delta: dict) -> None:
    message.content = (message.content or "") + (delta.get("content") or "")
    message.reasoning += delta.get("reasoning_content", "")
    for part in delta.get("tool_calls", []):
        function = part["function"]
        if "name" in function:
            assert part["index"] == len(message.calls)
            assert part["id"].startswith("call_")
            message.calls.append((function["name"], function["arguments"]))
        else:
            assert part.keys() == {"index", "function"}
            assert part["index"] == len(message.calls) - 1
            assert function["arguments"]
            name, arguments = message.calls[-1]
            message.calls[-1] = (name, arguments + function["arguments"])


@contextmanager
def replaying(tokenizer: FakeTokenizer, *, end: str = "<eos>") -> Iterator[Replay]:
    """A running Replay; ``end`` is the token that ends each answer."""
    replay = Replay(tokenizer, end=tokenizer.learn(end))
    backend = partial(FakeBackend, answer=replay.answer, end_ids=[EOS, replay.end], vocab_size=1000)
    with apikit.serving(lambda _: backend(), tokenizer=tokenizer) as server:
        replay.server = server
        yield replay


def check_every_way(
    tokenizer: FakeTokenizer, written: str, want: Message, *, end: str = "<eos>", step: int = 1
) -> None:
    """Byte by byte and part by part, streamed and not; then cut in two at each place (each ``step``-th)."""
    parts = parts_of(tokenizer, written)
    with replaying(tokenizer, end=end) as replay:
        replay.write_bytes(written)
        assert replay.both() == want
        replay.write(parts)
        assert replay.both() == want
        for size in range(2, len(parts) + 1, step):
            replay.write(_in_two(tokenizer, parts, size))
            assert replay.both() == want, size


def _in_two(tokenizer: FakeTokenizer, parts: Sequence[str], at: int) -> list[str]:
    """The parts with as few borders as there can be: at ``at``, and at control tokens, which are always alone."""
    controls = set(tokenizer.controls.values())
    out: list[str] = []
    for i, part in enumerate(parts):
        if out and i != at and part not in controls and out[-1] not in controls:
            out[-1] += part
        else:
            out.append(part)
    return out
