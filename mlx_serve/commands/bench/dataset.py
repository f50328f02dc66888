"""Reads prompts from a file: JSONL, or ShareGPT's JSON. Each error names its line or entry.

A line of JSONL is an object with ``prompt`` (text) or ``messages`` (as in a chat request). It may also give the length
of the answer in tokens, under one of the usual names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlx_serve.commands.bench.workload import Conversation, Message, PlannedTurn

OUTPUT_NAMES = ("output_tokens", "output_len", "max_tokens")
# ShareGPT records answers as text. English has about four characters per token.
_CHARS_PER_TOKEN = 4
_USERS = ("human", "user")


class DatasetError(Exception):
    """The file cannot be used. The text says where and why."""


def read_dataset(path: Path, output_tokens: int | None, default: int, *, chat: bool) -> list[Conversation]:
    """Reads the prompts in the file's order. Raises DatasetError.

    ``output_tokens`` overrides the file's lengths; ``default`` is for lines without one. Without ``chat``, messages are
    an error.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from error
    parse = _sharegpt if text.lstrip().startswith("[") else _jsonl
    try:
        found = [
            Conversation((PlannedTurn(messages, output_tokens or n or default),)) for messages, n in parse(text, chat)
        ]
    except DatasetError as error:
        raise DatasetError(f"{path}{error}") from error
    if not found:
        raise DatasetError(f"{path}: the file contains no prompt")
    return found


Entry = tuple[tuple[Message, ...], int | None]


def _jsonl(text: str, chat: bool) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _entry(line, f":{number}", chat)


def _entry(line: str, where: str, chat: bool) -> Entry:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: not a JSON object")
    if "prompt" in value and "messages" in value:
        raise DatasetError(f"{where}: give prompt or messages, not both")
    if "messages" in value:
        if not chat:
            raise DatasetError(f"{where}: messages need --endpoint chat")
        return _messages(value["messages"], where), _output_tokens(value, where)
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise DatasetError(f"{where}: neither a prompt (a non-empty string) nor messages")
    return ({"role": "user", "content": prompt},), _output_tokens(value, where)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{where}: messages is not a list, or is empty")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DatasetError(f"{where}: each message must be an object with a role")
    return tuple(value)


def _output_tokens(value: Mapping[str, Any], where: str) -> int | None:
    for name in OUTPUT_NAMES:
        n = value.get(name)
        if n is None:
            continue
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise DatasetError(f"{where}: {name} is not a whole number greater than 0")
        return n
    return None


def _sharegpt(text: str, _chat: bool) -> Iterator[Entry]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f":{error.lineno}: not JSON: {error.msg}") from error
    for number, entry in enumerate(entries, 1):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise DatasetError(f": entry {number}: no conversations; every ShareGPT entry has a list of them")
        yield from _first_exchange(turns, f": entry {number}")


def _first_exchange(turns: Iterable[Any], where: str) -> Iterator[Entry]:
    """Yields the first question and the length of its answer. Skips entries without both, like other readers."""
    texts = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise DatasetError(f"{where}: a turn must be an object whose value is a string")
        texts.append((turn.get("from"), turn["value"]))
    for (who, question), (_, answer) in pairwise(texts):
        if who in _USERS and question and answer:
            yield ({"role": "user", "content": question},), max(1, len(answer) // _CHARS_PER_TOKEN)
            return
