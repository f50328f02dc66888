"""Random jobs that share a backend, each compared with the same job alone. What counts: no token differs.

python -m tests.engine.fuzz --seconds 600 --seed 1
python -m tests.engine.fuzz --kind windows --sessions 1 --seed 17    # a session that failed, again

Jobs join, are paused and are cancelled between steps, have prompts that begin alike, are sampled with seeds, penalties
and biases, and come several at a time with one prompt (``n``). Steps draft any number of tokens, from the jobs' own
texts and from predictions of their answers, where the tokens of a pass can be dropped again. The kinds differ in their
caches: plain ones, sliding windows, recurrent states, lists of caches, latent ones, and what runs one job at a time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

if __name__ == "__main__":
    from mlx_serve import blas

    # Before anything imports MLX.
    blas.preload_openblas()
sys.path.insert(0, str(Path(__file__).parents[2]))

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_serve.engine.backend import StepPlan
from mlx_serve.engine.cache import file as cache_file
from mlx_serve.engine.cache import index as cache_index
from mlx_serve.engine.cache import prefixes as cache_prefixes
from mlx_serve.engine.cache import writer as cache_writer
from mlx_serve.engine.cache.disk import DiskCache
from mlx_serve.engine.cache.kinds import always_trims
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.draft_length import LENGTHS
from mlx_serve.engine.generate.token_choice import make_choice
from mlx_serve.values import (
    Failed,
    Job,
    Marker,
    Prompt,
    PromptLogprobs,
    ReasoningBudget,
    Sampling,
    Started,
    TokenEvent,
)
from tests.engine.tinymodel import (
    GPT_OSS,
    LATENT,
    QWEN3_NEXT,
    VOCAB_SIZE,
    loaded,
    nearly,
    one_by_one,
    tiny,
    tiny_gemma,
    tiny_lfm2,
    tiny_llama,
)

# A token that random models write often opens the reasoning, and another one ends it.
OPENING, ENDING = Marker(1, ((7, (1,)),)), Marker(2, tuple((token, (token // 32 + 1, 2)) for token in range(64)))
BUDGETS = [ReasoningBudget(n, n < 5, OPENING, ENDING, (8, 9), n == 2, (7,)) for n in (0, 2, 5, 9)]

MAMBA = {
    "model_type": "mamba",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": "auto",
}
# A list of two KV caches in each layer.
LONGCAT = {
    "model_type": "longcat_flash",
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "attention_bias": False,
    "hidden_size": 48,
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
# A list of a recurrent state and a KV cache in each layer.
FALCON = {
    "model_type": "falcon_h1",
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 64,
    "mamba_d_conv": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
}
# A list of a recurrent state and a sliding window in one layer, of a recurrent state and a KV cache in the other.
BAICHUAN = {
    "model_type": "baichuan_m1",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "sliding_window": 16,
    "sliding_window_layers": [0],
    "conv_window": 2,
    "rms_norm_eps": 1e-5,
}
# Opens a turn, as the next number closes one: there, caches that can't be cut back have checkpoints.
TURN = 251
# Two tokens nearer than this in their scores are a tie: a batch rounds differently.
NOISE = 1e-3
LOGPROB_TOLERANCE = 1e-2
MAX_STEPS = 20_000
_DISK_S = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, and how its jobs run."""

    model: Callable[[], Any]
    alone: bool = False
    draft: Callable[[], Any] | None = None


KINDS = {
    "plain": Kind(tiny_llama),
    "windows": Kind(tiny_gemma),
    "windows and sinks": Kind(lambda: tiny(GPT_OSS)),
    "recurrent": Kind(lambda: tiny(MAMBA)),
    "recurrent, mostly": Kind(lambda: tiny(QWEN3_NEXT)),
    "mixed": Kind(tiny_lfm2),
    "lists": Kind(lambda: tiny(LONGCAT)),
    "recurrent lists": Kind(lambda: tiny(FALCON)),
    "window lists": Kind(lambda: tiny(BAICHUAN)),
    "latent": Kind(lambda: tiny(LATENT)),
    "latent, one by one": Kind(lambda: tiny(LATENT), alone=True),
    "plain, one by one": Kind(tiny_llama, alone=True),
    "windows, one by one": Kind(tiny_gemma, alone=True),
    "recurrent, one by one": Kind(lambda: tiny(MAMBA), alone=True),
    "mixed, one by one": Kind(tiny_lfm2, alone=True),
    "drafts": Kind(tiny_llama, draft=lambda: nearly(tiny_llama())),
    "drafts, windows": Kind(tiny_gemma, draft=lambda: nearly(tiny_gemma())),
}


@cache
def _model(make: Callable[[], Any]) -> Any:
    return make()


def backend_of(kind: Kind, rng: random.Random | None = None, disk: DiskCache | None = None) -> BatchBackend:
    """A backend that has seen nothing. ``rng`` varies how much it keeps and how much it does at once."""
    model = _model(kind.model)
    draft = _model(kind.draft) if kind.draft is not None else None
    max_sequences = rng.choice([0, 2, 6, 20]) if rng else 0
    whole = replace(
        loaded(model, max_sequences=max_sequences, draft_model=draft),
        trimmable=all(always_trims(make_prompt_cache(one)) for one in (model, draft) if one is not None),
        control_ids=frozenset([TURN, TURN + 1]),
    )
    if disk is not None:
        whole = replace(whole, prefix_cache=PrefixCache(max(2, max_sequences), None, tier=disk.tier("m")))
    if kind.alone:
        return one_by_one(whole, BatchOptions(draft_ngram=rng is not None))
    if rng is None:
        return BatchBackend(replace(whole, draft_model=None), BatchOptions())
    # With a draft model, that alone drafts in half of the sessions.
    ngram = draft is None or rng.random() < 0.5
    return BatchBackend(whole, BatchOptions(prompt_concurrency=rng.choice([1, 2, 8]), draft_ngram=ngram))


@dataclass(slots=True)
class Result:
    """What came of a job."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    error: str = ""
    is_cancelled: bool = False
    is_done: bool = False

    def note(self, event: Any) -> None:
        if isinstance(event, Failed):
            self.error, self.is_done = event.error.message, True
        elif isinstance(event, PromptLogprobs):
            self.scores = [logprob for logprob, _ in event.logprobs]
            self.is_done = event.is_last
        elif isinstance(event, TokenEvent):
            self.tokens.append(event.token)
            if event.logprob is not None:
                self.logprobs.append(event.logprob)
            self.is_done = event.finish is not None


class Session:
    """Some requests on one backend, at random."""

    def __init__(self, kind: Kind, rng: random.Random, n_requests: int, disk: DiskCache | None = None) -> None:
        self._rng = rng
        self._disk = disk
        self.backend = backend_of(kind, rng, disk)
        self._stems = [self._stem(n) for n in (rng.randrange(20, 150), rng.randrange(20, 150), rng.randrange(200, 400))]
        self._waiting: list[Job] = []
        self._n_requests = n_requests
        self._running: set[Job] = set()
        self._paused: list[Job] = []
        self.n_pauses = 0
        self.results: dict[Job, Result] = {}
        self.max_cached = 0

    def run(self) -> None:
        """Until all requests have ended."""
        for _ in range(MAX_STEPS):
            if not (self._n_requests or self._waiting or self._running or self._paused):
                return
            self._step()
        raise AssertionError("the jobs come to no end")

    def _step(self) -> None:
        rng = self._rng
        if self._n_requests and rng.random() < 0.3:
            self._n_requests -= 1
            self._waiting += self._request()
        while self._waiting and len(self._running) < min(self.backend.capacity, 12):
            self._insert(self._waiting.pop(0))
        if self._paused and rng.random() < 0.2 and len(self._running) < min(self.backend.capacity, 12):
            job = self._paused.pop(rng.randrange(len(self._paused)))
            self.backend.insert(job)
            self._running.add(job)
        if self._running and rng.random() < 0.08:
            self._pause(rng.choice(sorted(self._running, key=list(self.results).index)))
        if (self._running or self._paused) and rng.random() < 0.04:
            jobs = {*self._running, *self._paused}
            self._cancel(rng.sample(sorted(jobs, key=list(self.results).index), 1))
        if rng.random() < 0.02:
            self.backend.pin(self._waiting)
            self.backend.shrink_cache(rng.choice([0, self.backend.cache_bytes // 2]), pinned=rng.random() < 0.5)
        if self._disk is not None:
            self._turn_to_disk(self._disk)
        if self._running:
            n_drafts = 0 if rng.random() < 0.4 else rng.choice(LENGTHS)
            n_tokens, n_overhead = rng.choice([1, 7, 16, 40, 200]), rng.choice([0, 30])
            n_held = rng.choice([None, 0, 20])
            plan = StepPlan(n_tokens, rng.random() < 0.8, n_held, n_overhead, n_drafts=n_drafts)
            for job, event in self.backend.run_step(plan):
                self._note(job, event)

    def _turn_to_disk(self, disk: DiskCache) -> None:
        if self._rng.random() < 0.1:
            # As after a restart: only the disk has what was kept.
            disk.flush(_DISK_S)
            self.backend.shrink_cache(0)
        if self._rng.random() < 0.5:
            self.backend.wait_for_disk(_DISK_S)

    def _note(self, job: Job, event: Any) -> None:
        if isinstance(event, Started):
            self.max_cached = max(self.max_cached, event.cached_tokens)
        self.results[job].note(event)
        if self.results[job].is_done:
            self._running.discard(job)

    def _insert(self, job: Job) -> None:
        self.backend.insert(job)
        self._running.add(job)
        self.results[job] = Result()

    def _pause(self, job: Job) -> None:
        events = self.backend.pause([job])
        self._running.remove(job)
        self.n_pauses += 1
        for _, event in events:
            self._note(job, event)
        if not self.results[job].is_done:
            self._paused.append(job)

    def _cancel(self, jobs: Sequence[Job]) -> None:
        self.backend.remove(jobs)
        for job in jobs:
            self.results[job].is_cancelled = True
            self._running.discard(job)
        self._paused = [job for job in self._paused if job not in jobs]

    def _stem(self, n_tokens: int) -> list[int]:
        """What prompts begin with, some as conversations of several turns."""
        stem = _tokens(self._rng, n_tokens)
        if self._rng.random() < 0.5:
            # One that repeats itself, so that drafts are made.
            stem = (stem[: self._rng.randrange(2, 12)] * n_tokens)[:n_tokens]
        for i in range(self._rng.choice([0, 3, 10])):
            stem[self._rng.randrange(n_tokens)] = TURN + i % 2
        return stem

    def _request(self) -> list[Job]:
        rng = self._rng
        prompt, sampling = tuple(self._prompt()), self._sampling()
        scope = rng.choice(["", "", "other"])
        n = rng.choice([1, 1, 1, 2, 4])
        prediction: tuple[int, ...] = ()
        if self.results and rng.random() < 0.3:
            # A request that comes again, and expects most of the answer that it got.
            before = rng.choice(list(self.results))
            prompt, sampling, tokens = before.prompt.tokens, before.sampling, self.results[before].tokens
            place = rng.randrange(len(tokens) + 1)
            prediction = (*tokens[:place], rng.randrange(250), *tokens[place + rng.randrange(2) :])
        samples = [replace(sampling, seed=None if sampling.seed is None else sampling.seed + i) for i in range(n)]
        return [
            Job("m", Prompt(prompt), one, i, SimpleQueue(), scope=scope, prediction=prediction)
            for i, one in enumerate(samples)
        ]

    def _prompt(self) -> list[int]:
        rng = self._rng
        if self.results and rng.random() < 0.4:
            # The next turn of a conversation, or the same request again.
            job = rng.choice(list(self.results))
            turn = [*job.prompt.tokens, *self.results[job].tokens]
            return turn[: rng.randrange(1, len(turn) + 1)] + _tokens(rng, rng.randrange(8)) if len(turn) > 1 else turn
        stem = rng.choice(self._stems)
        opening = [TURN] if rng.random() < 0.5 else []
        return stem[: rng.randrange(len(stem))] + _tokens(rng, rng.randrange(1, 30)) + opening

    def _sampling(self) -> Sampling:
        """Of few kinds of numbers, so that each occurs often."""
        rng = self._rng
        options: dict[str, Any] = {}
        if rng.random() < 0.6:
            options |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.randrange(2**40)}
            options |= self._some(top_p=[0.5, 0.9], top_k=[1, 5, 40], min_p=[0.01, 0.2])
            if rng.random() < 0.2:
                options |= {"xtc_probability": rng.choice([0.5, 1.0]), "xtc_threshold": 0.05}
        options |= self._some(
            repetition_penalty=[1.3, 2.0],
            repetition_context_size=[0, 5, 200],
            presence_penalty=[1.0, -1.0],
            frequency_penalty=[0.5, 2.0],
            frequency_context_size=[4],
            logit_bias=[((7, 3.0), (9, -100.0))],
            min_tokens=[4],
            stop_token_ids=[(3, 5, 8)],
            top_logprobs=[0, 3],
            reasoning_budget=BUDGETS,
            prompt_logprobs=[0],
            n_draft_tokens=[1, 5],
        )
        return Sampling(rng.choice([1, 2, 8, 24]), **options)

    def _some(self, **values: Sequence[Any]) -> dict[str, Any]:
        rng = self._rng
        return {name: rng.choice(choices) for name, choices in values.items() if rng.random() < 0.15}


def _tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(250) for _ in range(n)]


def alone(kind: Kind, job: Job) -> Result:
    """What the job gives on a backend that has seen nothing and runs nothing else."""
    backend, result = backend_of(kind), Result()
    again = Job(job.model, job.prompt, job.sampling, job.index, SimpleQueue())
    backend.insert(again)
    while not result.is_done:
        for _, event in backend.run_step(StepPlan(64)):
            result.note(event)
    return result


def difference(kind: Kind, job: Job, got: Result) -> str:
    """How a job's answer differs from that of the same job alone; "": it does not, or by a tie alone."""
    want = alone(kind, job)
    if got.error or want.error:
        return f"'{got.error}', alone '{want.error}'"
    n = len(got.tokens)
    if not got.is_cancelled and n != len(want.tokens) and got.tokens == want.tokens[:n]:
        return f"{n} tokens, alone {len(want.tokens)}"
    for i, (token, right) in enumerate(zip(got.tokens, want.tokens, strict=False)):
        if token != right:
            if is_tie(kind, job, want.tokens[:i]):
                return ""
            return f"token {i} is {token}, alone {right} (of {n} and {len(want.tokens)})"
    for name in ("logprobs", "scores"):
        pairs = list(zip(getattr(got, name), getattr(want, name), strict=False))
        off = max((abs(a - b) for a, b in pairs), default=0.0)
        if off > LOGPROB_TOLERANCE:
            return f"{name} are off by {off:.3f}"
    return ""


def is_tie(kind: Kind, job: Job, before: Sequence[int]) -> bool:
    """Whether so little as another rounding can change the token that comes behind ``before``."""
    rng = mx.random.key(0)
    drawn = set()
    for _ in range(24):
        rng, key = mx.random.split(rng)
        drawn.add(_drawn(kind, job, before, NOISE * mx.random.uniform(-1, 1, (1, VOCAB_SIZE), key=key)))
    return len(drawn) > 1


def _drawn(kind: Kind, job: Job, before: Sequence[int], noise: mx.array) -> int:
    """The token behind ``before``, with ``noise`` on the model's scores; all in one pass."""
    model = _model(kind.model)
    tokens = [*job.prompt.tokens, *before]
    logits = model(mx.array(tokens)[None])[0].astype(mx.float32)
    choice = make_choice(job, loaded(model))
    token = -1
    for n in range(len(job.prompt.tokens), len(tokens) + 1):
        row = logits[n - 1 : n] + noise
        for processor in choice.processors:
            row = processor(mx.array(tokens[:n]), row)
        # Earlier draws are thrown away.
        token = int(choice.sampler(row - mx.logsumexp(row, axis=-1, keepdims=True)).item())
    return token


@contextmanager
def small_blocks(n_tokens: int = 32) -> Iterator[None]:
    """Blocks on disk that are small beside the prompts here, and worth reading."""
    n_bytes = n_tokens * cache_file.TOKEN_BYTES
    with ExitStack() as stack:
        for module in (cache_file, cache_index, cache_writer):
            stack.enter_context(mock.patch.object(module, "BLOCK_KEY_BYTES", n_bytes))
        stack.enter_context(mock.patch.object(cache_writer, "BLOCK_TOKENS", n_tokens))
        stack.enter_context(mock.patch.object(cache_prefixes, "_MIN_FROM_DISK", n_tokens))
        yield


@dataclass(slots=True)
class Outcome:
    """``faults``: a line for each job whose answer is wrong."""

    n_jobs: int = 0
    n_tokens: int = 0
    n_cancelled: int = 0
    n_cached: int = 0
    n_pauses: int = 0
    n_loaded: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    faults: list[str] = field(default_factory=list)


def run(name: str, seed: int, outcome: Outcome, n_requests: int = 10, *, with_disk: bool = False) -> None:
    """A session of a kind, and the comparison of all of its jobs."""
    rng = random.Random(f"{name} {seed}")
    if with_disk:
        with TemporaryDirectory() as directory, small_blocks():
            # By this clock the disk is never slower than prefilling.
            disk = DiskCache(Path(directory), rng.choice([200_000, 10**8]), clock=lambda: 0.0)
            session = Session(KINDS[name], rng, n_requests, disk)
            session.run()
            disk.close(_DISK_S)
            outcome.n_loaded += disk.counts()["loaded"]
    else:
        session = Session(KINDS[name], rng, n_requests)
        session.run()
    outcome.n_cached += session.max_cached
    outcome.n_pauses += session.n_pauses
    outcome.n_drafted += session.backend.n_drafted
    outcome.n_accepted += session.backend.n_accepted
    for job, got in session.results.items():
        outcome.n_jobs += 1
        outcome.n_tokens += len(got.tokens)
        outcome.n_cancelled += got.is_cancelled
        if fault := difference(KINDS[name], job, got):
            outcome.faults.append(f"--kind '{name}' --seed {seed}: {fault}; {job.sampling}")


def _sessions(names: Sequence[str], seed: int, n_sessions: int, seconds: float) -> Iterator[tuple[str, int]]:
    ends_s = time.monotonic() + seconds
    for number in range(seed, seed + n_sessions):
        for name in names:
            if time.monotonic() > ends_s:
                return
            yield name, number


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it begins new sessions")
    parser.add_argument("--sessions", type=int, default=10**9, help="the most sessions of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first session; the next one has the next number")
    parser.add_argument("--kind", choices=KINDS, action="append", help="by default all of them")
    parser.add_argument(
        "--disk", action="store_true", help="keep caches on disk too; then a seed does not fix the order"
    )
    options = parser.parse_args()
    outcomes = {name: Outcome() for name in options.kind or KINDS}
    for name, seed in _sessions(list(outcomes), options.seed, options.sessions, options.seconds):
        n_before = len(outcomes[name].faults)
        run(name, seed, outcomes[name], with_disk=options.disk)
        for fault in outcomes[name].faults[n_before:]:
            print(fault, flush=True)
    for name, one in outcomes.items():
        counts = f"{one.n_jobs} jobs, {one.n_cancelled} cancelled, {one.n_pauses} pauses, {one.n_tokens} tokens"
        drafts = f"{one.n_accepted} of {one.n_drafted} drafted tokens right"
        print(f"{name}: {counts}, {drafts}, {len(one.faults)} wrong")
    n_wrong = sum(len(one.faults) for one in outcomes.values())
    print(f"{sum(one.n_jobs for one in outcomes.values())} jobs, {n_wrong} with wrong tokens")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
