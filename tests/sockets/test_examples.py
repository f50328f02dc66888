"""Each example runs, against the whole server, or is read as the program that it is for would read it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.sockets.apikit import serving
from tests.waiting import DEADLINE_S

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def environ():
    with serving() as server:
        yield {**os.environ, "BASE_URL": f"http://127.0.0.1:{server.port}/v1"}


def run(command, environ):
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(environ):
    out = run([EXAMPLES / "curl.sh"], environ)
    assert out.count('"object":"chat.completion"') == 3
    assert out.rstrip().endswith("data: [DONE]")


def test_the_openai_client(environ):
    assert run([sys.executable, EXAMPLES / "openai_client.py"], environ).count("capital of France") == 2


def test_a_chunked_upload_by_hand(environ):
    assert run([sys.executable, EXAMPLES / "chunked_upload.py"], environ).startswith("200 user: Say hello.")


@pytest.mark.parametrize(
    ("file", "package"),
    [("langchain_client.py", "langchain_openai"), ("llamaindex_client.py", "llama_index.llms.openai_like")],
)
def test_a_framework(environ, file, package):
    if importlib.util.find_spec(package.split(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    assert run([sys.executable, EXAMPLES / file], environ).count("capital of France") == 2


def test_every_example_is_in_the_list():
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    files = {path for path in EXAMPLES.rglob("*") if path.is_file() and path.name != "README.md"}
    missing = {str(path.relative_to(EXAMPLES)) for path in files} - listed
    assert not {path for path in missing if str(Path(path).parent) not in listed}
    assert all((EXAMPLES / target).exists() for target in listed if not target.startswith(("http", "../")))


# Read, where the program is not there to run


def read_yaml(name):
    return yaml.safe_load((EXAMPLES / name).read_text())


def test_litellm_s_configuration():
    config = read_yaml("litellm/config.yaml")
    (model,) = config["model_list"]
    assert model["litellm_params"]["model"] == "openai/default_model"
    assert model["litellm_params"]["api_base"].endswith("/v1")
    # Secrets come from the environment.
    assert config["general_settings"]["master_key"] == "os.environ/LITELLM_MASTER_KEY"


def test_aider_s_files_name_each_other_and_one_model():
    config = read_yaml("aider/.aider.conf.yml")
    (settings,) = read_yaml(f"aider/{config['model-settings-file']}")
    metadata = json.loads((EXAMPLES / "aider" / config["model-metadata-file"]).read_text())
    assert config["model"] == settings["name"]
    assert [config["model"]] == list(metadata)


def test_continue_s_configuration():
    (model,) = read_yaml("continue/config.yaml")["models"]
    assert (model["provider"], model["apiBase"]) == ("openai", "http://127.0.0.1:8080/v1")


def test_open_webui_s_environment_is_what_a_shell_takes():
    file = EXAMPLES / "open-webui" / "open-webui.env"
    script = f"set -eu; set -a; . {file}; env"
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    shown = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert shown["OPENAI_API_BASE_URL"] == "http://127.0.0.1:8080/v1"
    assert shown["OPENAI_API_KEY"]


def test_prometheus_s_configuration():
    (job,) = read_yaml("prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8080"]}]
