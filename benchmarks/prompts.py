"""Prompts of a known length that begin unlike any other, so that nothing kept of an earlier one helps."""

from __future__ import annotations

import random

Messages = list[dict[str, str]]

# Words of the user's message; the requests of a client go through the lengths in turn.
PROMPT_WORDS = (20, 60, 140)
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money story
fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face level office door health person art
war history party result change morning reason research girl guy moment air teacher force education
"""


class Prompts:
    """Prompts that differ from their first characters on, so that no prefix cache helps, in a fixed set of lengths."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = _WORDS.split()
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
        return " ".join(self._random.choices(self._words, k=n_words))

    def serial(self) -> int:
        """A number of nine digits that was not given before."""
        return next(self._serials)
