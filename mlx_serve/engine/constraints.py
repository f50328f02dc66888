"""What a job's next token may be: a grammar's masks, where the grammar takes hold, and when the end may come.

Masks are numpy arrays of booleans: nothing here knows MLX, text or HTTP. Only this module of the engine knows
llguidance, which is an extra, and imports it when the first grammar comes. Its matchers raise nothing for what a
client brings about (too complex a grammar, say): they turn into an error that is kept, and that fails one job alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_serve.core import ApiError, Sampling

Mask: TypeAlias = NDArray[np.bool_]

# What one job's grammar may cost the others: llguidance's limits, lowered so that a hostile grammar fails before it
# takes much memory (with 50,000 states one took 7 GB) or much of a step, and a budget of time for what gets past them.
# Ordinary schemas need 0.01 to 1 ms a token.
_LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
_BUDGET_S = 0.5
_BUDGET_PER_TOKEN_S = 0.01
# Compiled grammars that are kept: a copy for a job then takes microseconds instead of milliseconds.
_MAX_COMPILED = 32


class TokenTable(Protocol):
    """What a grammar's masks are made from."""

    n_tokens: int
    eos_ids: frozenset[int]
    # All control tokens by their id; and those that are never text, whether they have one or not.
    controls: Mapping[int, str]
    special_ids: frozenset[int]

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text."""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text."""


class Vocabulary:
    """A model's tokens, as llguidance wants them, and the grammars that were compiled for them. Any thread.

    It is made when the first grammar comes, and kept as long as the model's tokenizer: reading the tokens takes about
    half a second for 50,000 of them, and as long again inside llguidance, with Python's lock held.
    """

    def __init__(self, tokens: TokenTable, vocab_size: int) -> None:
        self._tokens = tokens
        self._vocab_size = max(vocab_size, tokens.n_tokens)
        self._trie: Any = None
        self._trie_lock = Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    def check(self, grammar: str) -> str:
        """Compile a grammar for the jobs that follow. What is wrong with it, or ""."""
        return str(self._prototype(grammar).get_error())

    def matcher(self, grammar: str) -> Any:
        """A matcher at the grammar's start. Raises ApiError 400."""
        prototype = self._prototype(grammar)
        if prototype.is_error():
            raise ApiError(400, f"The grammar cannot be compiled: {prototype.get_error()}")
        # A matcher must not be used by two threads at a time, not even to be copied.
        with self._lock:
            return prototype.deep_copy()

    def _prototype(self, grammar: str) -> Any:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        # Not under the lock: a client's big grammar must not keep the MLX thread from another one's.
        prototype = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = prototype
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return prototype

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self._made_trie(), grammar, log_level=0, limits=LLParserLimits(**_LIMITS))

    def _made_trie(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._trie_lock:
            if self._trie is None:
                # From bytes rather than from tokenizer.json: any tokenizer will do, and Python's lock is held for
                # half as long.
                table = TokenizerWrapper(_Table(self._tokens))
                self._trie = LLTokenizer(table, n_vocab=self._vocab_size, eos_token=sorted(self._tokens.eos_ids))
            return self._trie


class _Table:
    """The attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokens: TokenTable) -> None:
        self._encode = tokens.encode
        self.eos_token_id = min(tokens.eos_ids)
        # No grammar is spelled with them: "<think>" inside of a JSON string would not be text to whoever reads it.
        self.special_token_ids = sorted({*tokens.controls, *tokens.special_ids, *tokens.eos_ids})
        self.tokens = [tokens.token_bytes(token) for token in range(tokens.n_tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._encode(plain, special=False)


class Constraint:
    """What one job's next token may be.

    ``fault``: why its grammar failed; the token at ``fault_at`` of the output, and all later ones, are not masked.
    ``judges_time``: a grammar that takes too long fails by itself; else somebody asks ``is_late`` and calls
    ``give_up``, for the clocks of several ranks do not agree.

        waiting --until--> begin --a token of the grammar--> inside
           ^                 | \\
           +---- detours ----+  +-- exits --> outside
    """

    def __init__(
        self, sampling: Sampling, eos_ids: Collection[int], matcher: Any = None, *, judges_time: bool = True
    ) -> None:
        self._sampling = sampling
        self._gate = sampling.gate
        self._eos_ids = sorted(eos_ids)
        self._matcher = matcher
        self._judges_time = judges_time
        self.fault = ""
        self.fault_at = 0
        self._spent_s = 0.0
        self.taken: list[int] = []
        self._place = self._first_place()

    @property
    def follows_tokens(self) -> bool:
        """Whether it has to be told each token; else their number is enough."""
        return self._matcher is not None and not self.fault

    @property
    def is_late(self) -> bool:
        """Whether the grammar has taken more time than it may, and has not failed yet."""
        return not self.fault and self._spent_s > _BUDGET_S + _BUDGET_PER_TOKEN_S * len(self.taken)

    def give_up(self) -> None:
        """Fail the grammar for the time it takes."""
        if not self.fault:
            self._fail("it takes too long")

    def restart(self) -> None:
        """Forget all tokens: a draft was thrown away."""
        self.taken.clear()
        self._place = self._first_place()
        if self._matcher is not None:
            self._matcher.reset()

    def take(self, token: int) -> None:
        """The output goes on with ``token``."""
        self.taken.append(token)
        if self._place == "waiting":
            self._wait(token)
        elif self._place == "begin" and token in self._gate.exits:
            self._place = "outside"
        elif self._place == "begin" and len(self.taken) == 1 and token in self._gate.detours:
            self._place = "waiting"
        elif self._place in ("begin", "inside"):
            self._place = "inside"
            if not self._matcher.consume_token(token):
                self._fail()

    def allowed(self, n_output: int, width: int) -> Mask | None:
        """The tokens that may follow ``n_output`` ones, of ``width`` there are; None: all of them."""
        may_end = not self._sampling.ignore_eos and n_output >= self._sampling.min_tokens
        if self._place == "outside":
            return None if may_end else self._all_but_ends(width)
        if self._place == "waiting":
            return self._of_waiting(width)
        allowed = self._of_grammar(width)
        return allowed if allowed is None or may_end else self._put_off_end(allowed)

    def _first_place(self) -> Literal["waiting", "begin", "inside", "outside"]:
        if self._matcher is None:
            return "outside"
        return "waiting" if self._gate.waiting else "begin"

    def _wait(self, token: int) -> None:
        until = self._gate.until
        if token in self._gate.exits:
            self._place = "outside"
        elif tuple(self.taken[-len(until) :]) == until:
            self._place = "begin"

    def _of_waiting(self, width: int) -> Mask:
        *begun, last = self._gate.until
        if len(begun) > 1 and self.taken[-len(begun) :] == begun:
            # gpt-oss may put more into the header of its final message; then the marker would never come.
            mask = np.zeros(width, dtype=np.bool_)
            mask[_below([last], width)] = True
            return mask
        mask = self._all_but_ends(width)
        mask[_below(self._gate.exits, width)] = True
        return mask

    def _of_grammar(self, width: int) -> Mask | None:
        started_at = time.perf_counter()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._spent_s += time.perf_counter() - started_at
        if self._judges_time and self.is_late:
            self.give_up()
            return None
        if self._matcher.is_error():
            self._fail()
            return None
        # Ids past the tokenizer's are padding of the model's output.
        mask = np.zeros(width, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[:width]
        mask[: len(known)] = known
        if self._place == "begin":
            mask[_below(self._gate.exits, width)] = True
            if not self.taken:
                mask[_below(self._gate.detours, width)] = True
        if not mask.any():
            self._fail("no token continues it")
            return None
        return mask

    def _put_off_end(self, allowed: Mask) -> Mask:
        """Where the grammar is at its end, the end comes all the same."""
        longer = allowed & self._all_but_ends(len(allowed))
        return longer if longer.any() else allowed

    def _all_but_ends(self, width: int) -> Mask:
        mask = np.ones(width, dtype=np.bool_)
        mask[_below(self._eos_ids, width)] = False
        return mask

    def _fail(self, reason: str = "") -> None:
        self.fault = reason or str(self._matcher.get_error())
        self.fault_at = len(self.taken)
        self._place = "outside"


def _below(ids: Sequence[int], width: int) -> list[int]:
    return [token for token in ids if token < width]
