"""Which requests may share KV caches: those of one API key, unless the operator lets all, and of one ``cache_salt``.

``cached_tokens`` and the time to the first token tell how much of a prompt was cached. Shared among clients, they would
tell one client, token by token, what another one has sent.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, TypeAlias

from pydantic import Field

from mlx_serve.api.fields import Str

_MAX_SALT_CHARS = 1024

# vLLM's field.
CacheSalt: TypeAlias = Annotated[Str, Field(min_length=1, max_length=_MAX_SALT_CHARS)]


def prefix_scope(client: str, salt: str | None) -> str:
    """A name for all requests of a client (a digest of its key; "": anybody) with a salt; "" without either."""
    if not client and salt is None:
        return ""
    return hashlib.sha256(json.dumps([client, salt]).encode()).hexdigest()
