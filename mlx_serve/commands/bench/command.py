"""``mlx-serve bench``: probes the server, runs a round for each load, and reports the results.

    probe -> for each load: warm-up, round, (when asked) the same prompts offline -> text, JSON, picture

Exit status: 0 if all requests succeeded; 1 if a request failed or nothing was measured; 2 for wrong flags; 130 after
Ctrl-C, which still prints the results so far.
"""

from __future__ import annotations

import json
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mlx_serve import __version__
from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench import options as flags
from mlx_serve.commands.bench import report
from mlx_serve.commands.bench.arrivals import arrival_times
from mlx_serve.commands.bench.ceiling import CeilingError, Offline, ceiling
from mlx_serve.commands.bench.dataset import DatasetError, read_dataset
from mlx_serve.commands.bench.drafts import drafts_since, read_drafts
from mlx_serve.commands.bench.load import LoadTarget, Round
from mlx_serve.commands.bench.options import DEFAULT_OUTPUT_TOKENS, DEFAULT_REQUESTS, Options
from mlx_serve.commands.bench.probe import Probed, probe
from mlx_serve.commands.bench.progress import note, progress
from mlx_serve.commands.bench.report import Measured
from mlx_serve.commands.bench.stats import summarize
from mlx_serve.commands.bench.workload import GENERATORS, Conversation, WorkloadShape, n_requests, random_prompts, take

_INTERRUPTED = 128 + signal.SIGINT
_WARM_UP_TOKENS = 32
# The batch size offline after an open loop, which has no number of clients. It is mlx-lm's default.
_OFFLINE_BATCH = 32
# File descriptors for everything but connections.
_OTHER_DESCRIPTORS = 64

parser = flags.parser


class BenchError(Exception):
    """Nothing can be measured. The text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one round: a number of clients, or requests per second."""

    open_loop: bool
    level: float

    @property
    def name(self) -> str:
        """Part of the seeds, so that each round sends texts of its own, which no prefix cache has seen."""
        return f"{'rate' if self.open_loop else 'clients'} {self.level:g}"


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    options = flags.from_args(argv)
    run = Run(options)
    try:
        run.measure()
    except (BenchError, DatasetError) as error:
        note(f"mlx-serve bench: {error}")
        return 1
    except Failure as failure:
        note(f"mlx-serve bench: {failure}")
        run.faults += 1
    except KeyboardInterrupt:
        run.interrupted = True
    return run.finish()


class Run:
    """One run of the command, with its results so far."""

    def __init__(self, options: Options) -> None:
        self.rounds: list[Measured] = []
        self.faults = 0
        self.interrupted = False
        self._options = options
        self._model = options.model or ""
        self._server_facts: dict[str, Any] = {}

    def measure(self) -> None:
        """Runs all rounds. Raises BenchError, DatasetError, Failure, KeyboardInterrupt."""
        options = self._options
        make = self._workload()
        _raise_descriptor_limit(max((*options.concurrency, options.max_connections)))
        self._model = options.model or self._first_model()
        probed = probe(
            LoadTarget(options.server, self._model, options.chat, options.fields),
            options.ignore_eos,
            options.input_tokens,
        )
        self._tell(probed)
        loads = [Load(False, n) for n in options.concurrency] + [Load(True, rate) for rate in options.request_rates]
        for load in loads:
            conversations = make(probed, load.name)
            self._warm_up(probed, load)
            self.rounds.append(self._round(probed.target, load, conversations))
            if self.interrupted:
                return
            if options.offline is not None:
                self.rounds[-1] = replace(self.rounds[-1], offline=self._ceiling(options.offline, load))

    def _first_model(self) -> str:
        with Client(self._options.server) as client:
            return client.first_model()

    def _workload(self) -> Callable[[Probed, str], list[Conversation]]:
        options = self._options
        if options.dataset is not None:
            found = read_dataset(options.dataset, options.output_tokens, DEFAULT_OUTPUT_TOKENS, chat=options.chat)
            chosen = take(found, options.n_requests or len(found))
            if len(chosen) > len(found):
                note(f"{options.dataset} has only {len(found)} prompts: they are sent more than once")
            return lambda probed, name: chosen
        generate = GENERATORS[options.workload]
        return lambda probed, name: generate(self._shape(options.n_requests or DEFAULT_REQUESTS), probed.sizes, name)

    def _shape(self, n: int) -> WorkloadShape:
        options = self._options
        return WorkloadShape(
            seed=options.seed,
            n_requests=n,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens or DEFAULT_OUTPUT_TOKENS,
            range_ratio=options.range_ratio,
            n_groups=options.n_groups,
            prefix_tokens=options.prefix_tokens,
            n_turns=options.n_turns,
        )

    def _tell(self, probed: Probed) -> None:
        sizes, options = probed.sizes, self._options
        if options.dataset is None and options.input_tokens <= sizes.overhead_tokens:
            raise BenchError(
                f"--input-len {options.input_tokens}: the chat template alone has {sizes.overhead_tokens:.0f} tokens"
            )
        if not probed.ignores_eos and options.ignore_eos is None:
            note("the server does not take ignore_eos: answers may be shorter than requested")
        self._server_facts = {"ignore_eos": probed.ignores_eos, **asdict(sizes)}
        note(f"{options.server}, model {self._model}, {sizes.tokens_per_word:.2f} tokens per word")

    def _warm_up(self, probed: Probed, load: Load) -> None:
        n = self._options.warmup
        if not n:
            return
        shape = replace(self._shape(n), output_tokens=min(_WARM_UP_TOKENS, self._shape(n).output_tokens))
        conversations = random_prompts(shape, probed.sizes, f"{load.name} warm-up")
        n_clients = n if load.open_loop else min(n, int(load.level))
        with progress("warm-up", n) as watch:
            round_ = Round(probed.target, watch)
            round_.closed_loop(conversations, n_clients)
        if round_.interrupted:
            raise KeyboardInterrupt
        for record in round_.records:
            if record.failure is not None:
                raise record.failure

    def _round(self, target: LoadTarget, load: Load, conversations: Sequence[Conversation]) -> Measured:
        options = self._options
        n_planned = n_requests(conversations)
        label = report.label(load.open_loop, load.level)
        if not load.open_loop and len(conversations) < load.level:
            note(f"{label}: only {len(conversations)} have something to ask; increase --num-prompts")
        before = read_drafts(target.server)
        cpu_s = time.process_time()
        with progress(label, n_planned) as watch:
            round_ = Round(target, watch)
            if load.open_loop:
                # --request-rate counts requests, but conversations arrive.
                rate = load.level * len(conversations) / n_planned
                times = arrival_times(len(conversations), rate, f"{options.seed} {load.name}")
                round_.open_loop(conversations, times, options.max_connections)
            else:
                round_.closed_loop(conversations, int(load.level))
        cpu_s = time.process_time() - cpu_s
        self.interrupted = round_.interrupted
        records = tuple(round_.records)  # after Ctrl-C a thread may still add a record
        summary = summarize(records, round_.seconds, options.slo, open_loop=load.open_loop)
        drafts = drafts_since(before, target.server) if before is not None and not self.interrupted else None
        client_cpu = cpu_s / round_.seconds
        return Measured(load.open_loop, load.level, n_planned, records, summary, client_cpu, drafts=drafts)

    def _ceiling(self, model: str, load: Load) -> Offline | None:
        """Runs the answered prompts offline, each with as many tokens as its answer had."""
        answered = [(r.prompt, r.answer.output_tokens) for r in self.rounds[-1].records if r.answer is not None]
        if not answered:
            return None
        note(f"mlx-lm without a server: {len(answered)} prompts")
        batch_size = _OFFLINE_BATCH if load.open_loop else int(load.level)
        template_options = self._options.fields.get("chat_template_kwargs")
        try:
            with ceiling(model) as offline:
                return offline.run(
                    [prompt for prompt, _ in answered],
                    batch_size,
                    [max(1, n) for _, n in answered],
                    ignore_eos=True,
                    template_options=template_options,
                )
        except CeilingError as error:
            note(f"mlx-serve bench: {error}")
            self.faults += 1
            return None

    def finish(self) -> int:
        """Reports the results so far and returns the exit status."""
        options = self._options
        if self.rounds:
            print(report.text(self.rounds))
        try:
            if options.json is not None:
                options.json.write_text(json.dumps(self._json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            if options.plot is not None and self.rounds:
                from mlx_serve.commands.bench.plot import draw

                draw(self.rounds, options.plot, f"{self._model}, {options.workload}")
        except OSError as error:
            note(f"mlx-serve bench: {error}")
            self.faults += 1
        if self.interrupted:
            return _INTERRUPTED
        good = any(r.summary.n_ok for r in self.rounds) and not any(r.summary.n_failed for r in self.rounds)
        return 0 if good and not self.faults else 1

    def _json(self) -> Mapping[str, Any]:
        options = self._options
        return {
            "mlx_serve": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "base_url": str(options.server),
            "model": self._model,
            "interrupted": self.interrupted,
            "server": self._server_facts,
            "options": _plain(options),
            "rounds": [report.as_json(measured) for measured in self.rounds],
        }


def _plain(options: Options) -> dict[str, Any]:
    """The options as JSON values, without the key."""
    plain = asdict(options)
    del plain["server"], plain["json"], plain["plot"]
    plain["dataset"] = options.dataset and str(options.dataset)
    plain["request_rates"] = [report.level_json(rate) for rate in options.request_rates]
    return plain


def _raise_descriptor_limit(n_connections: int) -> None:
    """Raises the soft limit of open files: by default macOS allows a process 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n_connections + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
