"""Requests that cost their sender little and a careless server much. Values alone: nothing here opens a socket.

Each kind of request that once stopped a server, or ended it, is here: grammars that explode, JSON of millions of
values, texts that are dear to tokenize or to join, answers that are dear to collect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

_HI = [{"role": "user", "content": "hi"}]
_EXPLODING = "((a{1000}){1000}){10}"
_N_RULES = 3000
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Hostile:
    """A request; its body is made when it is sent, for some are large."""

    path: str
    body: Callable[[], bytes]


def _json(path: str, **fields: Any) -> Hostile:
    return Hostile(path, lambda: json.dumps(fields).encode())


def _chat(**fields: Any) -> Hostile:
    return _json(CHAT, messages=_HI, max_tokens=4, **fields)


def _schema(**schema: Any) -> Hostile:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def _tool(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}


def _function(pattern: str) -> Hostile:
    function = {"name": "f", "parameters": _tool(pattern)}
    choice = {"type": "function", "function": {"name": "f"}}
    return _chat(tools=[{"type": "function", "function": function}], tool_choice=choice)


def _any_tool(pattern: str) -> Hostile:
    tools = [{"name": "f", "input_schema": _tool(pattern)}]
    return _json(MESSAGES, messages=_HI, max_tokens=4, tools=tools, tool_choice={"type": "any"})


def _lark_chain() -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(_N_RULES))
    return f'start: r0\n{rules}r{_N_RULES}: "a"\n'


def _gbnf_chain() -> str:
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(_N_RULES))
    return f'root ::= r0\n{rules}r{_N_RULES} ::= "a"\n'


def _custom_tool(definition: str) -> Hostile:
    form = {"type": "grammar", "syntax": "lark", "definition": definition}
    tools = [{"type": "custom", "name": "t", "format": form}]
    choice = {"type": "custom", "name": "t"}
    return _json(RESPONSES, input="hi", max_output_tokens=16, tools=tools, tool_choice=choice)


GRAMMARS = {
    "regex, a power of repetitions": _chat(guided_regex=_EXPLODING),
    "regex in a schema": _schema(type="string", pattern=_EXPLODING),
    "regex in a forced tool": _function(_EXPLODING),
    "regex in any tool": _any_tool(_EXPLODING),
    "regex, 40,000 options": _chat(guided_regex="a?" * 39800),
    "regex that backtracks": _chat(guided_regex="(.*a){18}"),
    "Lark, 3,000 rules in a chain": _chat(guided_grammar=_lark_chain()),
    "GBNF, 3,000 rules in a chain": _chat(grammar=_gbnf_chain()),
    "Lark in a custom tool": _custom_tool(_lark_chain()),
    "Lark with options of the library": _chat(guided_grammar='%llguidance {"no_forcing": false}\nstart: "a"\n'),
    "schema, multipleOf a large prime": _schema(type="integer", multipleOf=99999989),
    "schema, 20,000 words": _schema(enum=[f"word {i}" for i in range(20_000)]),
    "schema, 400 optional keys": _schema(type="object", properties={f"k{i}": {"type": "string"} for i in range(400)}),
}


def _filled(path: str, fields: dict[str, Any], piece: bytes, n_bytes: int, around: tuple[bytes, bytes]) -> Hostile:
    """An object with one more field, whose value is ``piece`` again and again."""

    def body() -> bytes:
        head = json.dumps(fields).encode()[:-1]
        return head + b', "extra": ' + around[0] + piece * (n_bytes // len(piece)) + b"0" + around[1] + b"}"

    return Hostile(path, body)


_CHAT_FIELDS = {"messages": _HI, "max_tokens": 4}
_LIST, _DEEP = (b"[", b"]"), (b"[" * 100_000, b"]" * 100_000)

VALUES = {
    "JSON, 30 MB of empty lists": _filled(CHAT, _CHAT_FIELDS, b"[],", 30 * _MIB, _LIST),
    "JSON, 30 MB of numbers": _filled(COMPLETIONS, {"prompt": "hi", "max_tokens": 4}, b"1,", 30 * _MIB, _LIST),
    "JSON, 100,000 levels": _filled(CHAT, _CHAT_FIELDS, b"1,", 2, _DEEP),
    "JSON stored": _filled(RESPONSES, {"input": "hi", "max_output_tokens": 16, "store": True}, b"[],", 8 * _MIB, _LIST),
    "an input of unknown items": Hostile(
        RESPONSES,
        lambda: json.dumps(
            {"input": [{"type": "message", "role": "user", "content": "hi"}] + [{"type": "x", "y": []}] * 100_000}
        ).encode(),
    ),
}

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _large(path: str, n_bytes: int, body: Callable[[str], dict[str, Any]]) -> Hostile:
    """A request about a text of about so many bytes, of words that are no token."""
    return Hostile(path, lambda: json.dumps(body("zqxjkv wpfgb " * (n_bytes // 13))).encode())


TEXTS = {
    "a prompt of 8 MB": _large(COMPLETIONS, 8 * _MIB, lambda text: {"prompt": text, "max_tokens": 4}),
    "a message without blanks": Hostile(
        CHAT, lambda: json.dumps({**_CHAT_FIELDS, "messages": [{"role": "user", "content": "a" * 8 * _MIB}]}).encode()
    ),
    "/tokenize of 8 MB": _large("/tokenize", 8 * _MIB, lambda text: {"content": text}),
    "a count of 8 MB": _large(
        "/v1/messages/count_tokens", 8 * _MIB, lambda text: {"messages": [{"role": "user", "content": text}]}
    ),
    "a tool's description of 8 MB": _large(
        CHAT,
        8 * _MIB,
        lambda text: {
            **_CHAT_FIELDS,
            "tools": [{"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}],
        },
    ),
    "a template's argument of 8 MB": _large(
        CHAT, 8 * _MIB, lambda text: {**_CHAT_FIELDS, "chat_template_kwargs": {"custom": text}}
    ),
    "truncation of 4 MB": _large(
        RESPONSES, 4 * _MIB, lambda text: {"input": text, "truncation": "auto", "max_output_tokens": 16}
    ),
    "a role mapping": Hostile(
        CHAT,
        lambda: json.dumps(
            {"messages": _HI * 16_384, "max_tokens": 4, "role_mapping": {"user": "x" * 300_000}}
        ).encode(),
    ),
    "16,384 turns of one side": Hostile(
        CHAT, lambda: json.dumps({"messages": [{"role": "user", "content": "hi " * 20}] * 16_384}).encode()
    ),
    "a tool allowed 400,000 times": Hostile(
        RESPONSES,
        lambda: json.dumps(
            {
                "input": "hi",
                "max_output_tokens": 16,
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}] * 400_000,
                },
            }
        ).encode(),
    ),
    "stop strings that almost match": _json(
        COMPLETIONS, prompt="a " * 50, max_tokens=16, stop=[" a" * 500 + chr(98 + i) for i in range(4)]
    ),
    "log-probabilities of 8 answers": _chat(n=8, logprobs=True, top_logprobs=20),
    "an argument of the tokenizer's own": _chat(chat_template_kwargs={"sanitize_control_tokens": True}),
    "a token that is none": _json(COMPLETIONS, prompt=[2**31 - 1], max_tokens=4),
    "numbers out of range": _chat(temperature=1e999, seed=2**70),
}

REQUESTS = {**GRAMMARS, **VALUES, **TEXTS}
