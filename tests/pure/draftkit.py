"""A machine that decodes known texts by a clock of its own, with the drafts that the server would check or without.

The device runs one pass at a time. A step without drafts starts its pass before it reads the tokens of the pass before,
so the Python work between two steps takes no time of its own unless it is longer than a pass. A step with drafts reads
those tokens first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_serve.engine.generate.draft_length import DraftLength, Times
from mlx_serve.engine.generate.drafts import Chances, Lookup


@dataclass(frozen=True)
class Text:
    """A prompt and the answer that the model gives to it."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass
class Row:
    """As in the batch (bank.py)."""

    text: Text
    lookup: Lookup | None
    began_s: float
    credit: float = 0.0
    max_drafts: int = 15
    # Tokens of the answer that were fed, and whether the next one was read.
    n_fed: int = 0
    knows_next: bool = False

    @property
    def left(self) -> Sequence[int]:
        return self.text.answer[self.n_fed :]

    def expected(self, n_tokens: int) -> float:
        assert self.lookup is not None
        return self.lookup.expected(n_tokens, ahead=not self.knows_next)

    def learn(self) -> None:
        if self.lookup is not None and not self.knows_next and self.n_fed < len(self.text.answer):
            self.lookup.add(self.text.answer[self.n_fed])
            self.knows_next = True

    def step(self) -> int:
        self.learn()
        self.n_fed, self.knows_next = self.n_fed + 1, False
        return 1

    def step_with_drafts(self, n_drafts: int) -> tuple[int, int]:
        """How many tokens were drafted, and how many came of it."""
        assert self.lookup is not None
        self.learn()
        draft, left = self.lookup.draft(min(n_drafts, len(self.left) - 1)), self.left[1:]
        n_right = next((n for n, (a, b) in enumerate(zip(draft, left, strict=False)) if a != b), len(draft))
        self.lookup.add(*draft[:n_right])
        self.n_fed, self.knows_next = self.n_fed + 1 + n_right, False
        self.learn()
        return len(draft), 1 + n_right


@dataclass(frozen=True)
class Machine:
    """``pass_s``: of so many rows, and tokens in each row. ``host_s``: Python's work between the steps of so many rows.

    ``noise`` multiplies the durations that are measured.
    """

    pass_s: Callable[[int, int], float]
    host_s: Callable[[int], float] = lambda n_rows: 0.0005 + 0.00005 * n_rows
    noise: Callable[[random.Random], float] = lambda rng: 1.0


class Clock:
    """Of the Python thread and the device. ``noise`` multiplies each duration."""

    def __init__(self, noise: Callable[[], float]) -> None:
        self.now_s = self.busy_until_s = 0.0
        self._noise = noise

    def work(self, seconds: float) -> None:
        """The Python thread works."""
        self.now_s += seconds * self._noise()

    def start(self, seconds: float) -> None:
        """Start a pass, which begins when the one before it has ended."""
        self.busy_until_s = max(self.now_s, self.busy_until_s) + seconds * self._noise()

    def wait(self, until_s: float) -> None:
        self.now_s = max(self.now_s, until_s)


@dataclass
class Run:
    """``seconds`` without noise: in all, and of each text from its beginning to its end, by its number."""

    seconds: float = 0.0
    of_text: dict[int, float] = field(default_factory=dict)
    n_drafted: int = 0
    n_accepted: int = 0


def decode(machine: Machine, texts: Sequence[Text], n_clients: int, *, drafts: bool, seed: int = 0) -> Run:
    """Each client asks for the next text as soon as it has the last one."""
    rng, waiting, run = random.Random(seed), deque(enumerate(texts)), Run()
    rows: dict[int, Row] = {}
    length, chances = DraftLength(), Chances()
    # The controller sees the one, and the result is by the other.
    _, real = clocks = Clock(lambda: machine.noise(rng)), Clock(lambda: 1.0)
    while waiting or rows:
        joined = []
        while waiting and len(rows) < n_clients:
            number, text = waiting.popleft()
            joined.append(number)
            rows[number] = Row(text, Lookup(text.prompt, None, chances) if drafts else None, real.now_s)
        if joined:
            length.changed()
        n_drafts = length.choose((len(rows),), list(rows.values())) if drafts and not joined else 0
        if n_drafts:
            _step_with_drafts(machine, length, clocks, list(rows.values()), n_drafts, run)
        else:
            _step(machine, length, clocks, list(rows.values()))
        for clock in clocks:
            clock.work(machine.host_s(len(rows)))
        for number in [number for number, row in rows.items() if not row.left]:
            for clock in clocks:
                clock.wait(clock.busy_until_s)
            run.of_text[number] = real.now_s - rows.pop(number).began_s
            length.changed()
    run.seconds = real.now_s
    return run


def _step(machine: Machine, length: DraftLength, clocks: Sequence[Clock], rows: Sequence[Row]) -> None:
    seen = clocks[0]
    started_s = seen.now_s
    for clock in clocks:
        before_s = clock.busy_until_s
        clock.start(machine.pass_s(len(rows), 1))
        clock.wait(before_s)
    for row in rows:
        row.step()
    length.ran_plain((len(rows),), rows, Times(started_s, started_s, seen.now_s))


def _step_with_drafts(
    machine: Machine, length: DraftLength, clocks: Sequence[Clock], rows: Sequence[Row], n_drafts: int, run: Run
) -> None:
    seen = clocks[0]
    started_s, ready_s = seen.now_s, max(seen.now_s, seen.busy_until_s)
    stepped = [row.step_with_drafts(n_drafts) for row in rows]
    n_longest = max(n for n, _ in stepped)
    for clock in clocks:
        clock.start(machine.pass_s(len(rows), 1 + n_longest))
        clock.wait(clock.busy_until_s)
    taken = [(row, n) for row, (_, n) in zip(rows, stepped, strict=True)]
    length.ran((len(rows),), n_longest, taken, Times(started_s, ready_s, seen.now_s))
    run.n_drafted += sum(n for n, _ in stepped)
    run.n_accepted += sum(n - 1 for _, n in stepped)
