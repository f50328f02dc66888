"""How many tokens a server has drafted, as its /stats tells. Other servers have no such figures."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import Place


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that were drafted, and those of them that were right, in the answers to all clients of the server."""

    drafted_tokens: int
    accepted_tokens: int

    def since(self, earlier: Drafts) -> Drafts:
        """What was drafted after ``earlier``."""
        return Drafts(
            self.drafted_tokens - earlier.drafted_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
        )


def read_drafts(server: Place) -> Drafts | None:
    """The sums so far; None if the server does not tell them."""
    try:
        with Client(server) as client:
            told = client.get("/stats").get("drafts")
    except Failure:
        return None
    counts = told if isinstance(told, dict) else {}
    drafted, accepted = counts.get("drafted_tokens"), counts.get("accepted_tokens")
    return Drafts(drafted, accepted) if isinstance(drafted, int) and isinstance(accepted, int) else None
