"""What the text and api layers need of a tokenizer. Implemented over mlx-lm's in ``engine/models.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Safe to call from any thread.

    ``hidden_ids`` are control tokens whose text no client may see. ``think`` and ``tool_call`` are the texts that open
    and close a reasoning region and a tool call, None when the model has none; a tool call's closing text may be "".
    """

    hidden_ids: frozenset[int]
    has_chat_template: bool
    n_tokens: int
    think: tuple[str, str] | None
    tool_call: tuple[str, str] | None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text, such as a start token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text, which may be less than a character."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """The chat template's prompt. Raises ApiError 400 when the template refuses the messages."""

    def ends_in_reasoning(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt leaves the model inside its reasoning."""

    def parse_tool_call(self, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """The calls in one tool-call region, each {"name", "arguments"}. Raises ValueError when it is malformed."""
