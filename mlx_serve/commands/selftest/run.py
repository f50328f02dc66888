"""The run: mlx-lm's speed and answers, the checks of a server, mlx-lm again. Each gets its part of the time."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench.ceiling import Ceiling, ceiling
from mlx_serve.commands.bench.load import LoadTarget, Round
from mlx_serve.commands.bench.probe import probe
from mlx_serve.commands.bench.stats import Record, Slo, Summary, summarize
from mlx_serve.commands.bench.workload import WorkloadShape, random_prompts
from mlx_serve.commands.selftest import checks, sizes
from mlx_serve.commands.selftest.checks import TOGETHER, AskedText, CheckResult
from mlx_serve.commands.selftest.server import TestedServer, serving
from mlx_serve.commands.selftest.sizes import Budget, RoundSize, Speed

# English sentences, which every model continues in some way.
_BEGINNINGS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Dear customer, we are sorry to hear that",
    "To bake bread at home you need flour, water and",
    "In 1969 two astronauts",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "The difference between a virus and a bacterium is",
    "Once the war was over, the king",
    "A good password is",
    "The shortest proof that there are infinitely many primes",
)
_N_ALONE = 4
# The trial that measures the machine: words of its prompt, tokens of its answers.
_TRIAL_INPUT, _TRIAL_OUTPUT = 128, 8
# Loads of the model that follow mlx-lm's first answers: by the server, by the server after its death, by mlx-lm again.
_MORE_LOADS = 3
# The most tokens of a stream beside the long prompt: a share of the context, and a number.
_STREAM_SHARE, _STREAM_TOKENS = 0.25, 2048
_UNKNOWN_CONTEXT = 2048
_SEED = 1


@dataclass(frozen=True, slots=True)
class _Load:
    """A round of load. ``records`` have the prompts, which mlx-lm gets too."""

    size: RoundSize
    summary: Summary
    records: Sequence[Record]


@dataclass(slots=True)
class Findings:
    """What is known so far."""

    results: list[CheckResult] = field(default_factory=list)
    speed: Speed | None = None


def run(model: str, flags: Sequence[str], budget: Budget, found: Findings, say: Callable[[str], None]) -> None:
    """All checks. Raises ServerError, CeilingError, Failure, KeyboardInterrupt, SystemExit."""
    test = _Run(model, budget, found, say)
    asked = test.reference()
    with tempfile.NamedTemporaryFile("w", prefix="mlx-serve-selftest-", suffix=".log", delete=False) as log:
        say(f"starting the server; its log is {log.name}")
        with serving(flags, log) as server:
            loads = test.of_server(server, asked)
    test.of_mlx_lm(loads)


class _Run:
    def __init__(self, model: str, budget: Budget, found: Findings, say: Callable[[str], None]) -> None:
        self._model = model
        self._budget = budget
        self._found = found
        self._say = say

    # mlx-lm, without a server.

    def reference(self) -> list[AskedText]:
        """The machine's speed, and mlx-lm's own answers."""
        began = self._budget.spent_s
        self._say("loading the model in mlx-lm")
        n = len(_BEGINNINGS)
        with ceiling(self._model) as mlx_lm:
            mlx_lm.run(_BEGINNINGS[:1], 1, 2, warm_up=False)
            speed = _measured(mlx_lm, self._budget.spent_s - began)
            self._found.speed = speed
            self._say(
                f"mlx-lm starts in {speed.load_s:.0f} s and reads {speed.prompt_rate:.0f} tokens/s; it writes "
                f"{speed.one_rate:.1f} tokens/s, {speed.many_rate:.1f} for {speed.n_many} at a time"
            )
            share_s = sizes.ANSWERS_SHARE * self._budget.left_s(_MORE_LOADS * speed.load_s)
            part = self._budget.part(share_s, sizes.answers_s(speed, n, _N_ALONE, TOGETHER))
            limits = sizes.answer_tokens(n, part)
            self._say(f"mlx-lm's own answers to {n} prompts, {min(limits)} to {max(limits)} tokens")
            texts = self._paced(sum(limits) / speed.one_rate, lambda: mlx_lm.texts(_BEGINNINGS, limits))
        return [AskedText(*each) for each in zip(_BEGINNINGS, limits, texts, strict=True)]

    def of_mlx_lm(self, loads: dict[int, _Load]) -> None:
        """The upper limit of each round's speed."""
        if not loads:
            return
        self._say("the same prompts in mlx-lm without a server")
        with ceiling(self._model) as mlx_lm:
            for n_clients, load in loads.items():
                answered = [(each.prompt, each.answer.output_tokens) for each in load.records if each.answer]
                prompts, limits = [p for p, _ in answered], [max(1, n) for _, n in answered]
                offline = mlx_lm.run(prompts, n_clients, limits, ignore_eos=True)
                self._add(_speed(n_clients, load, offline.rate), load.summary.seconds + offline.seconds)

    # The server.

    def of_server(self, server: TestedServer, asked: Sequence[AskedText]) -> dict[int, _Load]:
        """All checks of the server. Returns the rounds of load, which ``of_mlx_lm`` repeats."""
        speed, budget = self._speed, self._budget
        with Client(server.where) as client:
            model = client.first_model()
            context = _context(client, model)
        target = LoadTarget(server.where, model, chat=False, fields={"temperature": 0})
        n_tokens = sum(each.max_tokens for each in asked)
        n_alone = sum(each.max_tokens for each in asked[:_N_ALONE])
        self._check(
            "greedy answers, one at a time", lambda: checks.alone(target, asked[:_N_ALONE]), n_alone / speed.one_rate
        )
        self._check(
            f"greedy answers, {TOGETHER} at a time",
            lambda: checks.together(target, asked),
            n_tokens / speed.output_rate(TOGETHER),
        )
        self._check("plain and chunked bodies", lambda: checks.bodies(target, asked[0]))
        share_s = sizes.DRAFTS_SHARE * budget.left_s(2 * speed.load_s)
        n_answers = 2 * checks.DRAFT_ROUNDS
        n_drafted = sizes.drafted_tokens(speed, n_answers, share_s, budget.pace, context)
        words = " ".join(_BEGINNINGS).split()[: sizes.repeated_words(speed, context)]
        repeated = 2 * f"{' '.join(words)}\n"
        self._check(
            "drafts", lambda: checks.drafts(target, repeated, n_drafted), n_answers * n_drafted / speed.one_rate
        )
        share_s = sizes.LONG_PROMPT_SHARE * budget.left_s(2 * speed.load_s)
        n_long = sizes.long_tokens(speed, context, share_s, budget.pace)
        n_stream = int(min(_STREAM_TOKENS, _STREAM_SHARE * context))
        self._check(
            "a long prompt beside streams",
            lambda: checks.beside_a_long_prompt(
                target,
                asked[1].prompt,
                n_stream,
                _long_text(int(n_long / speed.word_tokens)),
                speed.prompt_rate / budget.pace,
            ),
        )
        loads = self._loads(target, context)
        self._check("memory", lambda: checks.memory(target))
        self._check("a killed process", lambda: checks.after_a_crash(target, asked[0], server.child, server.reports))
        return loads

    def _loads(self, target: LoadTarget, context: int) -> dict[int, _Load]:
        """Run the rounds of load. Each gets a share of the time left, in proportion to its full cost."""
        done: dict[int, _Load] = {}
        for i, n_clients in enumerate(sizes.LEVELS):
            full_s = [sizes.full_round_s(self._speed, n) for n in sizes.LEVELS[i:]]
            # mlx-lm will repeat all rounds, and needs as long as the server.
            owed_s = sum(load.summary.seconds for load in done.values())
            share_s = self._budget.left_s(2 * self._speed.load_s + owed_s) * full_s[0] / sum(full_s) / 2
            size = sizes.round_size(n_clients, self._budget.part(share_s, full_s[0]), context)
            self._say(
                f"{n_clients} at a time: {size.n_requests} requests, {size.input_tokens} tokens in, "
                f"{size.output_tokens} out"
            )
            try:
                done[n_clients] = self._load(target, n_clients, size)
            except Failure as failure:
                self._add(CheckResult(_speed_name(n_clients), str(failure), passed=False), 0.0)
        return done

    def _load(self, target: LoadTarget, n_clients: int, size: RoundSize) -> _Load:
        # mlx-lm drafts nothing either.
        probed = probe(replace(target, fields={**target.fields, "num_draft_tokens": 0}), None, size.input_tokens)
        shape = WorkloadShape(_SEED, size.n_requests, size.input_tokens, size.output_tokens)
        round_ = Round(probed.target, lambda *_: None)
        expected_s = self._speed.round_s(size.n_requests, size.input_tokens, size.output_tokens, n_clients)
        prompts = random_prompts(shape, probed.sizes, f"selftest {n_clients}")
        self._paced(expected_s, lambda: round_.closed_loop(prompts, n_clients))
        if round_.interrupted:
            raise KeyboardInterrupt
        for record in round_.records:
            if record.failure is not None:
                raise record.failure
        return _Load(size, summarize(tuple(round_.records), round_.seconds, Slo()), round_.records)

    # The results.

    @property
    def _speed(self) -> Speed:
        assert self._found.speed is not None
        return self._found.speed

    def _paced(self, expected_s: float, work: Callable[[], Any]) -> Any:
        """Do the work, and note how long it took, for the sizes of the checks to come."""
        began = self._budget.spent_s
        done = work()
        self._budget.note(expected_s, self._budget.spent_s - began)
        return done

    def _check(self, name: str, work: Callable[[], CheckResult], expected_s: float | None = None) -> None:
        """A check that gets no answer has failed, and the others go on."""
        began = self._budget.spent_s
        try:
            result = work() if expected_s is None else self._paced(expected_s, work)
        except Failure as failure:
            result = CheckResult(name, str(failure), passed=False)
        self._add(result, self._budget.spent_s - began)

    def _add(self, result: CheckResult, seconds: float) -> None:
        self._found.results.append(replace(result, seconds=round(seconds, 1)))
        self._say(f"{MARKS[result.passed]:4}  {result.name}: {result.found}")


MARKS = {True: "ok", False: "FAIL", None: "-"}


def _measured(mlx_lm: Ceiling, load_s: float) -> Speed:
    """A few seconds of work. The first run has compiled what is needed."""
    long, short = _long_text(_TRIAL_INPUT), _BEGINNINGS[0]
    reading = mlx_lm.run([long], 1, 1, ignore_eos=True, warm_up=False)
    one = mlx_lm.run([short], 1, _TRIAL_OUTPUT, ignore_eos=True, warm_up=False)
    many = mlx_lm.run([short] * TOGETHER, TOGETHER, _TRIAL_OUTPUT, ignore_eos=True)
    rate, word_tokens = reading.prompt_tokens / reading.seconds, reading.prompt_tokens / _TRIAL_INPUT
    return Speed(load_s, rate, one.rate, many.rate, TOGETHER, word_tokens)


def _speed(n_clients: int, load: _Load, offline_rate: float) -> CheckResult:
    summary = load.summary
    ttft_s = summary.ttft_ms.p50 / 1000 if summary.ttft_ms else 0.0
    ratio = summary.output_tokens_per_s / offline_rate
    found = f"{summary.output_tokens_per_s:.1f} tokens/s, {ratio:.2f} of mlx-lm's; first token {ttft_s:.2f} s"
    figures = asdict(summary) | asdict(load.size) | {"offline_tokens_per_s": offline_rate, "ratio": ratio}
    return CheckResult(_speed_name(n_clients), found, None, figures)


def _speed_name(n_clients: int) -> str:
    return f"speed, {n_clients} at a time"


def _context(client: Client, model: str) -> int:
    """The model's context in tokens; a small one where the server does not tell."""
    found: Any = client.get(f"/models/{model}").get("max_model_len")
    return found if isinstance(found, int) else _UNKNOWN_CONTEXT


def _long_text(n_words: int) -> str:
    """Words that no prefix cache has seen in this order."""
    pick = random.Random(_SEED)  # noqa: S311 - no secret
    return " ".join(pick.choice(("river", "stone", "light", "under", "seven", "green")) for _ in range(n_words))
