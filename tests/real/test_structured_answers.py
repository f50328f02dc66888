"""The demo model at temperature 1: what it is made to answer parses and validates."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pydantic
import pytest

from benchmarks.structured import random_schema
from mlx_serve import serve
from mlx_serve.settings import config

pytestmark = pytest.mark.real
pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def client():
    settings = config.from_args(["--demo", "--port", "0"], {})
    with (
        serve.configured(settings, *serve.open_models(settings)) as server,
        openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as api,
    ):
        server.wait_until_ready()
        yield api


def ask(client, text, **fields):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="default_model", messages=messages, temperature=1, **fields).choices[0]


def test_twenty_answers_validate(client):
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(20)]

    def fault(schema):
        wanted = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema, "strict": True}}
        choice = ask(client, "Invent a record.", max_tokens=1000, response_format=wanted)
        try:
            jsonschema.validate(json.loads(choice.message.content), schema, format_checker=jsonschema.FormatChecker())
        except (ValueError, jsonschema.ValidationError) as error:
            return schema, choice.finish_reason, choice.message.content, str(error)
        return choice.finish_reason if choice.finish_reason != "stop" else None

    with ThreadPoolExecutor(8) as pool:
        assert [found for found in pool.map(fault, schemas) if found] == []


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    friend: "Friend | None"


class Friend(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)


def test_the_client_s_parse_gives_the_pydantic_model(client):
    messages = [{"role": "user", "content": "Describe a person."}]
    answer = client.chat.completions.parse(
        model="default_model", messages=messages, temperature=1, response_format=Person, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_call_that_is_asked_for_is_made(client):
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    choice = ask(client, "Weather in Paris?", tools=[tool], tool_choice="required", max_tokens=100)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    jsonschema.validate(json.loads(call.function.arguments), parameters)


def test_a_choice_is_made(client):
    choice = ask(client, "Is the sky blue?", extra_body={"guided_choice": ["yes", "no"]})
    assert choice.message.content in ("yes", "no")
