"""A backend and a tokenizer without MLX, for tests and for measuring the server itself. Deterministic.

A token is a byte of UTF-8, or one of a few control tokens, so texts of any script and split characters occur. What a
job answers is a function of its prompt: by default the prompt itself, and then the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from mlx_serve.core import ApiError, Job, TokenEvent
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.vocabulary import check_ids

EOS = 256
# Control tokens, by their text. Those that a marker is made of are seen by the splitter; the others are hidden.
CONTROL = {
    EOS: "<eos>",
    257: "<bos>",
    258: "<think>",
    259: "</think>",
    260: "<tool_call>",
    261: "</tool_call>",
}
_IDS = {text: token for token, text in CONTROL.items()}
VOCAB_SIZE = 262

Answer = Callable[[Job], Sequence[int]]


def echo(job: Job) -> Sequence[int]:
    """The prompt again, and the end."""
    return [*job.prompt.tokens, EOS]


class FakeBackend:
    """Runs up to ``capacity`` jobs, a token of each at every step. ``on_step`` runs before each step and may raise."""

    def __init__(
        self, *, capacity: int = 32, answer: Answer = echo, on_step: Callable[[Collection[Job]], None] | None = None
    ) -> None:
        self.capacity = capacity
        self._answer = answer
        self._on_step = on_step
        self._jobs: dict[Job, Iterator[tuple[int, int]]] = {}

    def insert(self, job: Job) -> int:
        """Nothing is ever cached."""
        check_ids(job.prompt.tokens, VOCAB_SIZE, "prompt")
        self._jobs[job] = enumerate(self._answer(job), start=1)
        return 0

    def remove(self, jobs: Collection[Job]) -> None:
        """Forget jobs."""
        for job in jobs:
            self._jobs.pop(job, None)

    def step(self) -> Sequence[tuple[Job, TokenEvent]]:
        """One token for each job."""
        if self._on_step is not None:
            self._on_step(list(self._jobs))
        return [(job, self._next(job)) for job in list(self._jobs)]

    def close(self) -> None:
        """Nothing is held."""
        self._jobs.clear()

    def _next(self, job: Job) -> TokenEvent:
        n, token = next(self._jobs[job])
        finish = None
        if token == EOS:
            finish = "stop"
        elif n >= job.sampling.max_tokens:
            finish = "length"
        if finish is not None:
            del self._jobs[job]
        logprob, top = _logprobs(token, job.sampling.top_logprobs)
        return TokenEvent(job.index, token, finish, logprob, top)  # type: ignore[arg-type]


def _logprobs(token: int, k: int | None) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if k is None:
        return None, ()
    others = [(token + i) % EOS for i in range(k)]
    return -0.5, tuple((other, -0.5 - i) for i, other in enumerate(others))


class FakeTokenizer:
    """Bytes as tokens. A message is rendered as ``role: content`` and a line end, so that answers can be predicted."""

    hidden_ids = frozenset([EOS, 257])
    has_chat_template = True
    n_tokens = VOCAB_SIZE
    think: tuple[str, str] | None = ("<think>", "</think>")
    tool_call: tuple[str, str] | None = ("<tool_call>", "</tool_call>")

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Control tokens as their text, the rest as UTF-8."""
        return b"".join(CONTROL[i].encode() if i in CONTROL else bytes([i]) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte itself."""
        return CONTROL[token].encode() if token in CONTROL else bytes([token])

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """Lines of role and content; an option ``fail`` stands for a template that raises."""
        if "fail" in options:
            raise ApiError(400, "The model's chat template cannot render these messages.", param="messages")
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode())

    def ends_in_reasoning(self, tokens: Sequence[int]) -> bool:
        """A prompt that ends in the opening marker leaves the model inside its reasoning."""
        return bool(tokens) and tokens[-1] == _IDS["<think>"]

    def parse_tool_call(self, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """``NAME ARGUMENTS``; anything else is malformed."""
        name, blank, arguments = text.partition(" ")
        if not blank or not name:
            raise ValueError("no arguments")
        return [{"name": name, "arguments": arguments}]


def tokens_of(text: str) -> list[int]:
    """Token ids of a text in which control tokens are written out."""
    for control, token in _IDS.items():
        if control in text:
            before, _, after = text.partition(control)
            return [*tokens_of(before), token, *tokens_of(after)]
    return list(text.encode())


class FakeModels:
    """Stands for the model store: one tokenizer, and a backend from ``make_backend`` for each model's name."""

    def __init__(self, make_backend: Callable[[str], FakeBackend] = lambda _: FakeBackend()) -> None:
        self._make_backend = make_backend

    def tokenizer(self, entry: ModelEntry) -> FakeTokenizer:
        """The same for every model."""
        return FakeTokenizer()

    def open_backend(self, name: str) -> FakeBackend:
        """A new backend."""
        return self._make_backend(name)

    def close(self) -> None:
        """Nothing is held."""
