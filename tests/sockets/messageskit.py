"""Asks /v1/messages, and reads its events as strictly as Anthropic's clients would have to."""

import json

from tests.sockets import requiredkeys
from tests.sockets.replaykit import Message

DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
FINISH = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "stop_sequence": "stop"}


def ask(server, content="hi", *, headers=None, path="/v1/messages", **fields):
    """Status, headers and body. A field that is ... is left out."""
    body = {"model": "fake", "max_tokens": 4000, "messages": [{"role": "user", "content": content}]} | fields
    body = {name: value for name, value in body.items() if value is not ...}
    return server.request("POST", path, json.dumps(body), headers or {"x-api-key": "any"})


def whole(server, *args, **fields) -> dict:
    status, headers, body = ask(server, *args, **fields)
    assert (status, headers["Content-Type"]) == (200, "application/json"), body
    requiredkeys.check_message(body)
    return body


def stream(server, *args, **fields) -> list[dict]:
    status, headers, text = ask(server, *args, **fields, stream=True)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream"), text
    return parse(text)


def parse(text: str) -> list[dict]:
    """The events of a stream, each with a name that is its type."""
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        requiredkeys.check_message_event(event)
        found.append(event)
    return found


def check_order(events: list[dict]) -> None:
    """One block after the other, numbered, and everything in its place."""
    types = [event["type"] for event in events if event["type"] != "ping"]
    assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])
    n_blocks, kind = 0, None
    for event in (event for event in events if event["type"].startswith("content_block")):
        assert event["index"] == n_blocks
        if event["type"] == "content_block_start":
            assert kind is None
            kind = event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            assert event["delta"]["type"] in (DELTAS[kind], "signature_delta")
            assert all(event["delta"].values())
        else:
            kind, n_blocks = None, n_blocks + 1
    assert kind is None


def joined(events: list[dict]) -> dict:
    """The message that a stream's events make, put together here anew."""
    check_order(events)
    message = json.loads(json.dumps(events[0]["message"]))
    assert (message["content"], message["stop_reason"]) == ([], None)
    texts: list[str] = []
    for event in events[1:]:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append(dict(block))
                texts.append("")
            case {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": signature}}:
                message["content"][-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": {"type": _, **rest}}:
                texts[-1] += "".join(rest.values())
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = text
        else:
            block[block["type"]] = text
    return message


def as_message(message: dict) -> Message:
    """What chat would call it; a call's input is JSON text here, or an object."""
    texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    thinking = [block["thinking"] for block in message["content"] if block["type"] == "thinking"]
    calls = [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]
    content = "".join(texts) if texts or not calls else None
    return Message(content, "".join(thinking), calls, FINISH[message["stop_reason"]])
