"""mlx-lm's tokenizer as the Tokenizer protocol of ``text``. Touches no MLX array; any thread may call it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

from jinja2 import TemplateError

from mlx_serve.engine.errors import one_line
from mlx_serve.engine.models.encoding import Encoder
from mlx_serve.values import TAG, ApiError, Check, unchecked

log = logging.getLogger(__name__)

# How sentencepiece vocabularies write a byte that is not a character, and a space.
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"

# mlx-lm's parsers raise these for text that is not a call: numbers too large, brackets too deep.
_PARSER_ERRORS = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, SyntaxError),
    *(ArithmeticError, RecursionError, MemoryError),
)


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE represents bytes (the reverse of GPT-2's bytes_to_unicode)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class MlxTokenizer:
    """mlx-lm's tokenizer as the Tokenizer protocol of ``text``.

    Fast tokenizers are not thread-safe, because encoding changes their settings, so there are locks. Decoding has its
    own copy and lock: every token of every stream is decoded, and must not wait for a prompt to be encoded.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._decoder = copy.deepcopy(wrapper._tokenizer)
        self._decoder_lock = Lock()
        self.max_token_chars = max((len(token) for token in wrapper.get_vocab()), default=1)
        self._encoder = Encoder(self._encode, self._all_tokens, self.max_token_chars)
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.n_tokens = len(wrapper)
        self.has_chat_template = bool(wrapper.has_chat_template)
        self.template = _template_source(wrapper)
        self._apply_template = _renderer(wrapper)
        self.think: tuple[str, str] | None = (wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else None
        self.tool_call: tuple[str, str] | None = None
        self.tool_format: str | None = None
        if wrapper.has_tool_calling:
            self.tool_call = (wrapper.tool_call_start, wrapper.tool_call_end)
            # Each of mlx-lm's parsers is a module with the name of its format.
            self.tool_format = str(wrapper.tool_parser.__module__).rpartition(".")[2]
        self.structural_markers: Sequence[str] = tuple(wrapper.structural_markers)
        self.transitions: Mapping[str, Sequence[tuple[str, str]]] = dict(wrapper.response_transitions)
        self.initial_region: str | None = wrapper.response_initial_state
        added = {int(token): str(entry.content) for token, entry in wrapper.added_tokens_decoder.items()}
        self.special_ids = _special_ids(wrapper)
        named = {token: str(wrapper.convert_ids_to_tokens(token)) for token in self.special_ids}
        self.controls: Mapping[int, str] = added | named | self._ordinary_markers()
        self.hidden_ids = self._hidden_ids()
        self._added_ids = frozenset(wrapper.added_tokens_decoder)
        self._byte_level = _is_byte_level(wrapper)

    def encode(self, text: str, *, special: bool, check: Check = unchecked) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text, such as a start token.

        The text is cut at each GUARD, and its parts are encoded separately. A long text is encoded in pieces. ``check``
        is called before the first piece and after each one; its exception ends the work.
        """
        return self._encoder.encode(text, special=special, check=check)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        with self._decoder_lock:
            return str(self._decoder.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text. They may be less than a character."""
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
    ) -> str:
        """The rendered chat template, for ``encode`` without ``special``. Raises ApiError 400 when it refuses."""
        options = {"add_generation_prompt": True, **options}
        try:
            # Jinja renders without changing the tokenizer, so no lock is needed.
            return str(
                self._apply_template(list(messages), tools=list(tools) if tools else None, tokenize=False, **options)
            )
        except Exception as error:  # a template is foreign code that runs on the client's input
            log.debug("the chat template refused messages: %s", one_line(error))
            refusal = "The model's chat template cannot render these messages."
            if isinstance(error, TemplateError) and error.message:
                refusal += f" It says: {one_line(error.message)}"
            raise ApiError(400, refusal, param="messages") from error

    def parse_tool_call(self, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """The calls in one tool-call region, each {"name", "arguments"}. Raises ValueError when it is malformed."""
        try:
            parsed = self._wrapper.tool_parser(text, list(tools) or None)
        except _PARSER_ERRORS as error:
            raise ValueError(f"malformed tool call: {error}") from error
        return parsed if isinstance(parsed, list) else [parsed]

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self._wrapper.encode(text, add_special_tokens=special))

    def _all_tokens(self) -> Iterator[bytes]:
        return (self.token_bytes(token) for token in self._wrapper.get_vocab().values())

    def _ordinary_markers(self) -> dict[int, str]:
        # Some vocabularies have their markers among the ordinary tokens, where mlx-lm finds them too. If the tokenizer
        # does not encode a marker as this one token, the marker is text.
        vocabulary = self._wrapper.get_vocab()
        markers = [*(self.think or ()), *(self.tool_call or ()), *self.structural_markers]
        found = {marker: vocabulary.get(marker) for marker in markers if TAG.fullmatch(marker)}
        return {
            token: marker
            for marker, token in found.items()
            if token is not None and self.encode(marker, special=False) == [token]
        }

    def _hidden_ids(self) -> frozenset[int]:
        # Special tokens never reach a client as text, except those of markers, which belong to the answer.
        markers = "".join([*(self.think or ()), *(self.tool_call or ())])
        return frozenset(token for token in self.special_ids if not (markers and self.controls[token] in markers))


def _special_ids(wrapper: Any) -> frozenset[int]:
    added = wrapper.added_tokens_decoder.items()
    return frozenset([*map(int, wrapper.all_special_ids), *(int(token) for token, entry in added if entry.special)])


def _renderer(wrapper: Any) -> Callable[..., Any]:
    """The function that renders the chat template. mlx-lm's own would turn thinking on without being asked."""
    if wrapper._chat_template is not None:
        return wrapper._chat_template  # type: ignore[no-any-return]
    return partial(wrapper._tokenizer.apply_chat_template, return_dict=False)


def _template_source(wrapper: Any) -> str | None:
    """The text of the chat template, or of all templates if there are several; None: the template is code."""
    template = wrapper.chat_template
    if wrapper.init_kwargs.get("chat_template_type"):
        return None
    if isinstance(template, dict):
        return "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else None


def _is_byte_level(wrapper: Any) -> bool:
    backend = getattr(wrapper, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in str(backend.decoder)
