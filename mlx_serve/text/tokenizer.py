"""The tokenizer interface of the text and api layers. ``engine/models/tokenizer.py`` implements it over mlx-lm's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_serve.values import Check, unchecked


class Tokenizer(Protocol):
    """Safe to call from any thread, and hashable, because values derived from a tokenizer are kept.

    The facts about a model's format are mlx-lm's; ``text/formats.py`` interprets them. Ordinary text never becomes a
    control token.
    """

    has_chat_template: bool
    # The number of characters of the longest token: a longer text is certainly more than one token.
    max_token_chars: int
    n_tokens: int
    # The chat template's source; None when it is code.
    template: str | None
    # All control tokens by their id; those in ``special_ids`` are never text, the others are text where they mean
    # nothing.
    controls: Mapping[int, str]
    special_ids: frozenset[int]
    # Control tokens whose text must not be visible in a plain completion.
    hidden_ids: frozenset[int]
    # The texts that open and close a reasoning region and a tool call; a tool call's closing text may be "".
    think: tuple[str, str] | None
    tool_call: tuple[str, str] | None
    # mlx-lm's name of the tool-call format.
    tool_format: str | None
    # mlx-lm's markers that are dropped, its transitions between regions, and the region in which an answer begins.
    structural_markers: Sequence[str]
    transitions: Mapping[str, Sequence[tuple[str, str]]]
    initial_region: str | None

    def __hash__(self) -> int:
        """By identity."""

    def encode(self, text: str, *, special: bool, check: Check = unchecked) -> list[int]:
        """Token ids; ``special`` adds the tokens that the tokenizer puts around a text, such as a start token.

        The text is cut at each GUARD, and its parts are encoded one by one. A long text is encoded in pieces;
        ``check`` is called before the first piece and after each one, and an exception from it ends the work.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text, which may be less than a character."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> str:
        """The chat template's text, for ``encode`` without ``special``. Raises ApiError 400 when it refuses."""

    def parse_tool_call(self, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """mlx-lm's parser: the calls in one region, each {"name", "arguments"}. Raises ValueError."""
