"""OpenAI's own Python package, sync and async, against the whole server."""

import asyncio
import json

import pytest
from pydantic import BaseModel

from mlx_serve.testing import vector_of
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

openai = pytest.importorskip("openai", reason=f"openai is {EXTRA}")

pytestmark = pytest.mark.real

HI = [{"role": "user", "content": "hi"}]
ANSWER = "user: hi\n"
LONG = [{"role": "user", "content": "x" * CONTEXT_TOKENS}]


class Step(BaseModel):
    explanation: str
    output: str | None


class Solution(BaseModel):
    steps: list[Step]
    answer: float


SOLUTION = Solution(steps=[Step(explanation="add", output=None), Step(explanation="ü", output="4")], answer=4.5)


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


def forced(name: str, arguments: dict) -> str:
    """What a model writes that is held to one call."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def client_of(server, **kwargs):
    kwargs = {"api_key": KEY, "max_retries": 0, "timeout": DEADLINE_S} | kwargs
    return openai.OpenAI(base_url=server.base_url, **kwargs)


def async_client_of(server, **kwargs):
    kwargs = {"api_key": KEY, "max_retries": 0, "timeout": DEADLINE_S} | kwargs
    return openai.AsyncOpenAI(base_url=server.base_url, **kwargs)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def text_of(chunks) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


# Answers and streams


def test_create(client):
    answer = client.chat.completions.create(model=MODEL, messages=HI)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert (choice.message.tool_calls, choice.message.refusal, choice.logprobs) == (None, None, None)
    assert (answer.model, answer.system_fingerprint) == (MODEL, "fp_test")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_every_role_and_kind_of_content(client):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "né 🐉", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [_call("call_1")]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": REPORT}]},
    ]
    text = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
    assert text.startswith("system: be brief\nuser: né 🐉\nassistant: ")
    assert text.endswith(f"tool: {REPORT}\n")


def _call(call_id: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}


def test_stream(client):
    with client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = list(stream)
    assert text_of(chunks) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-2:] == [None, "stop"]
    assert (last.choices, last.usage.prompt_tokens) == ([], len(ANSWER))


def test_stream_without_usage(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def test_stream_helper(client):
    with client.chat.completions.stream(model=MODEL, messages=HI, logprobs=True, top_logprobs=2) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert answer.choices[0].message.content == ANSWER
    assert "".join(entry.token for entry in answer.choices[0].logprobs.content) == ANSWER


def test_several_choices(client):
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, ANSWER), (1, ANSWER)]
    with client.chat.completions.stream(model=MODEL, messages=HI, n=2) as stream:
        stream.until_done()
        answer = stream.get_final_completion()
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, ANSWER), (1, ANSWER)]


def test_length_and_stop(client):
    choice = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=4).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("user", "length")
    choice = client.chat.completions.create(model=MODEL, messages=HI, stop=["hi"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("user: ", "stop")


def test_reasoning_comes_beside_the_content():
    with served(saying("<think>hm</think>done")) as server, client_of(server) as client:
        message = client.chat.completions.create(model=MODEL, messages=HI).choices[0].message
        with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
            deltas = [chunk.choices[0].delta for chunk in stream]
    assert (message.content, message.reasoning_content) == ("done", "hm")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "done"


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=["ab", "c"], n=2, logprobs=1, max_tokens=9)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "ab"), (1, "ab"), (2, "c"), (3, "c")]
    assert answer.choices[0].logprobs.tokens == ["a", "b"]
    assert client.completions.create(model=MODEL, prompt=[97, 98], echo=True).choices[0].text == "abab"


def test_completions_stream(client):
    with client.completions.create(
        model=MODEL, prompt="né 🐉", stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "né 🐉"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.prompt_tokens == len("né 🐉".encode())


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mlx-serve"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("owner/none")
    assert caught.value.code == "model_not_found"


def test_raw_response(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HI)
    answer = raw.parse()
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert answer.choices[0].message.content == ANSWER
    assert raw.headers["x-request-id"] == answer._request_id


def test_streaming_response(client):
    create = client.chat.completions.with_streaming_response.create
    with create(model=MODEL, messages=HI, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_async(server):
    async def talk() -> tuple:
        async with async_client_of(server) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=HI) for _ in range(8))
            )
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            chunks = [chunk async for chunk in stream]
            async with client.chat.completions.stream(model=MODEL, messages=HI) as events:
                final = await events.get_final_completion()
            text = await client.completions.create(model=MODEL, prompt="ab")
            models = [model.id async for model in client.models.list()]
        return answers, chunks, final, text, models

    answers, chunks, final, text, models = asyncio.run(talk())
    assert {answer.choices[0].message.content for answer in answers} == {ANSWER}
    assert len({answer.id for answer in answers}) == 8
    assert text_of(chunks) == ANSWER == final.choices[0].message.content
    assert (text.choices[0].text, models) == ("ab", [MODEL])


# Structured output


def test_parse():
    with served(saying(SOLUTION.model_dump_json())) as server, client_of(server) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Solution)
        sent = server.bodies()[-1]["response_format"]
    assert answer.choices[0].message.parsed == SOLUTION
    assert (sent["type"], sent["json_schema"]["strict"]) == ("json_schema", True)


def test_parse_of_a_cut_answer():
    with served(saying(SOLUTION.model_dump_json())) as server, client_of(server) as client:
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model=MODEL, messages=HI, response_format=Solution, max_completion_tokens=9)


def test_parse_async():
    async def talk(server) -> Solution:
        async with async_client_of(server) as client:
            answer = await client.chat.completions.parse(model=MODEL, messages=HI, response_format=Solution)
        return answer.choices[0].message.parsed

    with served(saying(SOLUTION.model_dump_json())) as server:
        assert asyncio.run(talk(server)) == SOLUTION


def test_stream_helper_parses():
    with served(saying(SOLUTION.model_dump_json())) as server, client_of(server) as client:
        with client.chat.completions.stream(model=MODEL, messages=HI, response_format=Solution) as stream:
            partial = [event.parsed for event in stream if event.type == "content.delta"]
            answer = stream.get_final_completion()
    assert answer.choices[0].message.parsed == SOLUTION
    assert partial[-1] == SOLUTION.model_dump()


def test_json_object():
    with served(saying('{"a": [1, 2]}')) as server, client_of(server) as client:
        answer = client.chat.completions.create(model=MODEL, messages=HI, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"a": [1, 2]}


def test_a_schema_that_is_none(client):
    sent = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, response_format=sent)
    assert caught.value.param.startswith("response_format")


# Tools


def _run_tools(client, create) -> str:
    messages = [{"role": "user", "content": "What is the weather?"}]
    message = create(client, messages)
    call = message.tool_calls[0]
    assert (message.content or None, call.type, call.function.name) == (None, "function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": CITY}
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": REPORT}]
    message = create(client, messages)
    assert message.tool_calls is None
    return message.content


def test_tools_loop():
    def create(client, messages):
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER_TOOL])
        assert (answer.choices[0].finish_reason == "tool_calls") == bool(answer.choices[0].message.tool_calls)
        return answer.choices[0].message

    with served(weather) as server, client_of(server) as client:
        assert _run_tools(client, create) == f"It is {REPORT}."


def test_tools_loop_in_streams():
    def create(client, messages):
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER_TOOL]) as stream:
            kinds = {event.type for event in stream}
            choice = stream.get_final_completion().choices[0]
        assert ("tool_calls.function.arguments.done" in kinds) == (choice.finish_reason == "tool_calls")
        return choice.message

    with served(weather) as server, client_of(server) as client:
        assert _run_tools(client, create) == f"It is {REPORT}."


def test_two_calls_in_a_stream():
    calls = "".join(f'<tool_call>get_weather {{"city": "{city}"}}</tool_call>' for city in ("Bern", "Basel"))
    with served(saying(calls)) as server, client_of(server) as client:
        with client.chat.completions.stream(model=MODEL, messages=HI, tools=[WEATHER_TOOL]) as stream:
            stream.until_done()
            made = stream.get_final_completion().choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in made] == ["Bern", "Basel"]
    assert len({call.id for call in made}) == 2


def test_parsed_tool_calls():
    tool = openai.pydantic_function_tool(GetWeather)
    with served(saying(f"<tool_call>GetWeather {ARGUMENTS}</tool_call>")) as server, client_of(server) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=HI, tools=[tool])
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city=CITY)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_call(choice, stream):
    wanted = {"model": MODEL, "messages": HI, "tools": [WEATHER_TOOL], "tool_choice": choice}
    with served(saying(forced("get_weather", {"city": CITY}))) as server, client_of(server) as client:
        if stream:
            with client.chat.completions.stream(**wanted) as events:
                events.until_done()
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**wanted)
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": CITY})
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")


# Errors


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "none"}, "NotFoundError", "model_not_found", "model"),
        ({"messages": LONG}, "BadRequestError", "context_length_exceeded", "messages"),
        ({"temperature": 3}, "BadRequestError", None, "temperature"),
        ({"temperature": "hot"}, "BadRequestError", "invalid_type", "temperature"),
        ({"messages": []}, "BadRequestError", None, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "BadRequestError", None, "messages[0].role"),
        ({"messages": None}, "BadRequestError", "missing_required_parameter", "messages"),
        ({"top_logprobs": 2}, "BadRequestError", None, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(client, fields, kind, code, param, stream):
    body = {"model": MODEL, "messages": HI, "stream": stream, **fields}
    with pytest.raises(getattr(openai, kind)) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    error = caught.value
    assert (error.type, error.code, error.param) == ("invalid_request_error", code, param)
    assert error.request_id == error.response.headers["x-request-id"]


def test_an_unknown_route(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.post("/nothing/here", body={}, cast_to=object)
    assert caught.value.type == "invalid_request_error"


def test_keys():
    with served(api_keys=(KEY,)) as server:
        with client_of(server) as client:
            assert client.chat.completions.create(model=MODEL, messages=HI).choices[0].message.content == ANSWER
        with client_of(server, api_key="sk-other") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.chat.completions.create(model=MODEL, messages=HI)
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")


def test_a_failing_engine():
    with served() as server, client_of(server) as client:
        server.steps.fault = ValueError("a step failed")
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=HI)
        assert (caught.value.status_code, caught.value.type) == (500, "server_error")
        assert client.chat.completions.create(model=MODEL, messages=HI).choices[0].message.content == ANSWER


def test_a_failure_in_mid_stream():
    with served(held=True) as server, client_of(server) as client:
        server.steps.let(1)
        with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
            assert text_of([next(stream), next(stream)]) == ANSWER[0]
            server.steps.fault = ValueError("a step failed")
            server.steps.open()
            with pytest.raises(openai.APIError, match="failed"):
                list(stream)


def test_a_server_that_ends():
    with served() as server, client_of(server) as client:
        server.stop_engine()
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=HI)
    assert caught.value.status_code == 503
    assert float(caught.value.response.headers["retry-after"]) > 0


def test_too_many_requests():
    with crowded() as server, client_of(server) as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI)
    error = caught.value
    assert (error.status_code, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert float(error.response.headers["retry-after"]) > 0


def test_a_retry_finds_a_place():
    """The package waits as long as the 429 says, and by then the place is free."""
    with crowded() as server:
        statuses = []

        def note(response) -> None:
            statuses.append(response.status_code)
            server.steps.open()

        http = openai.DefaultHttpxClient(event_hooks={"response": [note]})
        with client_of(server, max_retries=1, http_client=http) as client:
            answer = client.chat.completions.create(model=MODEL, messages=HI)
        assert answer.choices[0].message.content == ANSWER
        assert statuses == [429, 200]
        assert server.requests[-1].headers["x-stainless-retry-count"] == "1"


# Embeddings


def test_embeddings_as_numbers_and_as_the_package_asks_for_them(client, server):
    plain = client.embeddings.create(model=MODEL, input=["hi", "you"], encoding_format="float")
    default = client.embeddings.create(model=MODEL, input=["hi", "you"])
    # The package itself asks for base64, and makes numbers of it.
    assert [body["encoding_format"] for body in server.bodies()[-2:]] == ["float", "base64"]
    for answer in (plain, default):
        assert [item.index for item in answer.data] == [0, 1]
        assert [item.embedding for item in answer.data] == [pytest.approx(vector_of(text)) for text in (b"hi", b"you")]
        assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == (MODEL, 5, 5)


def test_embeddings_of_token_ids_and_with_fewer_dimensions(client):
    answer = client.embeddings.create(model=MODEL, input=[list(b"hi"), list(b"you")], dimensions=3, user="u")
    found = [item.embedding for item in answer.data]
    assert found == [pytest.approx(vector_of(text, 3)) for text in (b"hi", b"you")]


def test_embeddings_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=["hi", "x" * (CONTEXT_TOKENS + 1)])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")


def test_embeddings_async():
    async def embed(server):
        async with async_client_of(server) as client:
            return await client.embeddings.create(model=MODEL, input="hi")

    with served() as server:
        assert asyncio.run(embed(server)).data[0].embedding == pytest.approx(vector_of(b"hi"))


# Leaving


def test_leaving_a_stream_frees_the_place():
    with served(None, held=True) as server, client_of(server) as client:
        server.steps.let(1)
        with client.chat.completions.create(model=MODEL, messages=HI, stream=True, max_tokens=10**9) as stream:
            assert text_of([next(stream), next(stream)]) == "x"
        server.frees_its_place()


def test_a_timeout_frees_the_place():
    with served(None, held=True) as server, client_of(server) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model=MODEL, messages=HI, max_tokens=10**9, timeout=0.2)
        server.frees_its_place()


def test_a_cancelled_task_frees_the_place():
    async def talk(server) -> None:
        async with async_client_of(server) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, max_tokens=10**9)
            begun = asyncio.Event()

            async def read() -> None:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with served(None, held=True) as server:
        server.steps.let(1)
        asyncio.run(talk(server))
        server.frees_its_place()
