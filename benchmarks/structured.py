"""JSON that has to match a schema: how many answers do, and what the constraint costs.

    python -m benchmarks.structured [--model DIR] [--requests 200] [--clients 8] [--json FILE]

Every request has a random schema of its own and temperature 1, so a small model left alone would hardly get one right.
Each round of constrained requests is followed by one of unconstrained requests with the same numbers of output tokens,
so that a machine whose speed drifts still compares neighbours; no two prompts begin alike. Needs the extras
``structured`` and ``dev``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from benchmarks import children
from benchmarks.asking import ask
from benchmarks.children import OURS, BenchmarkError, Server
from benchmarks.prompts import Messages
from mlx_serve.client.answer import Answer
from mlx_serve.commands.bench.progress import note

Schema = dict[str, Any]

# The schemas bound their text to less than that, so that every answer ends by itself.
MAX_TOKENS = 1024
_MAX_DEPTH = 1
_NAMES = ("name", "age", "city", "tags", "price", "active", "notes", "kind", "when", "size")


def random_schema(rng: random.Random) -> Schema:
    """A schema as people write them, whose text cannot go on for ever."""
    return _referring(rng) if rng.random() < 0.1 else _object(rng, 0)


def _any(rng: random.Random, depth: int) -> Schema:
    scalars: list[Callable[[random.Random], Schema]] = [_string, _pattern, _format, _integer, _enum, _constant, _flag]
    if depth < _MAX_DEPTH and rng.random() < 0.4:
        return rng.choice([_object, _array, _either])(rng, depth + 1)
    return rng.choice(scalars)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    properties = {name: _any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth), {"type": "null"}]}


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 20)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(["^[A-Z]{2}-[0-9]{3}$", "^(red|green|blue)s?$", "^[a-z]{1,8}$"])}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}


def _integer(rng: random.Random) -> Schema:
    least = rng.randint(-100, 100)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(["small", "large", "ü", 'a "b"', 1, 2.5, None, True], 3)}


def _constant(rng: random.Random) -> Schema:
    return {"const": rng.choice(["v1", 7, False, None])}


def _flag(_rng: random.Random) -> Schema:
    return {"type": "boolean"}


def _referring(rng: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {"value": _integer(rng), "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node, "leaf": _object(rng, 1)}}


@dataclass(slots=True)
class Result:
    """Both kinds of requests, summed up."""

    n_requests: int = 0
    n_valid: int = 0
    constrained_s: float = 0.0
    constrained_tokens: int = 0
    plain_s: float = 0.0
    plain_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """The constraint's share of an unconstrained token's time, on top of it."""
        return (self.constrained_s / self.constrained_tokens) / (self.plain_s / self.plain_tokens) - 1


def constrained(server: Server, serial: int, schema: Schema) -> Answer:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return ask(server, _messages(serial, "A"), MAX_TOKENS, temperature=1, response_format=wanted)


def plain(server: Server, serial: int, n_tokens: int) -> Answer:
    return ask(server, _messages(serial, "B"), n_tokens, temperature=1, ignore_eos=True)


def _messages(serial: int, kind: str) -> Messages:
    return [{"role": "user", "content": f"{serial} {kind}: Invent a record."}]


def fault(text: str, schema: Schema) -> str:
    """Why a constrained answer does not count; "" when it matches its schema."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r} against {json.dumps(schema)}: {str(error).splitlines()[0]}"
    return ""


def measure(server: Server, schemas: Sequence[Schema], n_clients: int) -> Result:
    """Rounds of six requests a client, of one kind and of the other in turn."""
    result = Result()
    with ThreadPoolExecutor(n_clients) as clients:
        constrained(server, 0, schemas[0])
        for start in range(0, len(schemas), 6 * n_clients):
            serials = range(start, min(start + 6 * n_clients, len(schemas)))
            began_at = time.perf_counter()
            answers = list(clients.map(lambda i: constrained(server, i, schemas[i]), serials))
            half_at = time.perf_counter()
            counts = [answer.output_tokens for answer in answers]
            others = list(clients.map(lambda i, n: plain(server, i, n), serials, counts))
            result.plain_s += time.perf_counter() - half_at
            result.plain_tokens += sum(answer.output_tokens for answer in others)
            _add(result, answers, [schemas[i] for i in serials], half_at - began_at)
            note(f"{result.n_valid} of {result.n_requests} valid")
    return result


def _add(result: Result, answers: Sequence[Answer], schemas: Sequence[Schema], seconds: float) -> None:
    pairs = zip(answers, schemas, strict=True)
    faults = [f"{answer.finish}: {why}" for answer, schema in pairs if (why := fault(answer.text, schema))]
    result.n_requests += len(answers)
    result.n_valid += len(answers) - len(faults)
    result.faults += faults
    result.constrained_s += seconds
    result.constrained_tokens += sum(answer.output_tokens for answer in answers)


def report(result: Result) -> str:
    lines = [
        "| | requests | output tokens | token/s |",
        "| :-- | --: | --: | --: |",
        _row("with a schema", result.n_requests, result.constrained_tokens, result.constrained_s),
        _row("without", result.n_requests, result.plain_tokens, result.plain_s),
        "",
        f"{result.n_valid} of {result.n_requests} match their schema; a token costs {result.cost:+.1%} time.",
    ]
    return "\n".join([*lines, *(f"fault: {fault}" for fault in result.faults)])


def _row(name: str, n_requests: int, n_tokens: int, seconds: float) -> str:
    return f"| {name} | {n_requests} | {n_tokens} | {n_tokens / seconds:.1f} |"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: the demo model)")
    parser.add_argument("--requests", type=int, default=200, help="(default: 200)")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the schemas (default: 0)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    children.end_on_sigterm()
    model = options.model.resolve() if options.model else children.demo_model()
    rng = random.Random(options.seed)
    schemas = [random_schema(rng) for _ in range(options.requests)]
    port = children.free_port()
    try:
        with children.running(OURS, children.our_command(model, port), model, port) as server:
            result = measure(server, schemas, options.clients)
    except BenchmarkError as error:
        print(f"structured: {error}", file=sys.stderr)
        return 1
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return 0 if result.n_valid == result.n_requests else 1


if __name__ == "__main__":
    sys.exit(main())
