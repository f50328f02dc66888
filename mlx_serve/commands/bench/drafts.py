"""How many tokens a server has drafted, as its /stats tells. Other servers have no such figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import Place

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that were drafted, and those of them that were right, in the answers to all clients of the server."""

    drafted_tokens: int
    accepted_tokens: int


def drafts_since(before: Drafts, server: Place) -> Drafts | None:
    """What was drafted since then; None if the server does not tell, or was started again."""
    now = read_drafts(server)
    if now is None or now.drafted_tokens < before.drafted_tokens:
        return None
    return Drafts(now.drafted_tokens - before.drafted_tokens, now.accepted_tokens - before.accepted_tokens)


def read_drafts(server: Place) -> Drafts | None:
    """The sums so far; None if the server does not tell them."""
    try:
        with Client(replace(server, timeout_s=min(_TIMEOUT_S, server.timeout_s))) as client:
            told = client.get("/stats").get("drafts")
    except Failure:
        return None
    counts = told if isinstance(told, dict) else {}
    drafted, accepted = counts.get("drafted_tokens"), counts.get("accepted_tokens")
    return Drafts(drafted, accepted) if isinstance(drafted, int) and isinstance(accepted, int) else None
