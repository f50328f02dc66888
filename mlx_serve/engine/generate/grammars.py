"""A model's tokens in llguidance's form, and the grammars that are compiled for them. Any thread.

Knows no text of a request, no HTTP and no MLX. llguidance is an extra, imported when the first grammar comes. Another
process (``api/grammar_child.py``) compiles each new grammar first, under limits of memory and CPU time. A grammar that
compiled there is compiled here again, with the same llguidance limits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any, Protocol
from weakref import WeakSet

from mlx_serve.values import ApiError, Grammar

# These limits are lower than llguidance's defaults. A hostile grammar fails before it takes much memory (one of 50,000
# states took 7 GB) or much of a step. Ordinary schemas need 0.01 to 1 ms a token.
_LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# The first limit is for compiled grammars kept for later requests. The second also counts grammars that running and
# waiting requests hold. An ordinary schema takes 0.1 MB, one with 1,500 properties 10 MB.
MAX_KEPT_BYTES = 256 * 2**20
MAX_HELD_BYTES = 2**30


class TokenTable(Protocol):
    """The token data from which masks are made."""

    n_tokens: int
    eos_ids: frozenset[int]
    # All control tokens by their id, and the token ids that never decode to text.
    controls: Mapping[int, str]
    special_ids: frozenset[int]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A model's tokens in a form for another process: ``texts`` by id, and the ids that are not text."""

    texts: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    n_ids: int

    def trie(self) -> Any:
        """llguidance's form of the tokens. Takes half a second for 50,000 tokens, with the GIL held."""
        from llguidance import LLTokenizer, TokenizerWrapper

        # Made from bytes, not from tokenizer.json: this works for every tokenizer and holds the GIL half as long.
        return LLTokenizer(TokenizerWrapper(_Table(self)), n_vocab=self.n_ids, eos_token=list(self.eos_ids))


class _Table:
    """The attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokens: Tokens) -> None:
        self.eos_token_id = tokens.eos_ids[0]
        # Grammars must not use control tokens: a "<think>" token in a JSON string would not be read as text.
        self.special_token_ids = tokens.special_ids
        self.tokens = tokens.texts

    def __call__(self, text: str | bytes) -> list[int]:
        # llguidance tokenizes only text that a grammar forces, and text/grammar.py turns forcing off.
        raise NotImplementedError("grammars here force no text")


def compile_matcher(trie: Any, text: str) -> Any:
    """A matcher at the start of a grammar. It does not raise: its ``get_error`` says what is wrong with the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(trie, text, log_level=0, limits=LLParserLimits(**_LIMITS))


class _Compiled:
    """A matcher that every job copies. Two threads must not use or copy a matcher at the same time."""

    def __init__(self, matcher: Any, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._matcher = matcher
        self._lock = Lock()

    def copy(self) -> Any:
        with self._lock:
            return self._matcher.deep_copy()


class Vocabulary:
    """A model's tokens and compiled grammars. It lives as long as the model's tokenizer."""

    _numbers = count()

    def __init__(self, tokens: TokenTable, vocab_size: int) -> None:
        # The name of these tokens in the process that compiles grammars.
        self.number = next(self._numbers)
        self._table = tokens
        self._vocab_size = max(vocab_size, tokens.n_tokens)
        self._tokens: Tokens | None = None
        self._trie: Any = None
        self._trie_lock = Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._kept_bytes = 0
        self._held: WeakSet[_Compiled] = WeakSet()
        self._lock = Lock()

    def tokens(self) -> Tokens:
        """The tokens for another process. The first call takes half a second for 50,000 tokens."""
        with self._trie_lock:
            return self._read_tokens()

    def prepare(self) -> Any:
        """llguidance's form of the tokens, made on the first call."""
        with self._trie_lock:
            if self._trie is None:
                self._trie = self._read_tokens().trie()
            return self._trie

    def kept(self, key: str) -> Grammar | None:
        """The grammar that ``keep`` stored under this key, if it is still there."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: str, text: str, n_bytes: int) -> Grammar:
        """Compile a grammar that the child has compiled in ``n_bytes``, and store it under ``key``.

        Raises ApiError: 400 when it does not compile, 503 when the grammars of waiting and running requests take too
        much memory.
        """
        with self._lock:
            if sum(compiled.n_bytes for compiled in self._held) + n_bytes > MAX_HELD_BYTES:
                raise _too_much_held()
        matcher = compile_matcher(self.prepare(), text)
        if matcher.is_error():
            raise ApiError(400, f"The grammar cannot be compiled: {matcher.get_error()}")
        compiled = _Compiled(matcher, n_bytes)
        grammar = Grammar(text, n_bytes, compiled)
        with self._lock:
            self._held.add(compiled)
            self._forget(key)
            self._kept[key] = grammar
            self._kept_bytes += n_bytes
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._forget(next(iter(self._kept)))
        return grammar

    def matcher(self, grammar: Grammar) -> Any:
        """A matcher at the grammar's start. Raises ApiError 400."""
        if not isinstance(grammar.compiled, _Compiled):
            # This rank is not rank 0. It has no process that compiles: rank 0 had the grammar compiled.
            grammar = self.kept(grammar.text) or self.keep(grammar.text, grammar.text, grammar.n_bytes)
        assert isinstance(grammar.compiled, _Compiled)
        return grammar.compiled.copy()

    def _forget(self, key: str) -> None:
        grammar = self._kept.pop(key, None)
        self._kept_bytes -= grammar.n_bytes if grammar is not None else 0

    def _read_tokens(self) -> Tokens:
        if self._tokens is None:
            table = self._table
            self._tokens = Tokens(
                texts=tuple(table.token_bytes(token) for token in range(table.n_tokens)),
                special_ids=tuple(sorted({*table.controls, *table.special_ids, *table.eos_ids})),
                eos_ids=tuple(sorted(table.eos_ids)),
                n_ids=self._vocab_size,
            )
        return self._tokens


def _too_much_held() -> ApiError:
    message = f"The grammars of running requests take {MAX_HELD_BYTES // 2**20} MB. Try again later."
    return ApiError(503, message, type="server_error", code="overloaded", headers=(("Retry-After", "1"),))
