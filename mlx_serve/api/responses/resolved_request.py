"""A Responses request with the stored data that it refers to: the earlier conversation, and items by their ids.

Stored data is read again for every request that refers to it, so it has the limits of a body. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from mlx_serve.api.body import read_object, validated
from mlx_serve.api.cost import n_values, parsing
from mlx_serve.api.response_store import ResponseStore, StoredTurn, conversation
from mlx_serve.api.responses.items import Item, Other, Reference, as_list, listed
from mlx_serve.api.responses.schema import ResponseRequest
from mlx_serve.api.shapes import dumps
from mlx_serve.values import ApiError

_ITEM: TypeAdapter[Item] = TypeAdapter(Item)
_DEEPER = 100
# The default limit of a request's body. All stored items are read for the next answer, even if most are left out.
MAX_CONVERSATION_BYTES = 32 * 2**20
# The fields that come back to the client as they were. Others, those that are ignored among them, are not held.
_GIVEN_BACK = ("input", "text", "tool_choice", "tools")


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """``raw``: the fields that come back as they were. ``own``: the request's items that are kept, references resolved.

    ``items``: those of the conversation before, and the request's own.
    """

    raw: Mapping[str, Any]
    body: ResponseRequest
    own: list[dict[str, Any]]
    items: list[Item]
    before: StoredTurn | None
    owner: str


def read(store: ResponseStore, raw_body: bytes, max_values: int, owner: str) -> ResolvedRequest:
    """The request. Raises ApiError 400 when it is malformed, or refers to what is not there or too much."""
    with parsing(raw_body):
        raw = read_object(raw_body)
        body = validated(ResponseRequest, raw)
        raw = {name: raw[name] for name in _GIVEN_BACK if raw.get(name) is not None}
        _check_text(raw)
    kept = _Kept(store, owner, _Size(max_values))
    before = kept.conversation(body.previous_response_id) if body.previous_response_id is not None else None
    items = [_ITEM.validate_python(item) for item in conversation(before)]
    own: list[dict[str, Any]] = []
    for i, (given, item) in enumerate(zip(as_list(raw.get("input", [])), body.input, strict=True)):
        if isinstance(item, Reference):
            own.append(kept.item(item.id, f"input[{i}].id"))
            items.append(_ITEM.validate_python(own[-1]))
        else:
            items.append(item)
            # Items that have no place in a prompt are not stored.
            own += [] if isinstance(item, Other) else [given]
    return ResolvedRequest(raw, body, own, items, before, owner)


def keeper(store: ResponseStore, asked: ResolvedRequest) -> Callable[[dict[str, Any]], None]:
    """Keeps the response to a request."""
    own = [listed(item) for item in asked.own]

    def keep(response: dict[str, Any]) -> None:
        store.keep(response, own, asked.before, [item["id"] for item in response["output"]], asked.owner)

    return keep


@dataclass(slots=True)
class _Size:
    """What a request reads of the store, within bounds."""

    max_values: int
    n_bytes: int = 0
    n_values: int = 0

    def add(self, n_bytes: int, n_values: int, param: str) -> None:
        """Count data before it is read. Raises ApiError 400 that names the limit."""
        self.n_bytes += n_bytes
        self.n_values += n_values
        if self.n_bytes > MAX_CONVERSATION_BYTES:
            text = f"The conversation has more than {MAX_CONVERSATION_BYTES} bytes: begin a new one."
            raise ApiError(400, text, param=param)
        if self.n_values > self.max_values:
            text = f"The conversation has more than {self.max_values} values (--max-json-values): begin a new one."
            raise ApiError(400, text, param=param, code="too_many_json_values")


@dataclass(slots=True)
class _Kept:
    """What one request refers to."""

    store: ResponseStore
    owner: str
    size: _Size
    # By turn, so that the output of one is parsed once; and what an item comes to each time that it is named.
    outputs: dict[StoredTurn, dict[str, dict[str, Any]]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def conversation(self, response_id: str) -> StoredTurn:
        """The last turn of the conversation that a response ended."""
        param = "previous_response_id"
        found = self.store.turn(response_id, self.owner)
        if found is None:
            text = f"Previous response with id '{response_id[:80]}' not found."
            raise ApiError(400, text, param=param, code="previous_response_not_found")
        self.size.add(found.n_conversation_bytes, found.n_conversation_values, param)
        return found

    def item(self, item_id: str, param: str) -> dict[str, Any]:
        """An item that the server gave an id to."""
        turn = self.store.turn_of_item(item_id, self.owner)
        if turn is None:
            text = f"Item with id '{item_id[:80]}' not found: only items of a response that was stored can be named."
            raise ApiError(400, text, param=param)
        if turn not in self.outputs:
            self.size.add(len(turn.output), n_values(turn.output), param)
            self.outputs[turn] = {item["id"]: item for item in json.loads(turn.output)}
        found = self.outputs[turn][item_id]
        if item_id not in self.sizes:
            raw = dumps(found).encode()
            self.sizes[item_id] = (len(raw), n_values(raw))
        self.size.add(*self.sizes[item_id], param)
        return found


def _check_text(raw: Mapping[str, Any]) -> None:
    """Check that the returned fields can be written. JSON can encode half a character, and numbers past a double.

    Events and stored items hold these fields some levels deeper. Without a margin, deep nesting would fail only when
    the answer already exists.
    """
    nested: Any = raw
    for _ in range(_DEEPER):
        nested = [nested]
    try:
        dumps(nested).encode()
    except ValueError:
        text = "The request holds half of a surrogate pair, or a number that is too large."
        raise ApiError(400, text) from None
