"""Random grammars against the whole server, in a process of its own: it lives, and answers each with 200 or 400.

Any number by hand, with what came of them: GRAMMARS=10000 SEED=1 python -m pytest -s tests/engine/test_grammar_fuzz.py
"""

import http.client
import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.engine.grammarfuzz import requests
from tests.engine.tinymodel import write_model

pytest.importorskip("llguidance")

# No request may take so long, however busy the machine is.
HANGS_S = 240
N = int(os.environ.get("GRAMMARS", "60"))
SEED = int(os.environ.get("SEED", "1"))


@contextmanager
def server(folder):
    """A server of a tiny model: its process and its port. The log goes to a file, for a full pipe would stop it."""
    path = folder / "log"
    with open(path, "w") as log:
        command = [sys.executable, "-m", "mlx_serve", "--model", str(write_model(folder / "tiny")), "--port", "0"]
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        while not (found := re.search(r"ready:.*http://127\.0\.0\.1:(\d+)/v1", path.read_text())):
            assert process.poll() is None, path.read_text()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait(HANGS_S)


def ask(port, fields):
    """The status, or what became of the connection."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "temperature": 1, "seed": 1, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return repr(error), ""
    finally:
        connection.close()


def test_no_grammar_ends_or_hangs_the_server(tmp_path):
    asked = requests(SEED, N)
    with server(tmp_path) as (process, port), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda fields: ask(port, fields), asked))
        assert process.poll() is None
        assert ask(port, {"guided_choice": ["yes"]})[0] == 200
    counts = Counter(status for status, _ in answers)
    print(f"\n{N} grammars, seed {SEED}: {dict(counts)}")
    bad = [(fields, answer) for fields, answer in zip(asked, answers, strict=True) if answer[0] not in (200, 400)]
    assert not bad, [(json.dumps(fields)[:300], answer) for fields, answer in bad[:5]]
    assert counts[200] > N / 10
    assert counts[400] > N / 10
