"""POST /v1/responses/compact: a conversation as one item, which holds the model's summary of it. Knows no engine.

Later requests send the item in place of what it stands for; ``history`` makes a user's message of it. The summary is
asked for at the end of the conversation as it was, so its prompt begins as the others did and their KV cache is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlx_serve.api.responses.items import new_id, seal
from mlx_serve.api.responses.render import ResponseWriter
from mlx_serve.values import ApiError, Delta

# Of a summary and of the thoughts before it, where the request has no max_output_tokens.
MAX_TOKENS = 4096
REQUEST: Mapping[str, Any] = {
    "role": "user",
    "content": (
        "Write a summary of our conversation so far, for an assistant who will continue it and sees nothing else of "
        "it. Keep what was asked for and what was decided, the facts, names, paths, numbers and results that are "
        "needed later, what is done, what remains, and every instruction that still holds. Leave out what no longer "
        "matters. Answer with the summary alone, and call no tools."
    ),
}


class CompactionWriter(ResponseWriter):
    """Puts the answer's text into a compaction item. There is no stream of it."""

    def whole(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """Raises ApiError 500 when the model wrote nothing."""
        response = super().whole(deltas)
        said = [item for item in response["output"] if item["type"] == "message"]
        summary = "".join(part["text"] for item in said for part in item["content"]).strip()
        if not summary:
            raise ApiError(500, "The model wrote no summary of the conversation.", type="server_error")
        item = {"id": new_id("compaction"), "type": "compaction", "encrypted_content": seal(summary)}
        return {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [item],
            "usage": response["usage"],
        }
