"""Keeps responses in memory for later requests, limited in number, bytes and time. Knows no HTTP, no model.

A response may continue an earlier one. So each keeps only its own turn, which points to the turn before it. A turn
lives as long as a kept response needs it; its bytes count until then.

    entries:  resp_a   resp_b   resp_c
                 |        |        |
    turns:    turn 1 <- turn 2 <- turn 3
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from mlx_serve.api.cost import n_values

# The memory of a turn besides its JSON.
_TURN_BYTES = 1024


@dataclass(slots=True, eq=False)
class StoredTurn:
    """What one request and its answer added to a conversation, as JSON: a JSON text is as large as it looks."""

    own: bytes
    output: bytes
    response: bytes
    before: StoredTurn | None
    # The owner. Nobody else can see the turn.
    owner: str
    # The ids that the server gave to items of this turn.
    item_ids: tuple[str, ...]
    # The items of the conversation up to here, in bytes and in values of JSON.
    n_conversation_bytes: int = field(init=False)
    n_conversation_values: int = field(init=False)
    # The number of kept responses and later turns that need this one.
    n_users: int = 0

    def __post_init__(self) -> None:
        self.n_conversation_bytes = self._n_item_bytes + (self.before.n_conversation_bytes if self.before else 0)
        n_before = self.before.n_conversation_values if self.before else 0
        self.n_conversation_values = n_values(self.own) + n_values(self.output) + n_before

    @property
    def n_bytes(self) -> int:
        """As the limit counts it."""
        return self._n_item_bytes + len(self.response) + _TURN_BYTES

    @property
    def _n_item_bytes(self) -> int:
        return len(self.own) + len(self.output)


@dataclass(slots=True)
class _StoredResponse:
    turn: StoredTurn
    expires_at: float


@dataclass(slots=True)
class ResponseStore:
    """At most ``max_count`` responses, ``max_bytes`` of JSON, each for ``ttl_s``. ``max_count`` 0: nothing is kept.

    The least recently used goes first. Any thread.
    """

    max_count: int = 1000
    max_bytes: int = 256 * 2**20
    ttl_s: float = 3600.0
    clock: Callable[[], float] = time.monotonic
    n_bytes: int = field(default=0, init=False)
    _entries: OrderedDict[str, _StoredResponse] = field(default_factory=OrderedDict, init=False)
    _turn_of_item: dict[str, StoredTurn] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def __len__(self) -> int:
        """How many responses are kept."""
        return len(self._entries)

    @property
    def keeps(self) -> bool:
        """Whether anything is ever kept."""
        return self.max_count > 0

    def turn(self, response_id: str, owner: str) -> StoredTurn | None:
        """The last turn of a response's conversation, or None. Using it makes it recent."""
        with self._lock:
            entry = self._entry(response_id, owner)
            if entry is None:
                return None
            self._entries.move_to_end(response_id)
            return entry.turn

    def turn_of_item(self, item_id: str, owner: str) -> StoredTurn | None:
        """The turn whose output holds an item that the server gave an id to, or None."""
        with self._lock:
            self._drop_expired()
            turn = self._turn_of_item.get(item_id)
            return turn if turn is not None and turn.owner == owner else None

    def keep(
        self,
        response: Mapping[str, Any],
        own: Sequence[Mapping[str, Any]],
        before: StoredTurn | None,
        item_ids: Iterable[str],
        owner: str,
    ) -> None:
        """Keep a response: ``own`` is its input, without what ``before`` has."""
        turn = StoredTurn(_text(own), _text(response["output"]), _text(response), before, owner, tuple(item_ids))
        if not self.keeps or turn.n_bytes > self.max_bytes:
            return
        with self._lock:
            self._drop_expired()
            self._entries[response["id"]] = _StoredResponse(turn, self.clock() + self.ttl_s)
            self._use(turn)
            while len(self._entries) > self.max_count or self.n_bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def delete(self, response_id: str, owner: str) -> bool:
        """Delete a response; False when it was not there. Responses that continue it keep its turn."""
        with self._lock:
            is_there = self._entry(response_id, owner) is not None
            if is_there:
                self._drop(response_id)
            return is_there

    def _entry(self, response_id: str, owner: str) -> _StoredResponse | None:
        self._drop_expired()
        entry = self._entries.get(response_id)
        return entry if entry is not None and entry.turn.owner == owner else None

    def _drop_expired(self) -> None:
        # Entries are in the order of their last use, not of their age.
        now = self.clock()
        for response_id in [key for key, entry in self._entries.items() if entry.expires_at <= now]:
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._release(self._entries.pop(response_id).turn)

    def _use(self, turn: StoredTurn) -> None:
        """Count one more user of a turn, and so of the turns before it."""
        link: StoredTurn | None = turn
        while link is not None:
            link.n_users += 1
            if link.n_users > 1:
                return
            self.n_bytes += link.n_bytes
            self._turn_of_item.update(dict.fromkeys(link.item_ids, link))
            link = link.before

    def _release(self, turn: StoredTurn) -> None:
        link: StoredTurn | None = turn
        while link is not None:
            link.n_users -= 1
            if link.n_users > 0:
                return
            self.n_bytes -= link.n_bytes
            for item_id in link.item_ids:
                if self._turn_of_item.get(item_id) is link:
                    del self._turn_of_item[item_id]
            link = link.before


def conversation(last: StoredTurn | None) -> list[dict[str, Any]]:
    """The items of a turn and of all before it, in their order."""
    turns = []
    while last is not None:
        turns.append(last)
        last = last.before
    return [item for turn in reversed(turns) for part in (turn.own, turn.output) for item in json.loads(part)]


def input_of(turn: StoredTurn) -> list[dict[str, Any]]:
    """What the model was given before it answered: the conversation so far, and the turn's own input."""
    own: list[dict[str, Any]] = json.loads(turn.own)
    return conversation(turn.before) + own


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
