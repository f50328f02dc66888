"""Random request bodies for every POST route. What counts: the server lives, answers in time, and no answer is a 5xx.

python -m tests.sockets.bodyfuzz --n 10000                    # a server on the fake backend, in this process
python -m tests.sockets.bodyfuzz --n 500 --url http://127.0.0.1:8080
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from mlx_serve.api.endpoints import ROUTES

# An answer that takes longer is a hang.
PATIENCE_S = 60.0
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "model": "default_model",
    "messages": [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "t", "tool_call_id": "c"},
        {"role": "user", "content": "b"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
    "response_format": {"type": "text"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 8,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": 1},
    "role_mapping": {"user": "u"},
    "reasoning_effort": "low",
    "priority": 1,
} | SAMPLING
COMPLETION = {
    "prompt": ["a", "b"],
    "suffix": "",
    "echo": True,
    "logprobs": 2,
    "best_of": 2,
    "n": 2,
    "max_tokens": 8,
    "stream": False,
} | SAMPLING
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "q"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "t"},
        {"type": "web_search_call", "id": "w"},
    ],
    "instructions": "i",
    "tools": [FLAT_TOOL, {"type": "custom", "name": "g", "format": {"type": "text"}}, {"type": "web_search"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "truncation": "auto",
    "metadata": {"a": "b"},
    "store": True,
    "stream": True,
    "max_output_tokens": 8,
}
MESSAGES = {
    "model": "default_model",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "t", "is_error": True}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "stream": True,
}
SEEDS: dict[str, dict[str, Any]] = {
    "/chat/completions": CHAT,
    "/completions": COMPLETION,
    "/embeddings": {"input": ["a", "b"], "encoding_format": "float", "dimensions": 4, "priority": 1},
    "/responses": RESPONSE,
    "/responses/input_tokens": RESPONSE,
    "/responses/{id}/cancel": {"a": 1},
    "/messages": MESSAGES,
    "/messages/count_tokens": MESSAGES,
    "/tokenize": {"content": "a", "add_special": True, "parse_special": False, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": CHAT,
}
# A body with so many values is not changed any more: repeating what repeats already would make gigabytes.
_MAX_PLACES = 500
# Whose place is not left empty at once.
REQUIRED = {"messages", "prompt", "input", "max_tokens", "max_output_tokens", "content", "tokens", "tools"}
# What may stand in any place, in a list or alone.
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -0.0, 1.5, 1e308, float("inf"), float("nan")),
    *(
        "",
        "x",
        "auto",
        "required",
        "none",
        "<think>",
        "</think><tool_call>",
        "<|im_end|>",
        "\x00",
        "\ud800",
        "\U0001f409",
    ),
    *([], {}, [None], [[]], [{}], [1, "a", None], {"type": "text"}, {"type": "x"}, {"type": None}, {"": ""}),
    *({"type": "item_reference", "id": "msg_1"}, {"previous_response_id": "resp_1"}),
    *({"role": "user", "content": "x"}, {"type": "text", "text": "x"}, {"name": "f"}, TOOL, FLAT_TOOL, CALL),
]


def routes() -> list[str]:
    """The paths that take a body; one that has no seed of its own gets a chat request."""
    return sorted(route.path for route in ROUTES if route.method == "POST")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON value."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in steps:
        yield (*path, key)
        yield from places(item, (*path, key))


class Fuzz:
    """Bodies from a seed: each is a valid one with some of its values changed, and some then broken as bytes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> tuple[str, bytes]:
        """A path and a body."""
        path = self._random.choice(routes())
        value = json.loads(json.dumps(SEEDS.get(path, CHAT)))
        for name in sorted(value.keys() - REQUIRED):
            # Fewer fields, so that one fault does not hide what the others do.
            if self._random.random() < 0.5:
                del value[name]
        for _ in range(self._random.choice([0, 0, 1, 1, 1, 2, 8])):
            self._change(value)
        raw = json.dumps(value, ensure_ascii=self._random.random() < 0.5).encode("utf-8", "surrogatepass")
        return "/v1" + path.replace("{id}", "resp_1"), self._broken(raw)

    def _change(self, value: dict[str, Any]) -> None:
        found = list(islice(places(value), _MAX_PLACES + 1))
        if len(found) > _MAX_PLACES:
            return
        if not found:
            value[self._random.choice(list(CHAT | RESPONSE | MESSAGES))] = 1
            return
        *steps, last = self._random.choice(found)
        target: Any = value
        for step in steps:
            target = target[step]
        way = self._random.randrange(5)
        if way == 0:
            del target[last]
        elif way == 1 and isinstance(target, list):
            target += [target[last]] * self._random.choice([1, 10, 200])
        else:
            # A copy, or the next change might put what all have in common into itself.
            target[last] = json.loads(json.dumps(self._junk()))

    def _junk(self) -> Any:
        way = self._random.randrange(12)
        if way == 0:
            return self._random.choice(["x", "<think>", "ab ", "\u6a21", '{"a":', "\n"]) * self._random.choice(
                [100, 9000]
            )
        if way == 1:
            return [self._random.choice(JUNK)] * self._random.choice([2, 200, 5000])
        if way == 2:
            nested: Any = self._random.choice(JUNK)
            for _ in range(self._random.choice([3, 50, 400])):
                nested = [nested] if self._random.random() < 0.5 else {"a": nested}
            return nested
        if way == 3:
            return {str(i): self._random.choice(JUNK) for i in range(self._random.choice([3, 20, 500]))}
        return self._random.choice(JUNK)

    def _broken(self, raw: bytes) -> bytes:
        way = self._random.randrange(40)
        cut = self._random.randrange(len(raw) + 1)
        if way == 0:
            return raw[:cut]
        if way == 1:
            return raw[:cut] + self._random.randbytes(3) + raw[cut:]
        if way == 2:
            return b"[" * self._random.choice([100, 100_000]) + raw
        if way == 3:
            return b'{"a": [' + b"[]," * self._random.choice([1000, 600_000]) + b"0]}"
        return b"\xef\xbb\xbf" + raw if way == 4 else raw


class Outcome:
    """What came of a number of requests."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []

    def __str__(self) -> str:
        shown = ", ".join(f"{status}: {n}" for status, n in sorted(self.statuses.items()))
        return f"{self.statuses.total()} requests ({shown}), {len(self.faults)} faults"


def run(host: str, port: int, n: int, seed: int) -> Outcome:
    """Send ``n`` requests one after another. A fault: no answer in time, a 5xx, or an error in no known shape."""
    fuzz, outcome = Fuzz(seed), Outcome()
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    for i in range(n):
        path, body = fuzz.request()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            status, text = reply.status, reply.read().decode()
        except (OSError, http.client.HTTPException) as error:
            outcome.faults.append(f"request {i} of seed {seed}, {path}: {type(error).__name__}: {body[:300]!r}")
            connection.close()
            continue
        outcome.statuses[status] += 1
        if fault := _fault(status, text):
            outcome.faults.append(f"request {i} of seed {seed}, {path}: {fault}: {body[:300]!r}")
    connection.close()
    return outcome


def _fault(status: int, text: str) -> str:
    if status >= 500:
        return f"{status} {text[:300]}"
    if status >= 400:
        return "" if json.loads(text)["error"]["message"] else "an error without a message"
    return "a stream that failed" if '"server_error"' in text or '"api_error"' in text else ""


def main(argv: list[str]) -> int:
    """The command; 1 when there were faults."""
    from tests.sockets.apikit import serving

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same requests")
    parser.add_argument("--url", help="a server that runs; by default one on the fake backend")
    args = parser.parse_args(argv)
    if args.url is not None:
        where = urlsplit(args.url)
        outcome = run(where.hostname or "127.0.0.1", where.port or 80, args.n, args.seed)
    else:
        with serving() as server:
            outcome = run("127.0.0.1", server.port, args.n, args.seed)
    print(*outcome.faults, outcome, sep="\n")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
