"""litellm's proxy server, as a router in front of the whole server: its own process, which OpenAI's package asks."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.clientserver import CITY, CONTEXT_TOKENS, EXTRA, KEY, MODEL, REPORT, WEATHER_TOOL, served, weather
from tests.waiting import DEADLINE_S

openai = pytest.importorskip("openai", reason=f"openai is {EXTRA}")
pytest.importorskip("fastapi", reason=f"litellm[proxy] is {EXTRA}")
LITELLM = shutil.which("litellm", path=str(Path(sys.executable).parent))

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(LITELLM is None, reason=f"litellm[proxy] is {EXTRA}"),
]

# It refuses to start with one that can be guessed.
PROXY_KEY = f"sk-{secrets.token_hex(32)}"
# Its imports alone take many seconds.
START_S = 90
ROUTED = "routed"
LOST = "lost"
KEYLESS = "keyless"


def script(prompt: str) -> str:
    return weather(prompt) if "weather" in prompt else prompt


@contextmanager
def proxy(server, folder: Path):
    """The proxy's base URL, once it answers."""
    port = _free_port()
    config = folder / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps(_config(server)))
    command = [LITELLM, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, env=_environment(), stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            _wait_for(f"http://127.0.0.1:{port}/health/liveliness", process, folder / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            finally:
                process.kill()


def _config(server) -> dict:
    def route(name: str, model: str, key: str) -> dict:
        params = {"model": f"openai/{model}", "api_base": server.base_url, "api_key": key, "max_retries": 0}
        return {"model_name": name, "litellm_params": params}

    return {
        "model_list": [route(ROUTED, MODEL, KEY), route(LOST, "none", KEY), route(KEYLESS, MODEL, "sk-other")],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
        # A refusal is to come back, and not to take the one server off the list.
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "general_settings": {"master_key": PROXY_KEY},
    }


def _environment() -> dict[str, str]:
    # Nothing of the developer's own: no keys, no database.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    quiet = {name: os.environ[name] for name in ("DO_NOT_TRACK", "NO_PROXY", "LITELLM_LOCAL_MODEL_COST_MAP")}
    return kept | quiet | {"LITELLM_TELEMETRY": "False", "PYTHONUNBUFFERED": "1"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(START_S * 4):
        try:
            with opener.open(url, timeout=DEADLINE_S):
                return
        except OSError:
            # Also the pause between two tries.
            try:
                process.wait(0.25)
            except subprocess.TimeoutExpired:
                continue
            break
    raise AssertionError(f"litellm's proxy does not answer:\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def server():
    with served(script, api_keys=(KEY,)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    with proxy(server, tmp_path_factory.mktemp("litellm")) as base_url:
        with openai.OpenAI(base_url=base_url, api_key=PROXY_KEY, max_retries=0, timeout=DEADLINE_S) as client:
            yield client


def ask(client, content: str = "hi", **fields):
    fields = {"model": ROUTED, "messages": [{"role": "user", "content": content}]} | fields
    return client.chat.completions.create(**fields)


def test_chat(client, server):
    answer = ask(client, "né 🐉")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("user: né 🐉\n", "stop")
    assert answer.usage.prompt_tokens == len("user: né 🐉\n".encode())
    assert server.requests[-1].headers["authorization"] == f"Bearer {KEY}"


def test_stream(client):
    chunks = list(ask(client, "né 🐉", stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "user: né 🐉\n"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.prompt_tokens == len("user: né 🐉\n".encode())


@pytest.mark.parametrize("stream", [False, True])
def test_tools_loop(client, stream):
    def step(messages):
        if not stream:
            return ask(client, messages=messages, tools=[WEATHER_TOOL]).choices[0]
        with client.chat.completions.stream(model=ROUTED, messages=messages, tools=[WEATHER_TOOL]) as events:
            return events.get_final_completion().choices[0]

    messages = [{"role": "user", "content": "What is the weather?"}]
    choice = step(messages)
    call = choice.message.tool_calls[0]
    assert (choice.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"city": CITY})
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": REPORT},
    ]
    assert step(messages).message.content == f"It is {REPORT}."


def test_models(client):
    assert {model.id for model in client.models.list()} == {ROUTED, LOST, KEYLESS}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": LOST}, 404, "does not exist"),
        ({"content": "x" * CONTEXT_TOKENS}, 400, "maximum context length"),
        ({"temperature": 3}, 400, "temperature"),
        ({"model": KEYLESS}, 401, "API key"),
    ],
)
def test_errors_pass_through(client, fields, status, words, stream):
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        ask(client, **fields, stream=stream)
    assert caught.value.status_code == status


# The last one: the engine does not come back.
def test_a_server_that_ends(client, server):
    server.stop_engine()
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client)
    assert caught.value.status_code == 503
