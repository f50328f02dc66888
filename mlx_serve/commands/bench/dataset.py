"""Reads prompts from a file: JSONL, or ShareGPT's JSON. An error names its line or entry.

A line of JSONL is an object with ``prompt`` (text) or ``messages`` (as in a chat request), and optionally the length of
the answer in tokens, under one of the usual names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlx_serve.commands.bench.workload import Conversation, Message, PlannedTurn

OUTPUT_NAMES = ("output_tokens", "output_len", "max_tokens")
# ShareGPT records answers as text. English has some four characters to a token.
_CHARS_PER_TOKEN = 4
_USERS = ("human", "user")


class DatasetError(Exception):
    """The file can't be used; the text says where and why."""


def read_dataset(path: Path, output_tokens: int | None, default: int, *, chat: bool) -> list[Conversation]:
    """The file's prompts in its order; ``output_tokens`` overrides the file, ``default`` is for lines without a length.

    Raises DatasetError. Without ``chat`` only prompts of text can be sent.
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
        raise DatasetError(f"{path}: no prompt in it")
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
        raise DatasetError(f"{where}: both prompt and messages")
    if "messages" in value:
        if not chat:
            raise DatasetError(f"{where}: messages need --endpoint chat")
        return _messages(value["messages"], where), _output_tokens(value, where)
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise DatasetError(f"{where}: neither a prompt, which is a text, nor messages")
    return ({"role": "user", "content": prompt},), _output_tokens(value, where)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{where}: messages is not a list with something in it")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DatasetError(f"{where}: a message is an object with a role")
    return tuple(value)


def _output_tokens(value: Mapping[str, Any], where: str) -> int | None:
    for name in OUTPUT_NAMES:
        n = value.get(name)
        if n is None:
            continue
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise DatasetError(f"{where}: {name} is not a whole number over 0")
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
            raise DatasetError(f": entry {number}: no conversations, as ShareGPT's entries have")
        yield from _first_exchange(turns, f": entry {number}")


def _first_exchange(turns: Iterable[Any], where: str) -> Iterator[Entry]:
    """The first question and its answer's length. Skips an entry without one, as other readers of ShareGPT do."""
    texts = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise DatasetError(f"{where}: a turn is an object with a value, which is a text")
        texts.append((turn.get("from"), turn["value"]))
    for (who, question), (_, answer) in pairwise(texts):
        if who in _USERS and question and answer:
            yield ({"role": "user", "content": question},), max(1, len(answer) // _CHARS_PER_TOKEN)
            return
