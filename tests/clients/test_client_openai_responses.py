"""OpenAI's own Python package, sync and async, speaking the Responses dialect with the whole server."""

import asyncio
import json

import pytest
from pydantic import BaseModel

from tests.waiting import DEADLINE_S

pytest.importorskip("openai", reason="openai is not installed: pip install 'mlx-serve-http[clients]'")

import openai

from tests.sockets.responsekit import scripted

pytestmark = pytest.mark.real

ASKED = {"model": "fake", "input": "hi"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<think>Hm.</think><tool_call>get_weather {"city": "Zürich"}</tool_call>'
REPORT = "12 °C, 🌧"


class Solution(BaseModel):
    steps: list[str]
    answer: float


SOLUTION = Solution(steps=["add", "ü"], answer=4.5)


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


@pytest.fixture(scope="module")
def model():
    with scripted() as script:
        yield script


def options(script) -> dict:
    return {"base_url": script.base_url, "api_key": "none", "max_retries": 0, "timeout": DEADLINE_S}


@pytest.fixture
def client(model):
    with openai.OpenAI(**options(model)) as client:
        yield client


def test_create(model, client):
    model.answers.append("Hello.")
    response = client.responses.create(**ASKED, instructions="Be kind.", metadata={"a": "b"})
    assert (response.output_text, response.status) == ("Hello.", "completed")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_stream(model, client):
    model.answers.append("<think>Hm.</think>né 🐉")
    with client.responses.create(**ASKED, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "né 🐉"
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
    assert events[-1].response.output_text == "né 🐉"


@pytest.mark.parametrize("summary", [None, "auto"])
def test_stream_helper(model, client, summary):
    model.answers.append("<think>Hm.</think>Hello.")
    with client.responses.stream(**ASKED, reasoning={"summary": summary}) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert (snapshots[-1], response.output_text) == ("Hello.", "Hello.")
    reasoning = response.output[0]
    (part,) = reasoning.summary or reasoning.content
    assert part.text == "Hm."


def test_parse(model, client):
    model.answers += [SOLUTION.model_dump_json()] * 2
    assert client.responses.parse(**ASKED, text_format=Solution).output_parsed == SOLUTION
    with client.responses.stream(**ASKED, text_format=Solution) as stream:
        assert stream.get_final_response().output_parsed == SOLUTION


def test_parsed_tool_calls(model, client):
    model.answers.append('<tool_call>GetWeather {"city": "Bern"}</tool_call>')
    tool = openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}
    (call,) = client.responses.parse(**ASKED, tools=[tool]).output
    assert call.parsed_arguments == {"city": "Bern"}


def output_for(response) -> dict:
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Zürich"}
    return {"type": "function_call_output", "call_id": call.call_id, "output": REPORT}


def test_tools_loop(model, client):
    model.answers += [CALL, f"It is {REPORT}."]
    talk = [{"role": "user", "content": "Weather?"}]
    response = client.responses.create(model="fake", input=talk, tools=[WEATHER])
    talk += [*response.output, output_for(response)]
    assert client.responses.create(model="fake", input=talk, tools=[WEATHER]).output_text == f"It is {REPORT}."
    named, _schemas, *turns = model.asked().split("\n")
    assert named == "[tools get_weather]"
    call = CALL.replace("Zürich", "Z\\u00fcrich")
    assert turns == ["[user]Weather?", f"[assistant]{call}", f"[tool]{REPORT}", "[assistant]"]


def test_tools_loop_by_the_response_before(model, client):
    model.answers += [CALL, f"It is {REPORT}."]
    with client.responses.stream(model="fake", input="Weather?", tools=[WEATHER]) as stream:
        response = stream.get_final_response()
    more = {"previous_response_id": response.id, "input": [output_for(response)]}
    with client.responses.stream(model="fake", tools=[WEATHER], **more) as stream:
        last = stream.get_final_response()
    assert last.output_text == f"It is {REPORT}."
    listed = list(client.responses.input_items.list(last.id, order="asc", limit=2))
    assert [item.type for item in listed] == ["message", "reasoning", "function_call", "function_call_output"]


def test_custom_tool(model, client):
    model.answers.append('<tool_call>run {"input": "print(\\"ü\\")"}</tool_call>')
    tool = {"type": "custom", "name": "run", "description": "Runs Python."}
    (call,) = client.responses.create(**ASKED, tools=[tool]).output
    assert (call.type, call.input) == ("custom_tool_call", 'print("ü")')


def test_input_tokens(model, client):
    model.answers.append("Hello.")
    n_tokens = client.responses.input_tokens.count(**ASKED).input_tokens
    assert client.responses.create(**ASKED).usage.input_tokens == n_tokens


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, background=True)
    assert caught.value.param == "background"
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="none", input="hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_async(model):
    async def talk() -> tuple:
        async with openai.AsyncOpenAI(**options(model)) as client:
            whole = await asyncio.gather(*(client.responses.create(**ASKED) for _ in range(4)))
            stream = await client.responses.create(**ASKED, stream=True)
            events = [event async for event in stream]
            async with client.responses.stream(**ASKED, text_format=Solution) as helper:
                final = await helper.get_final_response()
            parsed = await client.responses.parse(**ASKED, text_format=Solution)
        return whole, events, final, parsed

    model.answers += [SOLUTION.model_dump_json()] * 7
    whole, events, final, parsed = asyncio.run(talk())
    assert len({response.id for response in whole}) == 4
    assert events[-1].response.output_text == whole[0].output_text == SOLUTION.model_dump_json()
    assert final.output_parsed == parsed.output_parsed == SOLUTION
