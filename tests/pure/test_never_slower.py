"""Drafts on simulated machines: at worst 3 % slower than without, whatever the texts, and faster where they repeat."""

import ast
import inspect
import json
import random
import re
import textwrap
from functools import cache
from pathlib import Path

import pytest

from tests.pure.draftkit import Machine, Text, decode

# The least gain of a text that repeats nothing.
LEAST = 1 / 1.03
ROOT = Path(__file__).parents[2]


def by_tokens(milliseconds):
    """What a pass takes, by the tokens of all its rows; between those that are known, along a line."""
    known = sorted(milliseconds)

    def seconds(n_rows, n_tokens):
        n = n_rows * n_tokens
        low = max(k for k in known if k <= n)
        high = min((k for k in known if k > n), default=low)
        slope = (milliseconds[high] - milliseconds[low]) / (high - low) if high > low else 0.0
        return (milliseconds[low] + slope * (n - low)) / 1000

    return seconds


def noisy(rng):
    return rng.lognormvariate(0, 0.15) * (rng.uniform(2, 8) if rng.random() < 0.02 else 1)


# A pass reads all weights, however few its tokens are.
MEMORY = by_tokens({1: 20, 2: 20.6, 4: 22, 8: 25, 16: 30, 32: 50, 64: 90, 512: 660})
# Up to 8 rows have a kernel of their own, which costs more with each row.
STEPS = by_tokens({1: 20, 2: 26, 4: 36, 8: 52, 12: 60, 16: 62, 32: 70, 64: 100, 512: 700})
# A pass of k tokens takes nearly k times as long.
COMPUTE = by_tokens({1: 50, 2: 95, 4: 170, 8: 320, 16: 620, 512: 20_000})
MACHINES = {
    "memory": Machine(MEMORY),
    "steps": Machine(STEPS),
    "compute": Machine(COMPUTE),
    # Python's work takes as long as a pass, and has nothing to run beside it when there are drafts.
    "small model": Machine(lambda *n: MEMORY(*n) / 10, host_s=lambda n_rows: 0.0018),
    "memory, noisy": Machine(MEMORY, noise=noisy),
    "compute, noisy": Machine(COMPUTE, noise=noisy),
}


VOCABULARY = {}
N_TEXTS = 6


def tokens(text):
    words = re.findall(r"\w{1,6}|\s+|[^\w\s]", text)
    return [VOCABULARY.setdefault(word, len(VOCABULARY)) for word in words]


@cache
def code():
    """Functions that are repeated with one name changed."""
    texts = []
    for module in (textwrap, inspect, ast, json.decoder, json.encoder):
        source = inspect.getsource(module)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and len(segment := ast.get_source_segment(source, node)) > 800:
                answer = re.sub(rf"\b{node.name}\b", "another_name", segment).replace("self", "this")
                texts.append(Text(tokens(f"Repeat this with another name:\n\n{segment}\n"), tokens(answer)[:400]))
    return texts[:N_TEXTS]


@cache
def records():
    """Sentences, and the JSON that says the same."""
    rng, texts = random.Random(1), []
    names = re.findall(r"[A-Z][a-z]{4,}", (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8"))
    for _ in range(N_TEXTS):
        people = [
            {
                "name": f"{rng.choice(names)} {rng.choice(names)}",
                "age": rng.randrange(20, 90),
                "city": rng.choice(names),
            }
            for _ in range(8)
        ]
        said = " ".join(f"{one['name']} is {one['age']} years old and lives in {one['city']}." for one in people)
        texts.append(
            Text(tokens(f"As a JSON array of name, age and city: {said}"), tokens(json.dumps(people, indent=2)))
        )
    return texts


@cache
def prose():
    """Pages, which repeat a word now and then."""
    pages = tokens((ROOT / "docs" / "decisions.md").read_text(encoding="utf-8"))
    return [Text(pages[n : n + 300], pages[n + 300 : n + 550]) for n in range(0, N_TEXTS * 550, 550)]


@cache
def nothing():
    rng = random.Random(2)
    return [Text([rng.randrange(10**6) for _ in range(300)], [rng.randrange(10**6) for _ in range(250)])] * N_TEXTS


@cache
def soon_wrong(n_right):
    """Each match is right for so many tokens, and then wrong."""
    rng, texts = random.Random(3), []
    for _ in range(N_TEXTS):
        answer = []
        while len(answer) < 250:
            place = rng.randrange(500)
            answer += [*range(place, place + 1 + n_right), rng.randrange(1000, 10**6)]
        texts.append(Text(range(520), answer))
    return texts


@cache
def turns():
    """Copies that end, and are followed by what repeats nothing."""
    return [Text(one.prompt, [*one.answer[:120], *other.answer]) for one, other in zip(code(), nothing(), strict=False)]


def short():
    """Answers of a few words."""
    return [Text(one.prompt, one.answer[:12]) for one in code() * 3]


TEXTS = {
    "code": code,
    "records": records,
    "prose": prose,
    "nothing": nothing,
    "soon wrong": lambda: soon_wrong(1),
    "wrong later": lambda: soon_wrong(4),
    "turns": turns,
    "short": short,
}
WANTED = {
    ("memory", "code", 1): 3,
    ("memory", "code", 4): 1.8,
    ("memory", "records", 1): 1.5,
    ("memory", "records", 4): 1.2,
    ("steps", "code", 1): 2,
    ("steps", "code", 4): 2,
    ("memory, noisy", "code", 1): 3,
    ("memory, noisy", "records", 1): 1.5,
}


def gain(machine, texts, n_clients, seed=1):
    """How many times as fast decoding is with drafts, and both runs."""
    runs = [decode(MACHINES[machine], texts, n_clients, drafts=drafts, seed=seed) for drafts in (True, False)]
    return runs[1].seconds / runs[0].seconds, *runs


@pytest.mark.parametrize("n_clients", [1, 4])
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_are_never_slower_and_faster_where_texts_repeat(machine, kind, n_clients):
    seen, drafted, _ = gain(machine, TEXTS[kind](), n_clients)
    assert seen >= WANTED.get((machine, kind, n_clients), LEAST)
    if kind == "nothing":
        assert drafted.n_drafted == 0


@pytest.mark.parametrize("machine", ["memory", "steps", "compute"])
def test_answers_that_repeat_nothing_are_not_slower_beside_others_that_do(machine):
    texts = [*nothing()[:2], *[code()[n % len(code())] for n in range(30)]]
    for n_clients in (3, 8):
        _, drafted, plain = gain(machine, texts, n_clients)
        # Beside fewer others a step is shorter, so it only counts that it is not longer.
        assert max(drafted.of_text[n] / plain.of_text[n] for n in (0, 1)) < 1.04


def test_what_would_lose_is_seen():
    """A controller without accounts, which believes that drafts cost nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_serve.engine.generate.draft_length.DraftLength._cost", lambda *_, **__: (1.0, 1.0))
        patch.setattr("mlx_serve.engine.generate.draft_length._OVERDRAFT", 1e9)
        assert gain("compute", records(), 1)[0] < LEAST
