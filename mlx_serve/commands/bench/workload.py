"""Makes the conversations to send, of random words determined by seed and round. Knows no server and no clock.

Lengths are in tokens, but there is no tokenizer here. ``Sizes``, measured at the server, converts tokens to words.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Frequent words, because most tokenizers have one token for each.
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
    """The messages to add before the next answer, and the maximum length of that answer in tokens."""

    messages: tuple[Message, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that build on each other: each sends the earlier requests and answers too. Most have one turn."""

    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The number and lengths of requests.

    With a ``range_ratio`` r lengths are uniform from (1 - r) to (1 + r) times these.
    """

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
    """The tokens of a word, and the tokens that the chat template adds to a prompt."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    def n_words(self, n_tokens: int, *, alone: bool = True) -> int:
        """The number of words for ``n_tokens``. ``alone``: they are a whole prompt, so the template's tokens count."""
        own = n_tokens - self.overhead_tokens if alone else n_tokens
        return max(1, round(own / self.tokens_per_word))


def words(rng: random.Random, n: int) -> str:
    """``n`` random words."""
    return " ".join(rng.choices(_VOCABULARY, k=n))


def random_prompts(shape: WorkloadShape, sizes: Sizes, name: str) -> list[Conversation]:
    """Requests with unrelated texts."""
    texts = random.Random(f"{shape.seed} {name} texts")
    return [_one_turn(words(texts, sizes.n_words(n_in)), n_out) for n_in, n_out in lengths(shape)]


def shared_prefix(shape: WorkloadShape, sizes: Sizes, name: str) -> list[Conversation]:
    """Groups of requests with the same prefix, in mixed order. A prompt is the prefix plus a text of its own."""
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
    """Conversations of ``n_turns``. The last one is shorter if the number of requests requires it."""
    texts = random.Random(f"{shape.seed} {name} texts")
    turns = [PlannedTurn((_user(words(texts, sizes.n_words(n_in))),), n_out) for n_in, n_out in lengths(shape)]
    return [Conversation(tuple(turns[i : i + shape.n_turns])) for i in range(0, len(turns), shape.n_turns)]


GENERATORS = {"random": random_prompts, "shared-prefix": shared_prefix, "multi-turn": multi_turn}


def lengths(shape: WorkloadShape) -> Iterator[tuple[int, int]]:
    """Yields pairs of input and output length, uniform between the same bounds as in vLLM's random dataset.

    Depends only on the seed: all rounds of a run have the same lengths, but different words.
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
    """The number of requests in all conversations."""
    return sum(len(conversation.turns) for conversation in conversations)


def take(conversations: Sequence[Conversation], n: int) -> list[Conversation]:
    """The first ``n`` conversations, repeated from the beginning if there are fewer."""
    return [conversations[i % len(conversations)] for i in range(n)]
