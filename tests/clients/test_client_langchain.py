"""langchain-openai against the whole server."""

import asyncio
import json

import pytest
from pydantic import BaseModel

from tests.clients.clientserver import (
    ARGUMENTS,
    CITY,
    CONTEXT_TOKENS,
    EXTRA,
    KEY,
    MODEL,
    REPORT,
    WEATHER_CALL,
    WEATHER_TOOL,
    saying,
    served,
    weather,
)
from tests.waiting import DEADLINE_S

langchain_openai = pytest.importorskip("langchain_openai", reason=f"langchain-openai is {EXTRA}")

import openai  # noqa: E402
from langchain_core.exceptions import ContextOverflowError  # noqa: E402
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402

pytestmark = pytest.mark.real

ANSWER = "user: hi\n"
CALL = {"name": "get_weather", "args": {"city": CITY}}


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


FOUND = Weather(city=CITY, degrees=12)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"{REPORT} in {city}"


@pytest.fixture
def http():
    """Its own clients would stay open."""
    with openai.DefaultHttpxClient() as client:
        yield client


@pytest.fixture
def chat(http):
    """Makes a chat model of a server."""

    def make(server, **kwargs):
        kwargs = {"stream_usage": True, "max_retries": 0, "timeout": DEADLINE_S, "http_client": http} | kwargs
        return langchain_openai.ChatOpenAI(model=MODEL, base_url=server.base_url, api_key=KEY, **kwargs)

    return make


def joined(chunks) -> AIMessageChunk:
    first, *others = chunks
    return sum(others, first)


def test_invoke(server, chat):
    answer = chat(server).invoke([SystemMessage("be brief"), HumanMessage("hi")])
    assert answer.content == f"system: be brief\n{ANSWER}"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"]["cache_read"] == usage["output_token_details"]["reasoning"] == 0


def test_stream_with_usage(server, chat):
    chunks = list(chat(server).stream("hi"))
    assert [chunk.content for chunk in chunks if chunk.content] == list(ANSWER)
    answer = joined(chunks)
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["input_tokens"] == len(ANSWER)


def test_stream_without_usage(server, chat):
    answer = joined(chat(server, stream_usage=False).stream("hi"))
    assert (answer.content, answer.usage_metadata) == (ANSWER, None)


def test_batch(server, chat):
    assert [answer.content for answer in chat(server).batch(["a", "b"])] == ["user: a\n", "user: b\n"]


def test_async(server, chat):
    async def talk() -> tuple[str, str]:
        async with openai.DefaultAsyncHttpxClient() as http:
            model = chat(server, http_async_client=http)
            answer = await model.ainvoke("hi")
            chunks = [chunk async for chunk in model.astream("hi")]
        return answer.content, joined(chunks).content

    assert asyncio.run(talk()) == (ANSWER, ANSWER)


def test_logprobs(server, chat):
    answer = chat(server, logprobs=True, top_logprobs=2).invoke("hi")
    assert "".join(entry["token"] for entry in answer.response_metadata["logprobs"]["content"]) == ANSWER


def test_the_old_completions(server, http):
    model = langchain_openai.OpenAI(model=MODEL, base_url=server.base_url, api_key=KEY, max_retries=0, http_client=http)
    assert model.invoke("ab") == "ab"
    assert "".join(model.stream("ab")) == "ab"


def test_bind_tools(chat):
    with served(weather) as server:
        model = chat(server).bind_tools([get_weather])
        messages = [HumanMessage("What is the weather?")]
        answer = model.invoke(messages)
        call = answer.tool_calls[0]
        assert {key: call[key] for key in CALL} == CALL
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        final = model.invoke([*messages, answer, result])
    assert (final.content, final.tool_calls) == (f"It is {REPORT} in {CITY}.", [])


def test_bind_tools_in_streams(chat):
    with served(saying(WEATHER_CALL * 2)) as server:
        answer = joined(chat(server).bind_tools([WEATHER_TOOL]).stream("What is the weather?"))
    assert [{key: call[key] for key in CALL} for call in answer.tool_calls] == [CALL, CALL]
    assert answer.invalid_tool_calls == []


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_a_forced_tool(choice, chat):
    with served(saying(f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}')) as server:
        model = chat(server).bind_tools([get_weather], tool_choice=choice)
        whole, streamed = model.invoke("hi"), joined(model.stream("hi"))
    assert [{key: call[key] for key in CALL} for call in whole.tool_calls + streamed.tool_calls] == [CALL, CALL]


# It dumps a chunk of OpenAI's package whose type does not foresee what was parsed.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("strict", [None, True])
def test_structured_output_by_json_schema(strict, chat):
    with served(saying(FOUND.model_dump_json())) as server:
        model = chat(server).with_structured_output(Weather, method="json_schema", strict=strict)
        assert model.invoke("hi") == FOUND
        assert list(model.stream("hi"))[-1] == FOUND
        assert server.bodies()[-1]["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize("strict", [None, True])
def test_structured_output_by_function_calling(strict, chat):
    with served(saying(f'{{"name": "Weather", "arguments": {FOUND.model_dump_json()}}}')) as server:
        model = chat(server).with_structured_output(Weather, method="function_calling", strict=strict)
        assert model.invoke("hi") == FOUND
        assert server.bodies()[-1]["tool_choice"]["function"]["name"] == "Weather"


def test_structured_output_by_json_mode(chat):
    with served(saying(FOUND.model_dump_json())) as server:
        model = chat(server).with_structured_output(Weather, method="json_mode", include_raw=True)
        found = model.invoke("Answer in JSON.")
    assert (found["parsed"], found["parsing_error"]) == (FOUND, None)
    assert json.loads(found["raw"].content) == FOUND.model_dump()


def test_a_prompt_over_the_context(server, chat):
    for ask in (chat(server).invoke, lambda text: list(chat(server).stream(text))):
        with pytest.raises(ContextOverflowError):
            ask("x" * CONTEXT_TOKENS)
