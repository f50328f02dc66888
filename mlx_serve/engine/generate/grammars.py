"""A model's tokens as llguidance needs them, and the grammars that are compiled for them. Any thread.

Knows no text of a request, no HTTP and no MLX; imports llguidance, which is an extra, when the first grammar comes.
A program of its own (``api/grammar_child.py``) compiles each new grammar first, under limits of memory and CPU time.
What passed there is compiled here again, with the same limits of llguidance.
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

# llguidance's limits, lower than its own: a hostile grammar fails before it takes much memory (with 50,000 states one
# took 7 GB) or much of a step. Ordinary schemas need 0.01 to 1 ms a token.
_LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# Compiled grammars are kept for the next request up to the first bound. The second one counts those that running and
# waiting requests hold too. An ordinary schema takes 0.1 MB, one with 1,500 properties 10 MB.
MAX_KEPT_BYTES = 256 * 2**20
MAX_HELD_BYTES = 2**30


class TokenTable(Protocol):
    """What a grammar's masks are made from."""

    n_tokens: int
    eos_ids: frozenset[int]
    # All control tokens by their id; and those that are never text, whether they have one or not.
    controls: Mapping[int, str]
    special_ids: frozenset[int]

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A model's tokens, as another process gets them: ``texts`` by id, and ids that are no text."""

    texts: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    n_ids: int

    def trie(self) -> Any:
        """llguidance's form of them. Takes half a second for 50,000 tokens, with Python's lock held."""
        from llguidance import LLTokenizer, TokenizerWrapper

        # From bytes rather than from tokenizer.json: any tokenizer will do, and the lock is held for half as long.
        return LLTokenizer(TokenizerWrapper(_Table(self)), n_vocab=self.n_ids, eos_token=list(self.eos_ids))


class _Table:
    """The attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokens: Tokens) -> None:
        self.eos_token_id = tokens.eos_ids[0]
        # No grammar is spelled with them: "<think>" inside of a JSON string would not be text to whoever reads it.
        self.special_token_ids = tokens.special_ids
        self.tokens = tokens.texts

    def __call__(self, text: str | bytes) -> list[int]:
        # llguidance tokenizes only text that a grammar forces, and all grammars turn that off (text/grammar.py).
        raise NotImplementedError("grammars here force no text")


def compile_matcher(trie: Any, text: str) -> Any:
    """A matcher at the start of a grammar. It raises nothing: ``get_error`` says what is wrong with the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(trie, text, log_level=0, limits=LLParserLimits(**_LIMITS))


class _Compiled:
    """A matcher that every job copies. A matcher must not be used by two threads at a time, not even to be copied."""

    def __init__(self, matcher: Any, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._matcher = matcher
        self._lock = Lock()

    def copy(self) -> Any:
        with self._lock:
            return self._matcher.deep_copy()


class Vocabulary:
    """A model's tokens, and the grammars that were compiled for them; kept as long as the model's tokenizer."""

    _numbers = count()

    def __init__(self, tokens: TokenTable, vocab_size: int) -> None:
        # What a process that has these tokens calls them.
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
        """The tokens for another process. Takes half a second for 50,000 of them, the first time."""
        with self._trie_lock:
            return self._read_tokens()

    def prepare(self) -> Any:
        """llguidance's form of the tokens, made when it is first asked for."""
        with self._trie_lock:
            if self._trie is None:
                self._trie = self._read_tokens().trie()
            return self._trie

    def kept(self, key: str) -> Grammar | None:
        """The grammar that ``keep`` got with this key, if it is still kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: str, text: str, n_bytes: int) -> Grammar:
        """Compile a grammar that passed the child, where it took ``n_bytes``, and keep it for ``key``.

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
            # Another rank's, which has no process that compiles: rank 0 had it compiled.
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
