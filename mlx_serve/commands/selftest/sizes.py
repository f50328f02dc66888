"""How much work each check gets, so that the run takes about the seconds that it was given. Runs nothing itself.

A machine is measured once, in a few seconds. From that follows what full work would cost; where there is less time, a
check gets a part of it. What was not as fast as expected makes the later checks smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# Requests of a round, and the tokens of each.
_REQUESTS = {1: 4, 4: 8, 16: 32}
LEVELS = tuple(_REQUESTS)
_INPUT_TOKENS, _OUTPUT_TOKENS = 256, 64
_LEAST_INPUT, _LEAST_OUTPUT = 16, 4
# The most input and output tokens of a request, as shares of the context.
_MOST_INPUT, _MOST_OUTPUT = 0.5, 0.25
# The greedy answers' lengths, in turn, so that those of a batch end at different steps.
_ANSWER_TOKENS = (32, 64, 96)
_LEAST_ANSWER = 4
# An answer costs so many tokens more: for its prompt, and for the token that mlx-lm computes ahead.
_MORE_TOKENS = 3
# The long prompt's tokens: a share of the context, at most and at least so many.
_LONG_SHARE, _LONG_TOKENS, _LEAST_LONG = 0.5, 16_000, 128
# While a long prompt is read, at least this share of the time goes to it; the rest goes to the streams.
_PROMPT_SHARE = 0.5
# The tokens of an answer with drafts. In fewer, the server has not yet learnt what drafts cost.
_LEAST_DRAFTED, _DRAFTED_TOKENS = 16, 256
# The shares of the time left that go to the answers, to drafts and to the long prompt; the rounds of load get the rest.
ANSWERS_SHARE, DRAFTS_SHARE, LONG_PROMPT_SHARE = 0.4, 0.15, 0.25


@dataclass(frozen=True, slots=True)
class Speed:
    """What mlx-lm does on this machine: seconds to start with the model, and tokens per second.

    ``one_rate`` and ``many_rate`` are output tokens, one sequence at a time and ``n_many`` together.
    ``word_tokens``: the tokens of a frequent word.
    """

    load_s: float
    prompt_rate: float
    one_rate: float
    many_rate: float
    n_many: int
    word_tokens: float = 1.0

    def output_rate(self, n: int) -> float:
        """Output tokens per second, n sequences together; no more than was measured."""
        part = min(1.0, (n - 1) / (self.n_many - 1))
        return self.one_rate + part * max(0.0, self.many_rate - self.one_rate)

    def round_s(self, n_requests: int, n_input: float, n_output: float, n_clients: int) -> float:
        """The seconds of a round of load."""
        return n_requests * (n_input / self.prompt_rate + n_output / self.output_rate(n_clients))


@dataclass(frozen=True, slots=True)
class RoundSize:
    """A round of load; both numbers of tokens are each request's."""

    n_requests: int
    input_tokens: int
    output_tokens: int


class Budget:
    """The time of the run. ``pace``: how much slower work was than its expected cost, lately."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = seconds
        self.pace = 1.0

    @property
    def spent_s(self) -> float:
        """Since the run began."""
        return self._clock() - self._began

    def left_s(self, reserved_s: float = 0.0) -> float:
        """What is left beside what is reserved; 0 at least."""
        return max(0.0, self._seconds - self.spent_s - reserved_s)

    def part(self, share_s: float, full_s: float) -> float:
        """The part of work of ``full_s`` seconds that fits into ``share_s`` on this machine; 1 at most."""
        return min(1.0, share_s / (full_s * self.pace))

    def note(self, expected_s: float, took_s: float) -> None:
        """Work was done that should have taken ``expected_s``."""
        self.pace = max(1.0, (self.pace + took_s / expected_s) / 2)


def answers_s(speed: Speed, n_prompts: int, n_alone: int, n_together: int) -> float:
    """The cost of all greedy answers at full length: mlx-lm's own, and the server's."""
    mean = sum(_ANSWER_TOKENS) / len(_ANSWER_TOKENS) + _MORE_TOKENS
    return (n_prompts + n_alone) * mean / speed.one_rate + n_prompts * mean / speed.output_rate(n_together)


def answer_tokens(n_prompts: int, part: float) -> list[int]:
    """The most tokens of each answer."""
    full = [_ANSWER_TOKENS[i % len(_ANSWER_TOKENS)] for i in range(n_prompts)]
    # Lengths that differ even at the least, for joins and leaves.
    return [max(_LEAST_ANSWER + i % len(_ANSWER_TOKENS), int(part * n)) for i, n in enumerate(full)]


def drafted_tokens(speed: Speed, n_answers: int, share_s: float, pace: float, context: int) -> int:
    """The tokens of each of ``n_answers`` that show what drafts are worth."""
    n_affordable = int(share_s * speed.one_rate / pace / n_answers)
    return int(min(max(_LEAST_DRAFTED, n_affordable), _DRAFTED_TOKENS, _MOST_OUTPUT * context))


def repeated_words(speed: Speed, context: int) -> int:
    """The words of a text that, twice, takes at most half of the context."""
    return int(_MOST_INPUT * context / speed.word_tokens / 2)


def long_tokens(speed: Speed, context: int, share_s: float, pace: float) -> int:
    """The tokens of a long prompt that is read beside streams."""
    n_most = int(min(_LONG_TOKENS, _LONG_SHARE * context))
    n_affordable = int(_PROMPT_SHARE * share_s * speed.prompt_rate / pace)
    return min(n_most, max(_LEAST_LONG, n_affordable))


def full_round_s(speed: Speed, n_clients: int) -> float:
    """The cost of a round at full size."""
    return speed.round_s(_REQUESTS[n_clients], _INPUT_TOKENS, _OUTPUT_TOKENS, n_clients)


def round_size(n_clients: int, part: float, context: int) -> RoundSize:
    """A round of about this part of full size: fewer requests, down to one for each client, then shorter ones."""
    full = _REQUESTS[n_clients]
    n_requests = min(full, max(n_clients, 2, int(part * full)))
    part = min(1.0, part * full / n_requests)
    n_input = max(_LEAST_INPUT, int(min(part * _INPUT_TOKENS, _MOST_INPUT * context)))
    n_output = max(_LEAST_OUTPUT, int(min(part * _OUTPUT_TOKENS, _MOST_OUTPUT * context)))
    return RoundSize(n_requests, n_input, n_output)
