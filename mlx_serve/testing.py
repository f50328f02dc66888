"""A whole server without MLX, for tests of clients and of the server. Answers are deterministic.

    with serving(lambda name: FakeBackend(answer=saying("Hello."))) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none")
        ...

``serving`` starts it on a free port of 127.0.0.1. Everything between the socket and the queue is the real server;
``FakeBackend`` replaces the work of the MLX thread, and ``FakeTokenizer`` a model's tokenizer. A token is a byte of
UTF-8 or one of a few control tokens, so tests meet every script and split characters. The function ``answer`` maps a
job's prompt to its answer: by default the prompt itself, then the end token. ``on_step`` is called before each step;
it may wait or raise. Must not import MLX.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_serve import serve
from mlx_serve.api.grammar_child import GrammarLimits
from mlx_serve.api.serving import Services
from mlx_serve.engine.backend import Backend, Opening, is_last
from mlx_serve.engine.catalog import Catalog, ModelEntry
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.engine.generate.pooling import too_many_dimensions
from mlx_serve.engine.generate.reasoning import MarkerReader, ReasoningWatch
from mlx_serve.engine.memory import Marks, MemoryUse
from mlx_serve.engine.schedule.scheduler import Limits
from mlx_serve.engine.token_ids import check_ids
from mlx_serve.values import (
    GUARD,
    ApiError,
    Check,
    Embedded,
    Event,
    Failed,
    Inputs,
    Job,
    PromptLogprobs,
    ReasoningBudget,
    Started,
    TokenEvent,
    unchecked,
)
from mlx_serve.wire.server_options import Application, ServerOptions

EOS = 256
# Control tokens by their text. The splitter sees those that are part of a marker; the others are hidden.
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
# The numbers in a fake vector.
WIDTH = 8
# The model that ``serving`` serves.
ENTRY = ModelEntry("fake", Path("fake"), 1_700_000_000, context_tokens=4096, vocab_size=VOCAB_SIZE)
# The id of the first token that ``learn`` adds: larger than the ids of all control tokens.
_FIRST_WORD = 10_000

Answer = Callable[[Job], Iterable[int]]


def echo(job: Job) -> Sequence[int]:
    """Answer with the prompt, then the end token."""
    return [*job.prompt.tokens, EOS]


def saying(text: str) -> Answer:
    """Always answer with this text, in which control tokens are spelled out, then the end token."""
    return lambda _: [*tokens_of(text), EOS]


def vector_of(tokens: Sequence[int], dimensions: int | None = None) -> list[float]:
    """The count of each id modulo WIDTH, plus 1, scaled to a vector of length 1."""
    counts = [1 + sum(token % WIDTH == i for token in tokens) for i in range(dimensions or WIDTH)]
    length = math.hypot(*counts)
    return [count / length for count in counts]


class FakeBackend:
    """Runs up to ``capacity`` jobs. Each step makes one token or one vector of each job.

    ``on_step`` runs before each step and may raise. Any of ``end_ids`` ends an answer. A KV cache takes ``token_bytes``
    bytes for each token. The backend reports ``cached_tokens`` of each prompt as cached. With ``prefill_step``, a step
    prefills so many tokens of each prompt that is not done; otherwise a prompt takes no time. Each token of a job's
    prediction counts as drafted.
    """

    alone = undrafted = ""
    cache_bytes = 0
    n_cached = 0
    n_evicted = 0

    def __init__(
        self,
        *,
        capacity: int = 32,
        token_bytes: int = 0,
        cached_tokens: int = 0,
        prefill_step: int = 0,
        answer: Answer = echo,
        on_step: Callable[[Collection[Job]], None] | None = None,
        end_ids: Collection[int] = (EOS,),
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.capacity = capacity
        self.max_spare: int | None = None
        self.n_drafted = self.n_accepted = 0
        self._token_bytes = token_bytes
        self._cached_tokens = cached_tokens
        self._prefill_step = prefill_step
        self._end_ids = frozenset(end_ids)
        self._vocab_size = vocab_size
        self._answer = answer
        self._on_step = on_step
        self._jobs: dict[Job, Iterator[tuple[int, int]]] = {}
        self._embedding: dict[Job, Iterator[Event]] = {}
        self._fresh: list[Job] = []
        self._paused: dict[Job, Iterator[tuple[int, int]]] = {}

    @property
    def n_decoding(self) -> int:
        """All jobs that generate and whose prompts are done."""
        return sum(not self._is_prefilling(job) for job in self._jobs)

    def kv_bytes(self, tokens: Mapping[Job, int]) -> int:
        """``token_bytes`` for each token."""
        return self._token_bytes * sum(tokens.values())

    def insert(self, job: Job) -> None:
        """Take a job, or go on with a paused one; no prefix is ever cached."""
        if job in self._paused:
            self._jobs[job] = self._paused.pop(job)
            return
        check_ids(job.prompt.tokens, self._vocab_size, "prompt")
        if job.inputs is not None:
            self._embedding[job] = _vectors(job.index, job.inputs)
            return
        self._jobs[job] = enumerate(_within_budget(self._answer(job), job.sampling.reasoning_budget), start=1)
        self._fresh.append(job)

    def remove(self, jobs: Collection[Job]) -> None:
        """Forget jobs."""
        for job in jobs:
            self._jobs.pop(job, None)
            self._embedding.pop(job, None)
            self._paused.pop(job, None)

    def pause(self, jobs: Collection[Job]) -> Sequence[tuple[Job, Event]]:
        """Keep jobs for later. No token is drawn ahead."""
        for job in jobs:
            self._paused[job] = self._jobs.pop(job)
        return []

    def step(self, gap_s: float) -> Sequence[tuple[Job, Event]]:
        """One token, or one vector, for each job."""
        if self._on_step is not None:
            self._on_step([*self._jobs, *self._embedding])
        fresh, self._fresh = [job for job in self._fresh if job in self._jobs], []
        events = [event for job in fresh for event in self._begin(job)]
        for job in list(self._jobs):
            if self._is_prefilling(job):
                job.n_prefilled = min(job.n_prefilled + self._prefill_step, len(job.prompt.tokens))
            else:
                events.append((job, self._next(job)))
        return events + [(job, self._next_vector(job)) for job in list(self._embedding)]

    def pin(self, jobs: Sequence[Job]) -> None:
        """Nothing is kept."""

    def missing(self, job: Job) -> tuple[int, float]:
        """The whole prompt, in no time."""
        return len(job.prompt.tokens), 0.0

    def wanted_bytes(self, within_s: float) -> int:
        """Nothing is kept."""
        return 0

    def shrink_cache(self, max_bytes: int, *, pinned: bool = True) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""
        self._jobs.clear()
        self._embedding.clear()
        self._paused.clear()

    def _is_prefilling(self, job: Job) -> bool:
        return self._prefill_step > 0 and job.n_prefilled < len(job.prompt.tokens)

    def _next_vector(self, job: Job) -> Event:
        event = next(self._embedding[job])
        if is_last(event):
            del self._embedding[job]
        return event

    def _begin(self, job: Job) -> list[tuple[Job, Event]]:
        events: list[tuple[Job, Event]] = [(job, Started(job.index, self._cached_tokens))]
        k = job.sampling.prompt_logprobs
        if k is not None:
            scores = tuple((-0.5, _logprobs(token, k)[1]) for token in job.prompt.tokens[1:])
            is_last = job.sampling.max_tokens == 0
            events.append((job, PromptLogprobs(job.index, scores, is_last)))
            if is_last:
                del self._jobs[job]
        return events

    def _next(self, job: Job) -> TokenEvent:
        n, token = next(self._jobs[job])
        for predicted in job.prediction[n - 1 : n]:
            job.n_accepted += predicted == token
            job.n_rejected += predicted != token
            self.n_drafted += 1
            self.n_accepted += predicted == token
        finish = None
        if token in self._end_ids:
            finish = "stop"
        elif n >= job.sampling.max_tokens:
            finish = "length"
        if finish is not None:
            del self._jobs[job]
        logprob, top = _logprobs(token, job.sampling.top_logprobs)
        return TokenEvent(job.index, token, finish, logprob, top)  # type: ignore[arg-type]


def _within_budget(tokens: Iterable[int], budget: ReasoningBudget | None) -> Iterator[int]:
    """An answer whose reasoning is closed when its budget is spent, and which then goes on behind its own reasoning."""
    written, output = iter(tokens), list[int]()
    watch = ReasoningWatch(budget) if budget is not None else None
    while True:
        forced = watch.next(output).token if watch is not None else None
        if forced is not None and budget is not None and forced == budget.closing[0]:
            ending = MarkerReader(budget.ending)
            any(map(ending.finds, written))
        token = forced if forced is not None else next(written, None)
        if token is None:
            return
        output.append(token)
        yield token


def _vectors(index: int, inputs: Inputs) -> Iterator[Event]:
    yield Started(index, 0)
    if inputs.dimensions is not None and inputs.dimensions > WIDTH:
        yield Failed(index, too_many_dimensions(inputs.dimensions, WIDTH))
    for number, tokens in enumerate(inputs.tokens, start=1):
        vector = vector_of(tokens, inputs.dimensions)
        yield Embedded(index, struct.pack(f"<{len(vector)}f", *vector), is_last=number == len(inputs.tokens))


def _logprobs(token: int, k: int | None) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if k is None:
        return None, ()
    others = [(token + i) % EOS for i in range(k)]
    return -0.5, tuple((other, -0.5 - i) for i, other in enumerate(others))


def parse_words(text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """``NAME ARGUMENTS``; anything else is malformed."""
    name, blank, arguments = text.partition(" ")
    if not blank or not name:
        raise ValueError("no arguments")
    return [{"name": name, "arguments": arguments}]


def render_lines(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]) -> str:
    """Lines of role and content. The option ``fail`` simulates a template that raises."""
    if "fail" in options:
        raise ApiError(400, "The model's chat template cannot render these messages.", param="messages")
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


Renderer = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None, Mapping[str, Any]], str]


class FakeTokenizer:
    """Each byte is a token. A message renders as ``role: content`` and a line end, so tests can predict answers.

    It can be given the facts of any model's format. ``learn`` adds a token of several characters.
    """

    hidden_ids = frozenset([EOS, 257])
    eos_ids = frozenset([EOS])
    n_tokens = VOCAB_SIZE
    max_token_chars = 16

    def __init__(
        self,
        *,
        controls: Mapping[int, str] = MappingProxyType(CONTROL),
        special_ids: Collection[int] = (EOS, 257),
        template: str | None = None,
        has_chat_template: bool = True,
        think: tuple[str, str] | None = ("<think>", "</think>"),
        tool_call: tuple[str, str] | None = ("<tool_call>", "</tool_call>"),
        tool_format: str | None = None,
        parse: Callable[[str, Sequence[Any]], list[dict[str, Any]]] = parse_words,
        render: Renderer = render_lines,
        structural_markers: Sequence[str] = (),
        transitions: Mapping[str, Sequence[tuple[str, str]]] = MappingProxyType({}),
        initial_region: str | None = None,
    ) -> None:
        self.controls: Mapping[int, str] = dict(controls)
        self.special_ids = frozenset(special_ids)
        self.template = template
        self.has_chat_template = has_chat_template
        self.think = think
        self.tool_call = tool_call
        self.tool_format = tool_format
        self.parse_tool_call = parse
        self.structural_markers = structural_markers
        self.transitions = transitions
        self.initial_region = initial_region
        self._render = render
        self._words: dict[int, str] = {}

    def learn(self, word: str) -> int:
        """The id of a token with this text: a control token, a byte, or a new one."""
        known = {text: token for token, text in {**self.controls, **self._words}.items()}
        if word in known:
            return known[word]
        if len(word.encode()) == 1:
            return ord(word)
        token = _FIRST_WORD + len(self._words)
        self._words[token] = word
        return token

    def encode(self, text: str, *, special: bool, check: Check = unchecked) -> list[int]:
        """The bytes of the text. A spelled-out control token without a GUARD in it becomes that token."""
        check(len(text) // self.max_token_chars)
        ids = {control: token for token, control in self.controls.items()}
        tokens = [token for part in text.split(GUARD) for token in tokens_of(part, ids)]
        check(len(tokens))
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Control tokens as their text, the rest as UTF-8."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte itself, or the text."""
        text = self.controls.get(token) or self._words.get(token)
        if text is None:
            return bytes([token]) if token < EOS else b""
        return text.encode()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> str:
        """The text that ``render`` makes."""
        return self._render(messages, tools, options)


def tokens_of(text: str, ids: Mapping[str, int] = MappingProxyType(_IDS)) -> list[int]:
    """The token ids of a text in which control tokens are spelled out."""
    for control, token in ids.items():
        if control in text:
            before, _, after = text.partition(control)
            return [*tokens_of(before, ids), token, *tokens_of(after, ids)]
    return list(text.encode())


class FakeModels:
    """Replaces the model store: one tokenizer, and a backend from ``make_backend`` for each model's name.

    ``max_loaded`` of them are in memory at a time, with ``kv_limit`` bytes for KV caches.
    """

    def __init__(
        self,
        make_backend: Callable[[str], Backend] = lambda _: FakeBackend(),
        tokenizer: FakeTokenizer | None = None,
        *,
        max_loaded: int = 1,
        kv_limit: int | None = None,
    ) -> None:
        self._make_backend = make_backend
        self._tokenizer = tokenizer or FakeTokenizer()
        self._max_loaded = max_loaded
        self._kv_limit = kv_limit
        self._vocabulary = Vocabulary(self._tokenizer, VOCAB_SIZE)

    def tokenizer(self, entry: ModelEntry) -> FakeTokenizer:
        """The same for every model."""
        return self._tokenizer

    def vocabulary(self, entry: ModelEntry) -> Vocabulary:
        """The same for every model."""
        return self._vocabulary

    def weights_bytes(self, name: str) -> int:
        """0: a fake model has no weights."""
        return 0

    def has_room(self, names: Collection[str]) -> bool:
        """Up to ``max_loaded`` models."""
        return len(names) <= self._max_loaded

    def kv_limit(self, names: Collection[str]) -> int | None:
        """As given."""
        return self._kv_limit

    def marks(self, names: Collection[str]) -> Marks | None:
        """None: no limit."""
        return None

    def memory(self) -> MemoryUse:
        """All zero."""
        return MemoryUse()

    def rest(self) -> None:
        """Nothing is held."""

    def release(self) -> None:
        """Nothing is freed."""

    def open(self, name: str) -> Opening:
        """In two slices."""
        yield
        return self._make_backend(name)

    def unload(self, name: str) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def serving(
    make_backend: Callable[[str], Backend] = lambda _: FakeBackend(),
    *,
    catalog: Catalog | None = None,
    tokenizer: FakeTokenizer | None = None,
    options: ServerOptions | None = None,
    limits: Limits | None = None,
    grammar_limits: GrammarLimits | None = None,
    kv_limit: int | None = None,
    wrap: Callable[[Any], Application] = lambda api: api,
    **services: Any,
) -> Iterator[serve.Running]:
    """A server that is up while the block runs. ``services`` are fields of the API's Services.

    ``make_backend`` gets a model's name. Without ``catalog`` the one model is ENTRY. ``wrap`` gives what stands
    between the HTTP server and the API. ``kv_limit``: the bytes for KV caches, of which a FakeBackend takes
    ``token_bytes`` for each token.
    """
    with serve.running(
        catalog if catalog is not None else Catalog(ENTRY, [ENTRY.name]),
        FakeModels(make_backend, tokenizer, kv_limit=kv_limit),
        options or ServerOptions(address=("127.0.0.1", 0)),
        limits=limits,
        services=lambda **parts: Services(**({"fingerprint": "fp_test"} | parts | services)),
        grammar_limits=grammar_limits,
        wrap=wrap,
    ) as server:
        server.wait_until_ready()
        yield server
