"""What is sent: conversations of random words, the same for the same seed and round. Knows no server and no clock.

Lengths are in tokens, but there is no tokenizer here: ``Sizes``, measured at the server, says how many words they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Frequent words, so that nearly every tokenizer has a token for each.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city name team minute idea body back parent face level office door health person
art war history party result change morning reason research girl guy moment air teacher force education
"""
_VOCABULARY = tuple(_WORDS.split())

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """What is added to a conversation before the next answer, and how long that answer may be, in tokens."""

    messages: tuple[Message, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of which each has those before it, and their answers, as its history. Most have one turn."""

    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How long and how many. ``range_ratio`` r: lengths are uniform, from (1 - r) to (1 + r) times the given ones."""

    seed: int
    n_requests: int
    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0
    n_groups: int = 4
    prefix_tokens: int = 512
    n_turns: int = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a word, and those that a prompt has besides its words (the chat template's)."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    def n_words(self, n_tokens: int, *, alone: bool = True) -> int:
        """So many words make up so many tokens; ``alone``: they are a prompt of their own, not a part of one."""
        own = n_tokens - self.overhead_tokens if alone else n_tokens
        return max(1, round(own / self.tokens_per_word))


def words(rng: random.Random, n: int) -> str:
    """So many random words."""
    return " ".join(rng.choices(_VOCABULARY, k=n))


def random_prompts(shape: WorkloadShape, sizes: Sizes, name: str) -> list[Conversation]:
    """Requests that have nothing in common."""
    texts = random.Random(f"{shape.seed} {name} texts")
    return [_one_turn(words(texts, sizes.n_words(n_in)), n_out) for n_in, n_out in lengths(shape)]


def shared_prefix(shape: WorkloadShape, sizes: Sizes, name: str) -> list[Conversation]:
    """Groups of requests that begin alike, mixed. A prompt has the prefix's length and its own added."""
    texts = random.Random(f"{shape.seed} {name} texts")
    n_prefix = sizes.n_words(shape.prefix_tokens, alone=False)
    prefixes = [words(texts, n_prefix) for _ in range(shape.n_groups)]
    found = [
        _one_turn(f"{prefixes[i % shape.n_groups]} {words(texts, sizes.n_words(n_in))}", n_out)
        for i, (n_in, n_out) in enumerate(lengths(shape))
    ]
    random.Random(f"{shape.seed} {name} order").shuffle(found)
    return found


def multi_turn(shape: WorkloadShape, sizes: Sizes, name: str) -> list[Conversation]:
    """Conversations of ``n_turns``, the last one shorter where the number of requests asks for it."""
    texts = random.Random(f"{shape.seed} {name} texts")
    turns = [PlannedTurn((_user(words(texts, sizes.n_words(n_in))),), n_out) for n_in, n_out in lengths(shape)]
    return [Conversation(tuple(turns[i : i + shape.n_turns])) for i in range(0, len(turns), shape.n_turns)]


GENERATORS = {"random": random_prompts, "shared-prefix": shared_prefix, "multi-turn": multi_turn}


def lengths(shape: WorkloadShape) -> Iterator[tuple[int, int]]:
    """Pairs of input and output length, uniform between the bounds that vLLM's random dataset has.

    Of the seed alone: the rounds of a run have the same lengths, with other words.
    """
    rng = random.Random(f"{shape.seed} lengths")
    for _ in range(shape.n_requests):
        yield (
            _uniform(rng, shape.input_tokens, shape.range_ratio),
            _uniform(rng, shape.output_tokens, shape.range_ratio),
        )


def _uniform(rng: random.Random, middle: int, ratio: float) -> int:
    return rng.randint(max(1, math.floor(middle * (1 - ratio))), max(1, math.ceil(middle * (1 + ratio))))


def _one_turn(text: str, n_out: int) -> Conversation:
    return Conversation((PlannedTurn((_user(text),), n_out),))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def n_requests(conversations: Sequence[Conversation]) -> int:
    """Turns of all of them."""
    return sum(len(conversation.turns) for conversation in conversations)


def take(conversations: Sequence[Conversation], n: int) -> list[Conversation]:
    """The first ``n`` in order, from the beginning again when there are fewer."""
    return [conversations[i % len(conversations)] for i in range(n)]
