"""What the text and api layers need of a tokenizer. Implemented over mlx-lm's in ``engine/models/tokenizer.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_serve.values import Check, unchecked


class Tokenizer(Protocol):
    """Safe to call from any thread, and hashable: what is worked out from one is kept.

    The facts about a model's format are mlx-lm's, as it has them; ``text/formats.py`` makes sense of them. A control
    token is one that no ordinary text is made of.
    """

    has_chat_template: bool
    # The longest token's characters: so many characters at least are more than one token.
    max_token_chars: int
    n_tokens: int
    # The chat template's source; None when it is code.
    template: str | None
    # All control tokens by their id; those in ``special_ids`` are never text, the others are where they mean nothing.
    controls: Mapping[int, str]
    special_ids: frozenset[int]
    # Control tokens whose text no client may see in a plain completion.
    hidden_ids: frozenset[int]
    # The texts that open and close a reasoning region and a tool call; a tool call's closing text may be "".
    think: tuple[str, str] | None
    tool_call: tuple[str, str] | None
    # mlx-lm's name of the format of tool calls.
    tool_format: str | None
    # mlx-lm's markers that are dropped, its transitions between regions, and the region an answer begins in.
    structural_markers: Sequence[str]
    transitions: Mapping[str, Sequence[tuple[str, str]]]
    initial_region: str | None

    def __hash__(self) -> int:
        """By identity."""

    def encode(self, text: str, *, special: bool, check: Check = unchecked) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text, such as a start token.

        The text is cut at each GUARD, and its parts are encoded one by one. A long text is encoded in pieces;
        ``check`` is called before the first piece and after each one, and what it raises ends the work.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text, which may be less than a character."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> str:
        """The chat template's text, for ``encode`` without ``special``. Raises ApiError 400 when it refuses."""

    def parse_tool_call(self, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """mlx-lm's parser: the calls in one region, each {"name", "arguments"}. Raises ValueError."""
