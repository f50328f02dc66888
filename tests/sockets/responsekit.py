"""A server whose model gives scripted answers to Responses requests, and what clients see of them.

Every whole answer and every event is checked against the types of OpenAI's own package.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from mlx_serve.api.response_store import ResponseStore
from mlx_serve.engine.catalog import Catalog
from mlx_serve.testing import ENTRY, EOS, FakeBackend, FakeTokenizer
from tests.sockets import apikit, requiredkeys

pytest.importorskip("openai", reason="openai is not installed")

from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

EVENT = TypeAdapter(ResponseStreamEvent)
COMPACTED = TypeAdapter(CompactedResponse)
STATES = ("completed", "incomplete", "failed")


def render_turns(messages, tools, options) -> str:
    """All that a message holds, an assistant's exactly as the model wrote it."""
    lines = [f"[tools {' '.join(tool['function']['name'] for tool in tools)}]", json.dumps(tools)] if tools else []
    for message in messages:
        thought = message.get("reasoning_content")
        text = f"[{message['role']}]" + (f"<think>{thought}</think>" if thought else "") + message["content"]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text += f"<tool_call>{function['name']} {json.dumps(function['arguments'])}</tool_call>"
        lines.append(text)
    return "\n".join([*lines, "[assistant]"])


class Scripted:
    """A running server; ``answers`` are given one after the other, ``prompts`` are what the model was asked."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.tokenizer = tokenizer
        self.answers: list[str] = []
        self.prompts: list[list[int]] = []
        self.samplings: list = []
        self.server: apikit.Running

    def answer(self, job) -> list[int]:
        self.prompts.append(list(job.prompt.tokens))
        self.samplings.append(job.sampling)
        return [*self.tokenizer.encode(self.answers.pop(0), special=False), EOS]

    def asked(self, i: int = -1) -> str:
        return self.tokenizer.decode(self.prompts[i])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"

    def post(self, path: str = "", **body):
        return self.server.request("POST", f"/v1/responses{path}", body)

    def get(self, path: str):
        return self.server.request("GET", f"/v1/responses/{path}")

    def refused(self, **body) -> dict:
        """The error of a request that is refused."""
        status, _, answer = self.post(**{"input": "hi"} | body)
        assert status == 400, answer
        return answer["error"]

    def whole(self, *answers: str, **body) -> dict:
        """A response in one piece."""
        self.answers += answers
        status, _, answer = self.post(**{"input": "hi"} | body)
        assert status == 200, answer
        Response.model_validate(answer, strict=True)
        requiredkeys.check_response(answer)
        return answer

    def streamed(self, *answers: str, **body) -> list[dict]:
        """The events of a response."""
        self.answers += answers
        status, headers, text = self.post(**{"input": "hi", "stream": True} | body)
        assert (status, headers.get_content_type()) == (200, "text/event-stream"), text
        return events_of(text)

    def both(self, answer: str, **body) -> tuple[dict, list[dict]]:
        """The response, which is the same streamed and not but for ids and times, and the events."""
        whole, found = self.whole(answer, **body), self.streamed(answer, **body)
        assert plain(found[-1]["response"]) == plain(whole)
        return whole, found

    def listed(self, response_id: str, query: str = "?order=asc") -> dict:
        """A page of input items."""
        status, _, answer = self.get(f"{response_id}/input_items{query}")
        assert status == 200, answer
        ResponseItemList.model_validate(answer, strict=True)
        for item in answer["data"]:
            requiredkeys.check_item(item)
        return answer


def events_of(text: str) -> list[dict]:
    """The events of a stream, in OpenAI's form and numbered without a gap, the last of them an end."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        requiredkeys.check_event(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    states = [event["type"].removeprefix("response.") for event in found]
    assert states[:2] == ["created", "in_progress"]
    assert states[-1] in STATES
    assert not set(STATES) & set(states[:-1])
    check_items(found)
    return found


def check_items(found: list[dict]) -> None:
    """Each item begins, gets its events and ends before the next one; the last event has them as they ended."""
    done = []
    for event in found:
        place = event.get("output_index")
        if event["type"] == "response.output_item.added":
            assert place == len(done)
            current = event["item"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == current["id"]
            done.append(event["item"])
        elif place is not None:
            assert (place, event["item_id"]) == (len(done), current["id"])
    if found[-1]["type"] != "response.failed":
        assert found[-1]["response"]["output"] == done


def kinds(found: list[dict]) -> list[str]:
    """The types of events without their common beginning; neighbours of one type count once."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def joined(found: list[dict], name: str) -> str:
    return "".join(event["delta"] for event in found if event["type"] == f"response.{name}.delta")


def plain(value):
    """Without what differs from one response to the next."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {key: plain(item) for key, item in value.items() if key not in changing}
    return [plain(item) for item in value] if isinstance(value, list) else value


@contextmanager
def scripted(
    *, store: ResponseStore | None = None, on_step=None, context_tokens: int = 4096, names=("fake",), **services
) -> Iterator[Scripted]:
    """A running server with a script that is still empty."""
    tokenizer = FakeTokenizer(render=render_turns)
    script = Scripted(tokenizer)
    backend = partial(FakeBackend, answer=script.answer, on_step=on_step)
    services |= {"responses": ResponseStore() if store is None else store, "tokenizer": tokenizer}
    catalog = Catalog(replace(ENTRY, context_tokens=context_tokens), list(names))
    with apikit.serving(lambda _: backend(), catalog=catalog, **services) as server:
        script.server = server
        yield script
