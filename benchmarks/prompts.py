"""Prompts of a known length that begin unlike any other, so that nothing kept of an earlier one helps."""

from __future__ import annotations

import random

from mlx_serve.commands.bench.workload import Message, words

Messages = list[Message]

# Words of the user's message; the requests of a client go through the lengths in turn.
PROMPT_WORDS = (20, 60, 140)


class Prompts:
    """Prompts that differ from their first characters on, so that no prefix cache helps, in a fixed set of lengths."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._serials = iter(self._random.sample(range(10**8, 10**9), 100_000))

    def take(self, n_clients: int, n_each: int) -> list[Messages]:
        """``n_each`` rows of one prompt for each client."""
        lengths = [
            PROMPT_WORDS[(row + client) % len(PROMPT_WORDS)] for row in range(n_each) for client in range(n_clients)
        ]
        return [self.story(n_words) for n_words in lengths]

    def story(self, n_words: int) -> Messages:
        """Asks for a text that has no end soon. The words are about a token each."""
        task = f"Write a very long story, of many chapters, in which all of these words occur: {self.words(n_words)}."
        return [
            {"role": "system", "content": f"{self.serial()}: a writer."},
            {"role": "user", "content": f"{task} Begin now."},
        ]

    def words(self, n_words: int) -> str:
        """At random, with blanks between them."""
        return words(self._random, n_words)

    def serial(self) -> int:
        """A number of nine digits that was not given before."""
        return next(self._serials)
