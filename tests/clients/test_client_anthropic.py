"""Anthropic's own Python package, sync and async, against the whole server; its types check every answer."""

import asyncio
import json

import pytest
from pydantic import BaseModel, TypeAdapter

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
    crowded,
    saying,
    served,
    weather,
)
from tests.waiting import DEADLINE_S

anthropic = pytest.importorskip("anthropic", reason=f"anthropic is {EXTRA}")

from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent  # noqa: E402

pytestmark = pytest.mark.real

HI = [{"role": "user", "content": "hi"}]
ANSWER = "user: hi\n"
MAX = 1000
FUNCTION = WEATHER_TOOL["function"]
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": FUNCTION["parameters"]}
# The newer packages have no parameters for them, the API has.
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}


def client_of(server, **kwargs):
    kwargs = {"api_key": KEY, "max_retries": 0, "timeout": DEADLINE_S} | kwargs
    return anthropic.Anthropic(base_url=server.root_url, **kwargs)


def async_client_of(server, **kwargs):
    kwargs = {"api_key": KEY, "max_retries": 0, "timeout": DEADLINE_S} | kwargs
    return anthropic.AsyncAnthropic(base_url=server.root_url, **kwargs)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def text_of(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def strictly(kind, value) -> None:
    """What the package itself would let pass unchecked."""
    TypeAdapter(kind).validate_json(json.dumps(value) if not isinstance(value, str | bytes) else value, strict=True)


# Answers and streams


def test_create(client):
    raw = client.messages.with_raw_response.create(model=MODEL, max_tokens=MAX, messages=HI, extra_body=SAMPLING)
    strictly(Message, raw.http_response.content)
    message = raw.parse()
    assert (text_of(message), message.stop_reason, message.model) == (ANSWER, "end_turn", MODEL)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(ANSWER), len(ANSWER) + 1)
    assert message._request_id == raw.headers["request-id"]


def test_stream(client):
    with client.messages.create(model=MODEL, max_tokens=MAX, messages=HI, stream=True) as stream:
        events = list(stream)
    for event in events:
        strictly(RawMessageStreamEvent, event.to_json())
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == ANSWER
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", len(ANSWER) + 1)


def test_stream_helper(client):
    with client.messages.stream(model=MODEL, max_tokens=MAX, messages=HI) as stream:
        assert "".join(stream.text_stream) == ANSWER
        message = stream.get_final_message()
        assert stream.request_id
    assert (text_of(message), message.stop_reason) == (ANSWER, "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(ANSWER), len(ANSWER) + 1)


def test_async(server):
    async def ask():
        async with async_client_of(server) as client:
            message = await client.messages.create(model=MODEL, max_tokens=MAX, messages=HI)
            async with client.messages.stream(model=MODEL, max_tokens=MAX, messages=HI) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
        return text_of(message), text, text_of(final)

    assert asyncio.run(ask()) == (ANSWER,) * 3


def test_thinking_comes_back_as_it_went():
    with served(saying("<think>hm</think>done")) as server, client_of(server) as client:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = client.messages.create(model=MODEL, max_tokens=MAX, messages=HI, thinking=thinking)
        with client.messages.stream(model=MODEL, max_tokens=MAX, messages=HI, thinking=thinking) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "hm"
        assert streamed.content[0] == message.content[0]
        assert text_of(streamed) == text_of(message) == "done"
        history = [*HI, message.to_param() if hasattr(message, "to_param") else _param(message), *HI]
        assert text_of(client.messages.create(model=MODEL, max_tokens=MAX, messages=history)) == "done"


def _param(message) -> dict:
    return {"role": message.role, "content": message.content}


def test_a_stop_sequence(client):
    message = client.messages.create(model=MODEL, max_tokens=MAX, messages=HI, stop_sequences=["x", "hi"])
    assert (text_of(message), message.stop_reason, message.stop_sequence) == ("user: ", "stop_sequence", "hi")
    with client.messages.stream(model=MODEL, max_tokens=MAX, messages=HI, stop_sequences=["hi"]) as stream:
        message = stream.get_final_message()
    assert (text_of(message), message.stop_reason, message.stop_sequence) == ("user: ", "stop_sequence", "hi")


def test_count_tokens(client):
    raw = client.messages.with_raw_response.count_tokens(model=MODEL, messages=HI, system="Be brief.")
    strictly(MessageTokensCount, raw.http_response.content)
    assert raw.parse().input_tokens == len("system: Be brief.\n" + ANSWER)


def test_models(client):
    models = list(client.models.list(limit=20))
    assert [model.id for model in models] == [MODEL]
    strictly(ModelInfo, client.models.with_raw_response.retrieve(MODEL).http_response.content)
    assert client.models.retrieve(MODEL).created_at.year == 2023


# Tools


def test_a_loop_with_tools_by_hand():
    with served(weather) as server, client_of(server) as client:
        messages = [{"role": "user", "content": "Weather?"}]
        first = client.messages.create(model=MODEL, max_tokens=MAX, messages=messages, tools=[WEATHER])
        (call,) = first.content
        assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": CITY})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": REPORT}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(model=MODEL, max_tokens=MAX, messages=messages, tools=[WEATHER])
    assert (text_of(last), last.stop_reason) == (f"It is {REPORT}.", "end_turn")


def test_a_call_streams_its_input():
    with served(saying(f"Look.{WEATHER_CALL}{WEATHER_CALL}")) as server, client_of(server) as client:
        with client.messages.stream(model=MODEL, max_tokens=MAX, messages=HI, tools=[WEATHER]) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            message = stream.get_final_message()
    assert "".join(parts) == ARGUMENTS * 2
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in message.content[1:]] == [{"city": CITY}] * 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_tool_runner(is_stream):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return REPORT

    asked: list[str] = []
    with served(weather) as server, client_of(server) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=MAX, messages=HI, tools=[get_weather], stream=is_stream
        )
        messages = [turn.get_final_message() if is_stream else turn for turn in runner]
    assert asked == [CITY]
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert text_of(messages[-1]) == f"It is {REPORT}."


class City(BaseModel):
    name: str
    people: int


def test_parse_gives_the_model():
    pytest.importorskip("llguidance")
    answer = City(name="Zürich", people=400_000)
    with served(saying(answer.model_dump_json())) as server, client_of(server) as client:
        message = client.messages.parse(model=MODEL, max_tokens=MAX, messages=HI, output_format=City)
    assert message.parsed_output == answer


# Refusals


@pytest.mark.parametrize(("fields", "error", "kind"), [
    ({"max_tokens": 0}, "BadRequestError", "invalid_request_error"),
    ({"model": "claude-x"}, "NotFoundError", "not_found_error"),
    ({"messages": [{"role": "user", "content": "x" * CONTEXT_TOKENS}]}, "BadRequestError", "invalid_request_error"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_has_its_class(client, fields, error, kind, stream):
    with pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(**{"model": MODEL, "max_tokens": MAX, "messages": HI, "stream": stream} | fields)
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.body["request_id"] == caught.value.request_id


def test_a_key_may_come_either_way():
    with served(api_keys=(KEY,)) as server:
        with client_of(server) as client:
            assert text_of(client.messages.create(model=MODEL, max_tokens=MAX, messages=HI)) == ANSWER
        with client_of(server, api_key=None, auth_token=KEY) as client:
            assert text_of(client.messages.create(model=MODEL, max_tokens=MAX, messages=HI)) == ANSWER
        with client_of(server, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(model=MODEL, max_tokens=MAX, messages=HI)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_full_queue_is_a_rate_limit():
    with crowded() as server:
        with client_of(server) as client, pytest.raises(anthropic.RateLimitError):
            client.messages.create(model=MODEL, max_tokens=MAX, messages=HI)


def test_an_engine_that_stops():
    with served() as server, client_of(server) as client:
        server.stop_engine()
        with pytest.raises(anthropic.InternalServerError) as caught:
            client.messages.create(model=MODEL, max_tokens=MAX, messages=HI)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (503, "overloaded_error")


def test_a_fault_in_mid_stream_raises():
    with served(held=True) as server, client_of(server) as client:
        with client.messages.create(model=MODEL, max_tokens=MAX, messages=HI, stream=True) as stream:
            server.steps.let(2)
            next(stream)
            server.steps.fault = RuntimeError("secret of the inside")
            server.steps.open()
            with pytest.raises(anthropic.APIStatusError) as caught:
                list(stream)
    assert "api_error" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_leaving_a_stream_frees_its_place():
    with served(None, held=True) as server, client_of(server) as client:
        with client.messages.create(model=MODEL, max_tokens=MAX, messages=HI, stream=True) as stream:
            server.steps.let(3)
            next(stream)
        server.frees_its_place()
