"""Each example runs, against the whole server."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from apikit import DEADLINE_S, serving

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
