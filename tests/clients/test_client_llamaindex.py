"""llama-index-llms-openai-like against the whole server."""

import asyncio

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
    saying,
    served,
    weather,
)
from tests.waiting import DEADLINE_S

openai_like = pytest.importorskip("llama_index.llms.openai_like", reason=f"llama-index-llms-openai-like is {EXTRA}")

import openai  # noqa: E402
from llama_index.core.base.llms.types import ChatMessage  # noqa: E402
from llama_index.core.prompts import PromptTemplate  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402

pytestmark = pytest.mark.real

HI = [ChatMessage(role="user", content="hi")]
ANSWER = "user: hi\n"


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


FOUND = Weather(city=CITY, degrees=12)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"{REPORT} in {city}"


TOOL = FunctionTool.from_defaults(get_weather)


@pytest.fixture
def model_of():
    """Makes a model of a server."""
    with openai.DefaultHttpxClient() as http:

        def make(server, **kwargs):
            kwargs = {"is_chat_model": True, "is_function_calling_model": True, "http_client": http} | kwargs
            return openai_like.OpenAILike(
                model=MODEL,
                api_base=server.base_url,
                api_key=KEY,
                context_window=CONTEXT_TOKENS,
                max_retries=0,
                timeout=DEADLINE_S,
                **kwargs,
            )

        yield make


def test_chat(server, model_of):
    answer = model_of(server).chat(HI)
    assert (answer.message.role.value, answer.message.content) == ("assistant", ANSWER)
    assert answer.raw.usage.prompt_tokens == len(ANSWER)


def test_stream_chat(server, model_of):
    pieces = list(model_of(server).stream_chat(HI))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].message.content == ANSWER


def test_reasoning(model_of):
    with served(saying("<think>hm</think>done")) as server:
        message = model_of(server).chat(HI).message
    assert message.content == "done"
    assert [block.content for block in message.blocks if block.block_type == "thinking"] == ["hm"]


@pytest.mark.parametrize(("is_chat_model", "answer"), [(True, ANSWER), (False, "hi")])
def test_complete(server, is_chat_model, answer, model_of):
    model = model_of(server, is_chat_model=is_chat_model)
    assert model.complete("hi").text == answer
    pieces = list(model.stream_complete("hi"))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text == answer


def test_async(server, model_of):
    async def talk() -> tuple[str, str]:
        async with openai.DefaultAsyncHttpxClient() as http:
            model = model_of(server, async_http_client=http)
            answer = await model.achat(HI)
            pieces = [piece async for piece in await model.astream_chat(HI)]
        return answer.message.content, pieces[-1].message.content

    assert asyncio.run(talk()) == (ANSWER, ANSWER)


def test_function_calling(model_of):
    with served(weather) as server:
        model = model_of(server)
        answer = model.chat_with_tools([TOOL], user_msg="What is the weather?")
        call = model.get_tool_calls_from_response(answer)[0]
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": CITY})
        result = TOOL(**call.tool_kwargs).content
        told = ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id})
        final = model.chat_with_tools([TOOL], chat_history=[*HI, answer.message, told])
        assert final.message.content == f"It is {REPORT} in {CITY}."
        assert model.get_tool_calls_from_response(final, error_on_no_tool_call=False) == []
        assert model.predict_and_call([TOOL], "What is the weather?").response == result


def test_function_calling_in_streams(model_of):
    with served(weather) as server:
        model = model_of(server)
        *_, last = model.stream_chat_with_tools([TOOL], user_msg="What is the weather?")
        call = model.get_tool_calls_from_response(last)[0]
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": CITY})


def test_a_required_tool(model_of):
    with served(saying(f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}')) as server:
        model = model_of(server)
        answer = model.chat_with_tools([TOOL], user_msg="hi", tool_required=True)
        assert server.bodies()[-1]["tool_choice"] == "required"
        assert model.get_tool_calls_from_response(answer)[0].tool_kwargs == {"city": CITY}


@pytest.mark.parametrize("by_schema", [True, False])
def test_structured_predict(by_schema, model_of):
    called = f'{{"name": "Weather", "arguments": {FOUND.model_dump_json()}}}'
    with served(saying(FOUND.model_dump_json() if by_schema else called)) as server:
        model = model_of(server, should_use_structured_outputs=by_schema)
        assert model.structured_predict(Weather, PromptTemplate("hi")) == FOUND
        assert ("response_format" in server.bodies()[-1]) == by_schema
