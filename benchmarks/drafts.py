"""What drafts do to throughput, where answers repeat their prompts and where they don't.

    python -m benchmarks.drafts [--model DIR] [--draft-model DIR] [--prompts 20] [--tokens 160] [--clients 1 4]
                                [--quick] [--json FILE]

- code: a function of the standard library is to be repeated with another name.
- json: sentences are to be said as JSON.
- stories: nothing to repeat; sampled with a seed.

Two servers, with and without ``--draft-ngram`` or the draft model, get the same requests, a group of prompts at a time
in turn. Ratios are of the tokens per second, of those of a stream after its first text, and of the tokens per second of
processor time, with drafts over without: of all groups, and the least and the greatest of one.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

from benchmarks import children
from benchmarks.asking import ask_all, figures, first_token_s
from benchmarks.children import Server
from benchmarks.machine import warnings, watch_others, watch_process
from benchmarks.options import parse
from benchmarks.prompts import Messages
from benchmarks.report import markdown
from mlx_serve.commands.bench.progress import note

_WANTED = {"code": 1.5, "json": 1.3, "stories": 0.97}
_FILES = (
    *("bisect", "heapq", "fnmatch", "shlex", "textwrap", "colorsys", "linecache", "sched", "stat", "string", "struct"),
    *("tabnanny", "types", "reprlib", "quopri", "numbers", "glob", "calendar", "copy", "getpass", "gettext", "csv"),
)
_SHORTEST, _LONGEST = 250, 1200
_NAMES = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Marie Curie", "Linus Pauling", "Rosa Parks", "Emmy Noether")
_CITIES = ("London", "Wilmslow", "Arlington", "Passy", "Detroit", "New York", "Bryn Mawr", "Lisbon")
_JOBS = ("mathematician", "physicist", "chemist", "inventor", "teacher", "painter")
_TOPICS = ("a lighthouse keeper", "a lost dog", "two rival bakers", "the moon", "an old clock", "a hard winter")


def functions() -> Iterator[tuple[str, str]]:
    """The longest function of each file that is short enough: its name and its source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in _FILES:
        source = (folder / f"{name}.py").read_text(encoding="utf-8")
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        sources = [(node.name, ast.get_source_segment(source, node) or "") for node in found]
        fitting = [one for one in sources if _SHORTEST <= len(one[1]) <= _LONGEST]
        if fitting:
            yield max(fitting, key=lambda one: len(one[1]))


def prompts(kind: str, n: int) -> list[Messages]:
    if kind == "code":
        texts = [
            f"Repeat this code, but call the function `renamed` instead of `{name}`. Answer with the code alone.\n\n"
            f"```python\n{source}\n```"
            for name, source in functions()
        ]
    elif kind == "json":
        texts = [f"Extract all people as a JSON array of name, age, city and job.\n\n{_people(i)}" for i in range(n)]
    else:
        texts = [f"Write story number {i} about {_TOPICS[i % len(_TOPICS)]}." for i in range(n)]
    return [[{"role": "user", "content": text}] for text in texts[:n]]


def _people(first: int) -> str:
    return " ".join(
        f"{_NAMES[i % len(_NAMES)]} is {20 + 7 * i % 60} years old, lives in {_CITIES[i % len(_CITIES)]} "
        f"and works as a {_JOBS[i % len(_JOBS)]}."
        for i in range(first, first + 5)
    )


@dataclass(slots=True)
class Work:
    """The tokens of answers, and the seconds and the processor's seconds that they took.

    ``streaming_s``: the seconds from an answer's first text to its end, of all answers.
    """

    tokens: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0
    streaming_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(slots=True)
class Result:
    """Of a kind of texts and a number of clients: each group of prompts, with drafts and without; and counts of all."""

    kind: str
    n_clients: int
    groups: list[tuple[Work, Work]] = field(default_factory=list)
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def n_tokens(self) -> int:
        return sum(drafted.tokens for drafted, _ in self.groups)

    def speed(self) -> str:
        """Tokens per second with drafts over without: of all groups, and the least and the greatest."""
        return _ratios([(a.tokens / a.seconds, b.tokens / b.seconds) for a, b in self._with_total()])

    def streams(self) -> str:
        """The same of a stream after its first text: without the time for the prompt, which drafts do not shorten."""
        return _ratios([(a.tokens / a.streaming_s, b.tokens / b.streaming_s) for a, b in self._with_total()])

    def processor(self) -> str:
        """The same per second of the processor; empty where that is not known."""
        pairs = self._with_total()
        if not all(one.processor_s for pair in pairs for one in pair):
            return ""
        return _ratios([(a.tokens / a.processor_s, b.tokens / b.processor_s) for a, b in pairs])

    def _with_total(self) -> list[tuple[Work, Work]]:
        total = sum((a for a, _ in self.groups), Work()), sum((b for _, b in self.groups), Work())
        return [total, *self.groups]


def _ratios(rates: list[tuple[float, float]]) -> str:
    total, *each = [a / b for a, b in rates]
    return f"{total:.2f} ({min(each):.2f} to {max(each):.2f})"


def measure(servers: list[Server], kind: str, n_clients: int, n_prompts: int, n_tokens: int) -> Result:
    """``servers``: with drafts, and without."""
    result = Result(kind, n_clients)
    fields = {"temperature": 0.8, "seed": 1} if kind == "stories" else {}
    drafted = _drafted(servers[0])
    asked = prompts(kind, n_prompts)
    size = max(n_clients, -(-len(asked) // 5))
    for i in range(0, len(asked), size):
        works = {}
        for server in servers if i // size % 2 else servers[::-1]:
            spent = watch_process(server.process.pid)
            answers, seconds = ask_all(server, asked[i : i + size], n_clients, n_tokens, **fields)
            works[server.port] = Work(
                sum(answer.output_tokens for answer in answers),
                seconds,
                spent() or 0.0,
                sum(answer.e2e_s - first_token_s(answer) for answer in answers),
            )
        result.groups.append((works[servers[0].port], works[servers[1].port]))
        ratios = ", ".join(filter(None, (result.speed(), result.streams(), result.processor())))
        note(f"{kind}, {n_clients} clients, {min(i + size, len(asked))} of {len(asked)} prompts: {ratios}")
    counts = _drafted(servers[0])
    result.n_drafted, result.n_accepted = counts[0] - drafted[0], counts[1] - drafted[1]
    return result


def _drafted(server: Server) -> tuple[int, int]:
    drafts = figures(server, "/stats")["drafts"]
    return int(drafts["drafted_tokens"]), int(drafts["accepted_tokens"])


def table(results: list[Result]) -> str:
    rows = [
        [
            f"{one.kind}, {one.n_clients}",
            one.speed(),
            one.streams(),
            one.processor(),
            f"{_WANTED[one.kind]:g}",
            f"{one.n_accepted / one.n_tokens:.0%}",
            f"{one.n_accepted / max(1, one.n_drafted):.0%}",
        ]
        for one in results
    ]
    heads = ["texts, clients", "tokens/s", "after the first text", "per processor second", "wanted"]
    heads += ["drafted of the answers", "drafts right"]
    return markdown(heads, rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--draft-model", type=Path, help="its drafts instead of --draft-ngram (see first_layers.py)")
    parser.add_argument("--prompts", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--tokens", type=int, default=160, help="of each answer (default: 160)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="(default: 1 4)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(_WANTED), default=list(_WANTED), help="(default: all)")
    options = parse(parser, prompts=2, tokens=24, clients=[1])
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    with ExitStack() as stack:
        drafts = ("--draft-model", str(options.draft_model.resolve())) if options.draft_model else ("--draft-ngram",)
        servers = [children.ours(stack, model, flags[0], *flags) for flags in (drafts, ("--no-draft-ngram",))]
        others = watch_others([server.process.pid for server in servers])
        results = [
            measure(servers, kind, n_clients, options.prompts, options.tokens)
            for kind in options.kinds
            for n_clients in options.clients
        ]
        busy = warnings([others()])
    print(table(results))
    for line in busy:
        print(line)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
