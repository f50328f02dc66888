"""Describes tools in a system message, for models whose chat template has no place for them.

The words are Hermes', which most small models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlx_serve.text.calls.descriptions import CallFormat
from mlx_serve.text.templates.call_forms import Message


def with_definitions(messages: Sequence[Message], tools: Sequence[Any], form: CallFormat) -> list[Message]:
    """The messages with the tools' definitions in the system message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You can call functions. They are, one a line, as JSON with the schema of their parameters:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, answer with its name and arguments in exactly this form, and with nothing behind it:\n"
        f"{form.example}"
    )
    out = [dict(message) for message in messages]
    if out and out[0]["role"] == "system":
        out[0]["content"] = f"{out[0]['content']}\n\n{text}" if out[0]["content"] else text
        return out
    return [{"role": "system", "content": text}, *out]
