"""mlx-lm's tokenizer as the Tokenizer protocol of ``text``. Touches no MLX array; any thread may call it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from jinja2 import TemplateError

from mlx_serve.core import ApiError
from mlx_serve.engine.errors import one_line

log = logging.getLogger(__name__)

# How sentencepiece vocabularies write a byte that is no character, and a space.
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as (GPT-2's bytes_to_unicode, the other way round)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class MlxTokenizer:
    """mlx-lm's tokenizer as the Tokenizer protocol of ``text``; one lock, for fast tokenizers are not thread-safe."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._lock = Lock()
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.n_tokens = len(wrapper)
        self.has_chat_template = bool(wrapper.has_chat_template)
        self.think: tuple[str, str] | None = (wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else None
        self.tool_call: tuple[str, str] | None = None
        if wrapper.has_tool_calling:
            self.tool_call = (wrapper.tool_call_start, wrapper.tool_call_end)
        self.hidden_ids = self._hidden_ids()
        self._added_ids = frozenset(wrapper.added_tokens_decoder)
        self._byte_level = _is_byte_level(wrapper)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text, such as a start token."""
        with self._lock:
            return list(self._wrapper.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        with self._lock:
            return str(self._wrapper.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text, which may be less than a character."""
        piece = self._wrapper.convert_ids_to_tokens(token)
        if piece is None or token in self._added_ids:
            return str(piece or "").encode()
        if self._byte_level:
            return bytes(_BYTE_OF_CHAR.get(char, 0x3F) for char in piece)
        if match := _HEX_BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace(_SPACE_MARK, " ").encode()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """The chat template's prompt. Raises ApiError 400 when the template refuses the messages."""
        try:
            with self._lock:
                ids = self._wrapper.apply_chat_template(
                    list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, **options
                )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            log.info("the chat template refused a request: %s", one_line(error))
            text = "The model's chat template cannot render these messages."
            if isinstance(error, TemplateError) and error.message:
                text += f" It says: {one_line(error.message)}"
            raise ApiError(400, text, param="messages") from error
        return [int(token) for token in ids]

    def ends_in_reasoning(self, tokens: Sequence[int]) -> bool:
        """Whether the last reasoning region that the prompt opens is still open."""
        if self.think is None:
            return False
        ids = list(tokens)
        return bool(self._wrapper.rfind_think_start(ids) > self._wrapper.rfind_think_end(ids))

    def parse_tool_call(self, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """The calls in one tool-call region, each {"name", "arguments"}. Raises ValueError when it is malformed."""
        try:
            parsed = self._wrapper.tool_parser(text, list(tools) or None)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, SyntaxError) as error:
            raise ValueError(f"malformed tool call: {error}") from error
        return parsed if isinstance(parsed, list) else [parsed]

    def _hidden_ids(self) -> frozenset[int]:
        # Control tokens never reach a client as text, but those that a marker is made of must be seen.
        markers = "".join([*(self.think or ()), *(self.tool_call or ())])
        special = zip(self._wrapper.all_special_ids, self._wrapper.all_special_tokens, strict=True)
        return frozenset(token for token, text in special if not (markers and text in markers))


def _is_byte_level(wrapper: Any) -> bool:
    backend = getattr(wrapper, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in str(backend.decoder)
