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
    lookup: Lookup
    began_s: float
    credit: float = 0.0
    # Tokens of the answer that were fed, and whether the next one was read.
    n_fed: int = 0
    knows_next: bool = False

    @property
    def left(self) -> Sequence[int]:
        return self.text.answer[self.n_fed :]

    def expected(self, n_tokens: int) -> float:
        return self.lookup.expected(n_tokens, ahead=not self.knows_next)

    def learn(self) -> None:
        if not self.knows_next and self.left:
            self.lookup.add(self.left[0])
            self.knows_next = True

    def step(self) -> int:
        self.learn()
        self.n_fed, self.knows_next = self.n_fed + 1, False
        return 1

    def step_with_drafts(self, n_drafts: int) -> tuple[int, int]:
        """How many tokens were drafted, and how many came of it."""
        self.learn()
        draft, left = self.lookup.draft(min(n_drafts, len(self.left) - 1)), self.left[1:]
        n_right = next((n for n, (a, b) in enumerate(zip(draft, left, strict=False)) if a != b), len(draft))
        self.lookup.add(*draft[:n_right])
        self.n_fed, self.knows_next = self.n_fed + 1 + n_right, False
        self.learn()
        return len(draft), 1 + n_right


@dataclass
class Machine:
    """``pass_s``: of so many rows, and tokens in each row. ``host_s``: Python's work between the steps of so many rows.

    ``noise`` multiplies each duration. ``prefill_s`` is what a request takes before it joins.
    """

    pass_s: Callable[[int, int], float]
    host_s: Callable[[int], float] = lambda n_rows: 0.0005 + 0.00005 * n_rows
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    prefill_s: float = 0.05


@dataclass
class Run:
    """``seconds`` in all, and from the beginning to the end of each text, by its number."""

    seconds: float = 0.0
    of_text: dict[int, float] = field(default_factory=dict)
    n_drafted: int = 0
    n_accepted: int = 0
    n_steps: int = 0


def decode(machine: Machine, texts: Sequence[Text], n_clients: int, *, drafts: bool, seed: int = 0) -> Run:
    """Each client asks for the next text as soon as it has the last one."""
    rng, waiting, rows, run = random.Random(seed), deque(enumerate(texts)), {}, Run()
    length, chances = DraftLength(), Chances()
    now_s = busy_until_s = 0.0

    def takes(seconds: float) -> float:
        return seconds * machine.noise(rng)

    while waiting or rows:
        joined = False
        while waiting and len(rows) < n_clients:
            number, text = waiting.popleft()
            now_s = max(now_s, busy_until_s) + takes(machine.prefill_s)
            rows[number] = Row(text, Lookup(text.prompt, None, chances), now_s)
            joined = True
        if joined:
            length.interrupted()
        shape, each = (len(rows),), list(rows.values())
        n_drafts = length.choose(shape, each) if drafts and not joined else 0
        started_s = now_s
        if n_drafts:
            ready_s = max(now_s, busy_until_s)
            stepped = [row.step_with_drafts(n_drafts) for row in each]
            n_longest = max(n for n, _ in stepped)
            now_s = busy_until_s = ready_s + takes(machine.pass_s(len(rows), 1 + n_longest))
            taken = [(row, n) for row, (_, n) in zip(each, stepped, strict=True)]
            length.ran(shape, n_longest, taken, Times(started_s, ready_s, now_s))
            run.n_drafted += sum(n for n, _ in stepped)
            run.n_accepted += sum(n - 1 for _, n in stepped)
        else:
            ready_s = busy_until_s
            busy_until_s = max(now_s, busy_until_s) + takes(machine.pass_s(len(rows), 1))
            now_s = max(now_s, ready_s)
            for row in each:
                row.step()
            length.ran_plain(shape, each, Times(started_s, started_s, now_s))
        run.n_steps += 1
        now_s += takes(machine.host_s(len(rows)))
        for number in [number for number, row in rows.items() if not row.left]:
            now_s = max(now_s, busy_until_s)
            run.of_text[number] = now_s - rows.pop(number).began_s
            length.interrupted()
    run.seconds = max(now_s, busy_until_s)
    return run
