"""litellm as a library against the whole server."""

import asyncio
import inspect
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
    WEATHER_TOOL,
    crowded,
    saying,
    served,
    weather,
)
from tests.waiting import DEADLINE_S

litellm = pytest.importorskip("litellm", reason=f"litellm is {EXTRA}")

pytestmark = [
    pytest.mark.real,
    # What pydantic says of litellm's own types.
    pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

HI = [{"role": "user", "content": "hi"}]
ANSWER = "user: hi\n"


class Weather(BaseModel):
    city: str
    degrees: int


FOUND = Weather(city=CITY, degrees=12)


def to(server, **kwargs) -> dict:
    way = {"model": f"openai/{MODEL}", "api_base": server.base_url, "api_key": KEY}
    return way | {"num_retries": 0, "max_retries": 0, "timeout": DEADLINE_S} | kwargs


@pytest.fixture(scope="module")
def runner():
    """Its sync functions want an event loop too; one that they had to make would stay open."""
    with asyncio.Runner() as runner:
        runner.get_loop()
        yield runner


@pytest.fixture(autouse=True)
def _clients_end(runner):
    """It keeps its HTTP clients."""
    yield
    runner.run(end_async_clients())
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        client.close()
    litellm.in_memory_llm_clients_cache.flush_cache()


async def end_async_clients() -> None:
    """In the loop that they belong to."""
    kept = litellm.in_memory_llm_clients_cache.cache_dict
    for key, client in list(kept.items()):
        if inspect.iscoroutinefunction(client.close):
            await kept.pop(key).close()


def text_of(chunks) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


# "hosted_vllm" is litellm's way to servers of vLLM's kind.
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_completion(server, provider):
    answer = litellm.completion(messages=HI, **to(server, model=f"{provider}/{MODEL}"))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage.prompt_tokens == len(ANSWER)


def test_stream(server):
    stream = litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **to(server))
    chunks = list(stream)
    assert text_of(chunks) == ANSWER
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.prompt_tokens == len(ANSWER)
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == ANSWER


def test_async(server, runner):
    async def talk() -> tuple[str, str]:
        answer = await litellm.acompletion(messages=HI, **to(server))
        stream = await litellm.acompletion(messages=HI, stream=True, **to(server))
        return answer.choices[0].message.content, text_of([chunk async for chunk in stream])

    assert runner.run(talk()) == (ANSWER, ANSWER)


def test_text_completion(server):
    way = to(server, model=f"text-completion-openai/{MODEL}")
    assert litellm.text_completion(prompt="ab", **way).choices[0].text == "ab"


def test_reasoning():
    with served(saying("<think>hm</think>done")) as server:
        message = litellm.completion(messages=HI, **to(server)).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in litellm.completion(messages=HI, stream=True, **to(server))]
    assert (message.content, message.reasoning_content) == ("done", "hm")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_loop(stream):
    def ask(messages):
        answer = litellm.completion(messages=messages, tools=[WEATHER_TOOL], stream=stream, **to(server))
        return (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0]

    with served(weather) as server:
        messages = [{"role": "user", "content": "What is the weather?"}]
        choice = ask(messages)
        call = choice.message.tool_calls[0]
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
        assert json.loads(call.function.arguments) == {"city": CITY}
        messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": REPORT}]
        assert ask(messages).message.content == f"It is {REPORT}."


def test_a_required_tool():
    with served(saying(f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}')) as server:
        answer = litellm.completion(messages=HI, tools=[WEATHER_TOOL], tool_choice="required", **to(server))
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": CITY}


def test_structured_output():
    with served(saying(FOUND.model_dump_json())) as server:
        answer = litellm.completion(messages=HI, response_format=Weather, **to(server))
        assert server.bodies()[-1]["response_format"]["type"] == "json_schema"
    assert Weather.model_validate_json(answer.choices[0].message.content) == FOUND


@pytest.mark.parametrize("stream", [False, True])
def test_errors(server, stream):
    long = [{"role": "user", "content": "x" * CONTEXT_TOKENS}]
    for kind, fields in [
        (litellm.ContextWindowExceededError, {"messages": long}),
        (litellm.NotFoundError, {"messages": HI, "model": "openai/none"}),
        (litellm.BadRequestError, {"messages": HI, "temperature": 3}),
    ]:
        with pytest.raises(kind):
            litellm.completion(**to(server, stream=stream, **fields))


def test_keys():
    with served(api_keys=(KEY,)) as server:
        assert litellm.completion(messages=HI, **to(server)).choices[0].message.content == ANSWER
        with pytest.raises(litellm.AuthenticationError):
            litellm.completion(messages=HI, **to(server, api_key="sk-other"))


def test_a_full_queue():
    with crowded() as server, pytest.raises(litellm.RateLimitError):
        litellm.completion(messages=HI, **to(server))


def test_a_server_that_ends():
    with served() as server:
        server.stop_engine()
        with pytest.raises(litellm.ServiceUnavailableError):
            litellm.completion(messages=HI, **to(server))
