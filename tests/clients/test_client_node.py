"""Node's openai package and Vercel's ai with @ai-sdk/openai-compatible, against the whole server.

`npm ci` in tests/clients/node installs them. Each case of the scripts there is a process that prints one line of JSON.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.clientserver import (
    ARGUMENTS,
    CITY,
    KEY,
    MODEL,
    REPORT,
    WEATHER_CALL,
    crowded,
    saying,
    served,
    weather,
)
from tests.waiting import DEADLINE_S

NODE = shutil.which("node")
FOLDER = Path(__file__).parent / "node"
INSTALLED = NODE is not None and (FOLDER / "node_modules").is_dir()

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not INSTALLED, reason="Node's packages are not installed: npm ci --prefix tests/clients/node"),
]

ANSWER = "user: hi\n"
FOUND = {"city": CITY, "degrees": 12}
TOLD = f"It is {REPORT} in {CITY}."


def started(script: str, case: str, server) -> subprocess.Popen:
    return subprocess.Popen(
        [NODE, f"{script}.mjs", server.base_url, KEY, case],
        cwd=FOLDER,
        env=os.environ | {"AI_SDK_LOG_WARNINGS": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def outcome(script: str, case: str, server):
    with started(script, case, server) as node:
        try:
            line, _ = node.communicate(timeout=2 * DEADLINE_S)
        finally:
            node.kill()
    return json.loads(line)


# openai


def test_openai_create(server):
    answer = outcome("openai", "create", server)
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (ANSWER, "stop")
    assert outcome("openai", "streamHelper", server)["choices"][0]["message"]["content"] == ANSWER


def test_openai_stream(server):
    *chunks, last = outcome("openai", "stream", server)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], len(ANSWER))


def test_openai_completion_and_models(server):
    assert outcome("openai", "completion", server) == "hi"
    assert outcome("openai", "models", server) == [MODEL, MODEL]


def test_openai_reads_the_request_id(server):
    ids = outcome("openai", "headers", server)
    assert ids[0]
    assert ids == [ids[0]] * 3


def test_openai_tools():
    with served(weather) as server:
        assert outcome("openai", "runTools", server) == TOLD
        call = outcome("openai", "streamTools", server)[0]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": CITY})


def test_openai_parse():
    with served(saying(json.dumps(FOUND))) as server:
        assert outcome("openai", "parse", server) == FOUND


def test_openai_errors(server):
    error = outcome("openai", "unknownModel", server)
    fields = (error["status"], error["code"], error["param"], error["type"])
    assert fields == (404, "model_not_found", "model", "invalid_request_error")
    with served(api_keys=("sk-other",)) as keyed:
        error = outcome("openai", "create", keyed)
    assert (error["status"], error["code"]) == (401, "invalid_api_key")


# ai


def test_ai_generate_text(server):
    answer = outcome("ai", "generateText", server)
    assert (answer["text"], answer["finish"]) == (ANSWER, "stop")
    assert (answer["usage"]["inputTokens"], answer["usage"]["outputTokens"]) == (len(ANSWER), len(ANSWER) + 1)
    assert outcome("ai", "completion", server) == "user"


def test_ai_stream_text(server):
    answer = outcome("ai", "streamText", server)
    assert (answer["text"], answer["finish"]) == (ANSWER, "stop")
    assert answer["usage"]["totalTokens"] == 2 * len(ANSWER) + 1


@pytest.mark.parametrize("case", ["generateText", "streamText"])
def test_ai_reasoning(case):
    with served(saying("<think>hm</think>done")) as server:
        answer = outcome("ai", case, server)
    assert (answer["reasoning"], answer["text"]) == ("hm", "done")
    assert answer["usage"]["outputTokenDetails"]["reasoningTokens"] > 0


@pytest.mark.parametrize("case", ["tools", "streamTools"])
def test_ai_tools(case):
    with served(weather) as server:
        answer = outcome("ai", case, server)
    assert (answer["text"], answer["finish"], answer["calls"]) == (TOLD, "stop", [["get_weather", {"city": CITY}]])


def test_ai_two_calls_at_once():
    def script(prompt: str) -> str:
        return "done" if "tool: " in prompt else WEATHER_CALL * 2

    with served(script) as server:
        answer = outcome("ai", "streamTools", server)
    assert (answer["text"], answer["calls"]) == ("done", [["get_weather", {"city": CITY}]] * 2)


def test_ai_required_tool():
    with served(saying(f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}')) as server:
        answer = outcome("ai", "requiredTool", server)
    assert (answer["finish"], answer["calls"]) == ("tool-calls", [["get_weather", {"city": CITY}]])


@pytest.mark.parametrize("case", ["generateObject", "streamObject", "output"])
def test_ai_objects(case):
    with served(saying(json.dumps(FOUND))) as server:
        assert outcome("ai", case, server) == FOUND
        assert server.bodies()[-1]["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize("case", ["unknownModel", "streamUnknownModel"])
def test_ai_errors(server, case):
    error = outcome("ai", case, server)
    assert (error["error"], error["status"]) == ("AI_APICallError", 404)
    # What it shows is our message, so it has read our error object.
    assert "does not exist" in error["message"]


# Both


@pytest.mark.parametrize("script", ["openai", "ai"])
def test_a_retry_finds_a_place(script):
    with crowded() as server, started(script, "retry", server) as node:
        server.refuses()
        server.steps.open()
        answer = json.loads(node.communicate(timeout=2 * DEADLINE_S)[0])
    assert ANSWER in (answer.get("text"), answer.get("choices", [{}])[0].get("message", {}).get("content"))
    assert len(server.requests) == 4


@pytest.mark.parametrize("script", ["openai", "ai"])
def test_an_abort_frees_the_place(script):
    with served(None, held=True) as server, started(script, "abort", server) as node:
        server.steps.let(1)
        assert json.loads(node.stdout.readline()) == "x"
        server.frees_its_place()
        assert node.poll() is None
        node.kill()
