"""Agents on a Mac, simulated: the real scheduler, prefix cache and budgets, with passes that cost what a Mac's would.

    python -m benchmarks.agents [--agents 16] [--turns 20] [--machine NAME] [--pause 2] [--json FILE]

Everything is real but the model and the clock: a stub model fills real (tiny) KV caches, and each pass moves a
simulated clock on by the cost model's seconds. Memory is in bytes of the stub's caches, scaled to the machine's.
Nothing sleeps.

An agent's turn: its conversation so far, thoughts that no client sends back, an answer, and after a pause a tool's
result (lengths: ``Work``). It asks with ``max_tokens`` 32000, as Claude Code does.

The cost of a pass over n tokens at b rows, the sources of its constants, and what they leave out: see ``Machine``.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from queue import SimpleQueue
from statistics import quantiles
from typing import Any

from benchmarks import options
from benchmarks.report import markdown
from mlx_serve import blas

blas.preload_openblas()

import mlx.core as mx  # noqa: E402  # OpenBLAS comes first
from mlx_lm.models.cache import KVCache  # noqa: E402

from mlx_serve.engine.backend import Opening  # noqa: E402
from mlx_serve.engine.cache.prefixes import PrefixCache  # noqa: E402
from mlx_serve.engine.cache.size import measure  # noqa: E402
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions  # noqa: E402
from mlx_serve.engine.generate.token_choice import Loaded  # noqa: E402
from mlx_serve.engine.memory import MemoryBudget, MemoryUse  # noqa: E402
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler  # noqa: E402
from mlx_serve.values import ApiError, Failed, Job, Prompt, Sampling, Started, TokenEvent  # noqa: E402

VOCAB = 4096
MAX_TOKENS = 32_000
GB = 1e9
# Between the first questions of two agents.
_STAGGER_S = 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """A Mac with a model, and what a pass costs there: overhead + bytes read / bandwidth + tokens / speed + attention.

    ``memory_gb``: what macOS lets the GPU have (about 0.8 of the whole). ``weights_gb`` are read as far as the tokens
    of a pass touch experts (``experts`` of which a token uses ``active``; 0: a dense model, read whole each time).
    ``tokens_per_s``: prefill speed reported for chunks of 2,048 tokens (the READMEs of Rapid-MLX and vllm-mlx for
    MiniMax and Qwen3-Coder-Next on an M3 Ultra; the rows here are assumptions of that order). ``bandwidth_gbs``:
    sustained, as measured in mlx issue 3266. ``attention_flops`` per pair of a token and one it looks at: 4 x layers x
    heads x head size; ``tflops`` are what attention reaches, an assumption. ``kv_bytes``: of one token's KV cache in 16
    bits. Left out: sampling, the tokenizer, the network.
    """

    name: str
    memory_gb: float
    weights_gb: float
    kv_bytes: int
    tokens_per_s: float
    experts: int
    active: int
    attention_flops: float
    bandwidth_gbs: float = 650.0
    tflops: float = 15.0
    overhead_s: float = 0.005

    def seconds(self, n_tokens: int, context_tokens: int) -> float:
        """A pass over ``n_tokens`` of one prompt that stand behind ``context_tokens``."""
        read = self._bytes(n_tokens) / (self.bandwidth_gbs * GB)
        return self.overhead_s + read + n_tokens / self._speed() + self._attention_s(n_tokens * context_tokens)

    def decode_seconds(self, lengths: Sequence[int]) -> float:
        """A token for each row: weights are read as far as they are touched, KV caches whole."""
        read = self._bytes(len(lengths)) + sum(lengths) * self.kv_bytes
        return self.overhead_s + read / (self.bandwidth_gbs * GB)

    def _bytes(self, n_tokens: int) -> float:
        if not self.experts:
            return self.weights_gb * GB
        touched = 1 - (1 - self.active / self.experts) ** n_tokens
        return self.weights_gb * GB * (0.05 + 0.95 * touched)

    def _speed(self) -> float:
        """Tokens per second beside the reading, so that chunks of 2,048 tokens reach ``tokens_per_s``."""
        return 2048 / (2048 / self.tokens_per_s - self._bytes(2048) / (self.bandwidth_gbs * GB) - self.overhead_s)

    def _attention_s(self, n_pairs: float) -> float:
        return self.attention_flops * n_pairs / (self.tflops * 1e12)


MACHINES = (
    Machine("Qwen3-30B-A3B-2507, 64 GB", 51.5, 17.2, 98_304, 2000, 128, 8, 4 * 48 * 32 * 128),
    Machine("gpt-oss-120b, 96 GB", 77.3, 63.4, 36_864, 1200, 128, 4, 4 * 18 * 64 * 64),
    Machine("Qwen3-235B-A22B-2507, 192 GB", 154.6, 132.0, 192_512, 300, 128, 8, 4 * 94 * 64 * 128),
    Machine("GLM-4.6 4-bit, 512 GB", 412.3, 199.0, 376_832, 250, 160, 8, 4 * 92 * 96 * 128),
)


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class StubModel:
    """Counts down from the prompt's last token to 0, the end of the answer; each pass moves the clock on."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self.layers = [None]
        self._machine = machine
        self._clock = clock
        self.n_prefilled = 0

    def __call__(self, x: mx.array, cache: list[Any] | None = None) -> mx.array:
        assert cache is not None
        rows, n = x.shape
        held = cache[0].offset
        if n > 1 or isinstance(held, int):
            self.n_prefilled += n
            self._clock.now_s += self._machine.seconds(n, held if isinstance(held, int) else 0)
        else:
            self._clock.now_s += self._machine.decode_seconds(held.tolist())
        empty = mx.zeros((rows, 1, n, 1))
        cache[0].update_and_fetch(empty, empty)
        following = mx.maximum(x - 1, 0)
        return mx.where(mx.arange(VOCAB) == following[..., None], 10.0, 0.0)

    def make_cache(self) -> list[Any]:
        return [KVCache()]


class Models:
    """One model that is always loaded, for the scheduler."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self.model = StubModel(machine, clock)
        self._clock = clock
        self._size = measure([self.model])
        clock.now_s, self.model.n_prefilled = 0.0, 0
        per_token = self._size.bytes(1 << 20) / (1 << 20)
        budget = MemoryBudget(int(machine.memory_gb * GB), least_kv_bytes=int(machine.memory_gb * GB) // 8)
        limit = budget.kv_limit([int(machine.weights_gb * GB)])
        assert limit is not None
        # In bytes of the stub's caches.
        self._limit = int(limit / machine.kv_bytes * per_token)

    def open(self, name: str) -> Opening:
        yield
        prefixes = PrefixCache(128, None, clock=self._clock)
        loaded = Loaded(self.model, VOCAB, frozenset([0]), (0,), prefixes, control_ids=frozenset(), kv_size=self._size)
        return BatchBackend(loaded, BatchOptions(), self._clock)

    def kv_limit(self, names: object) -> int:
        return self._limit

    def marks(self, names: object) -> None:
        return None

    def weights_bytes(self, name: str) -> int:
        return 0

    def has_room(self, names: object) -> bool:
        return True

    def memory(self) -> MemoryUse:
        return MemoryUse()

    def rest(self) -> None: ...

    def release(self) -> None: ...

    def unload(self, name: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What the agents do. Lengths in tokens, ``pause_s`` between an answer and the next turn."""

    n_agents: int = 16
    n_turns: int = 20
    first_tokens: int = 30_000
    shared_tokens: int = 6_000
    result_tokens: int = 1_300
    thinking_tokens: int = 300
    answer_tokens: int = 200
    pause_s: float = 2.0


@dataclass(slots=True)
class Agent:
    """A conversation, and what its user saw."""

    tokens: list[int]
    rng: random.Random
    turn: int = 0
    asked_s: float = 0.0
    latest_s: float | None = None
    job: Job | None = None
    output: list[int] = field(default_factory=list)

    def ask(self, work: Work, now_s: float) -> Job:
        # The last token says how long the answer gets.
        prompt = (*self.tokens, work.thinking_tokens + work.answer_tokens)
        self.job = Job("m", Prompt(prompt), Sampling(max_tokens=MAX_TOKENS), 0, SimpleQueue())
        self.asked_s, self.latest_s, self.output = now_s, None, []
        return self.job

    def answered(self, work: Work) -> None:
        """The thoughts are not sent back; a tool's result is."""
        assert self.job is not None
        result = self.rng.choices(range(2000, VOCAB), k=work.result_tokens)
        self.tokens = [*self.job.prompt.tokens, *self.output[work.thinking_tokens :], *result]
        self.job = None
        self.turn += 1


@dataclass(slots=True)
class Figures:
    """Of one run. ``computed`` and ``known`` tokens: prompt tokens that went through the model; those that had to."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    computed: int = 0
    known: int = 0
    seconds: float = 0.0
    refused: str = ""
    most_running: int = 0
    preemptions: int = 0

    def hear(self, now_s: float, asked_s: float, latest_s: float | None) -> None:
        """A token came; ``latest_s``: when the one before it did."""
        if latest_s is None:
            self.ttft_s.append(now_s - asked_s)
        else:
            self.gap_s.append(now_s - latest_s)

    def as_row(self) -> dict[str, Any]:
        if self.refused:
            return {"refused": self.refused}
        ttft, gaps = quantiles(self.ttft_s, n=100), quantiles(self.gap_s, n=100)
        return {
            "computed again": max(0.0, self.computed / self.known - 1),
            "ttft p50 s": ttft[49],
            "ttft p95 s": ttft[94],
            "gap p99 s": gaps[98],
            "at once": self.most_running,
            "preemptions": self.preemptions,
            "hours": self.seconds / 3600,
        }


def agents_of(work: Work) -> list[Agent]:
    rng = random.Random(1)
    shared = rng.choices(range(2000, VOCAB), k=work.shared_tokens)
    own = work.first_tokens - work.shared_tokens
    return [Agent([*shared, *rng.choices(range(2000, VOCAB), k=own)], random.Random(i)) for i in range(work.n_agents)]


def simulate(machine: Machine, work: Work) -> Figures:
    """All agents to their last turn, through this server's scheduler."""
    clock = Clock()
    models = Models(machine, clock)
    scheduler = Scheduler(models, Limits(max_queue=1024), clock)
    scheduler.load("m")
    clock.now_s, models.model.n_prefilled = 0.0, 0
    figures = Figures()
    agents = agents_of(work)
    due = [(_STAGGER_S * i, i) for i in range(work.n_agents)]
    figures.known = work.shared_tokens
    seen = [work.shared_tokens] * work.n_agents
    try:
        while due or any(agent.job for agent in agents):
            while due and due[0][0] <= clock.now_s:
                _, i = heapq.heappop(due)
                job = agents[i].ask(work, clock.now_s)
                # What no server has seen: behind the shared start, what this agent adds.
                figures.known += len(job.prompt.tokens) - seen[i]
                seen[i] = len(job.prompt.tokens) + work.answer_tokens
                scheduler.submit([job])
            if not scheduler.step() and due:
                clock.now_s = max(clock.now_s, due[0][0])
            figures.most_running = max(figures.most_running, scheduler.health().running)
            for i, agent in enumerate(agents):
                if agent.job is not None and _hear(agent, clock.now_s, figures):
                    agent.answered(work)
                    if agent.turn < work.n_turns:
                        heapq.heappush(due, (clock.now_s + work.pause_s, i))
    except ApiError as error:
        figures.refused = error.message
    figures.computed, figures.seconds = models.model.n_prefilled, clock.now_s
    figures.preemptions = scheduler.stats().preemptions
    scheduler.close()
    return figures


def _hear(agent: Agent, now_s: float, figures: Figures) -> bool:
    """Take an agent's events; whether its answer is whole. Raises ApiError."""
    assert agent.job is not None
    while not agent.job.events.empty():
        event = agent.job.events.get()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Started) or not isinstance(event, TokenEvent):
            continue
        figures.hear(now_s, agent.asked_s, agent.latest_s)
        agent.latest_s = now_s
        agent.output.append(event.token)
        if event.finish:
            return True
    return False


class FirstCome:
    """A scheduler that takes prompts as they come in chunks of 2,048 tokens, with a step of decoding after each chunk.

    It keeps the conversations that fit, and gives up the least recently used first. Running ones count as what they
    are.
    """

    def __init__(self, machine: Machine, work: Work) -> None:
        self._machine = machine
        self._work = work
        self._room = int((machine.memory_gb - machine.weights_gb) * GB - (1 << 30)) // machine.kv_bytes
        self._n_answer = work.thinking_tokens + work.answer_tokens
        self._now_s = 0.0
        self._figures = Figures(known=work.shared_tokens)
        # By agent: the prompt's length, tokens of it that were seen before, turns, when it asked.
        self._lengths = [work.first_tokens + 1] * work.n_agents
        self._seen = [work.shared_tokens] * work.n_agents
        self._turns = [0] * work.n_agents
        self._asked_s = [0.0] * work.n_agents
        self._due = [(_STAGGER_S * i, i) for i in range(work.n_agents)]
        self._queue: list[int] = []
        self._left = 0
        # The least recently used first.
        self._kept: dict[int, int] = {}
        self._decoding: dict[int, int] = {}
        self._latest_s: dict[int, float] = {}
        self._shared_is_kept = False

    def run(self) -> Figures:
        """All agents to their last turn."""
        while self._due or self._queue or self._decoding:
            if not self._queue and not self._decoding:
                self._now_s = max(self._now_s, self._due[0][0])
            self._ask()
            self._prefill()
            self._decode()
        self._figures.seconds = self._now_s
        return self._figures

    def _ask(self) -> None:
        while self._due and self._due[0][0] <= self._now_s:
            _, i = heapq.heappop(self._due)
            self._asked_s[i] = self._now_s
            self._figures.known += self._lengths[i] - self._seen[i]
            self._seen[i] = self._lengths[i] + self._work.answer_tokens
            self._queue.append(i)

    def _prefill(self) -> None:
        if self._queue and not self._left:
            self._begin(self._queue[0])
        if not self._left:
            return
        n = min(2048, self._left)
        self._now_s += self._machine.seconds(n, self._lengths[self._queue[0]] - self._left)
        self._figures.computed += n
        self._left -= n
        if not self._left:
            self._decoding[self._queue.pop(0)] = self._n_answer
            self._shared_is_kept = True

    def _begin(self, i: int) -> None:
        """Start an agent's prompt with what is kept of it, if there is room; kept conversations yield."""
        wanted = sum(self._lengths[j] + self._n_answer for j in (*self._decoding, i))
        if self._decoding and wanted > self._room:
            return
        held = self._kept.pop(i, self._work.shared_tokens if self._shared_is_kept else 0)
        while self._kept and wanted + sum(self._kept.values()) > self._room:
            self._kept.pop(next(iter(self._kept)))
        self._left = max(1, self._lengths[i] - held)

    def _decode(self) -> None:
        if not self._decoding:
            return
        self._figures.most_running = max(self._figures.most_running, len(self._decoding))
        self._now_s += self._machine.decode_seconds([self._lengths[i] for i in self._decoding])
        for i in list(self._decoding):
            self._figures.hear(self._now_s, self._asked_s[i], self._latest_s.get(i))
            self._latest_s[i] = self._now_s
            self._decoding[i] -= 1
            if not self._decoding[i]:
                self._end(i)

    def _end(self, i: int) -> None:
        del self._decoding[i], self._latest_s[i]
        self._kept[i] = self._lengths[i]
        self._lengths[i] += self._work.answer_tokens + self._work.result_tokens
        self._turns[i] += 1
        if self._turns[i] < self._work.n_turns:
            heapq.heappush(self._due, (self._now_s + self._work.pause_s, i))


SERVERS = {
    "mlx-serve": simulate,
    "first come, chunks of 2,048": lambda machine, work: FirstCome(machine, work).run(),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--machine", default="", help="only those whose name holds this")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between an answer and the next turn")
    given = options.parse(parser, agents=4, turns=3)
    work = replace(Work(), n_agents=given.agents, n_turns=given.turns, pause_s=given.pause)
    found = []
    for machine in MACHINES:
        if given.machine not in machine.name:
            continue
        for server, run in (
            ("mlx-serve", simulate),
            ("first come, chunks of 2,048", lambda *given: FirstCome(*given).run()),
        ):
            row = {"machine": machine.name, "server": server, **run(machine, work).as_row()}
            found.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    heads = list(dict.fromkeys(head for row in found for head in row))
    print(markdown(heads, [[_cell(row.get(head, "")) for head in heads] for row in found]))
    if given.json:
        given.json.write_text(json.dumps({"work": asdict(work), "rows": found}, indent=2))
    return 0


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
