"""Each dialect is a folder that can be taken off: without it the others still import and answer."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "mlx_serve"
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "openai": {
        "/v1/chat/completions": {"messages": HI},
        "/v1/completions": {"prompt": "hi"},
        "/tokenize": {"content": "hi"},
    },
    "responses": {"/v1/responses": {"input": "hi"}, "/v1/responses/input_tokens": {"input": "hi"}},
    "anthropic": {"/v1/messages": {"messages": HI, "max_tokens": 5}, "/v1/messages/count_tokens": {"messages": HI}},
}
# Its paths are asked for in a process that has the copy, and no other package of ours.
ASK = """
import json, sys
from tests.sockets.apikit import serving
import mlx_serve
with serving() as server:
    paths = {path: server.request("POST", path, body)[0] for path, body in json.loads(sys.argv[1]).items()}
    paths["/v1/embeddings"] = server.request("POST", "/v1/embeddings", {"input": "hi"})[0]
    paths["/v1/models"] = server.request("GET", "/v1/models")[0]
    paths["/health"] = server.request("GET", "/health")[0]
print(json.dumps([mlx_serve.__file__, paths]))
"""


def statuses(package: Path) -> dict:
    asked = json.dumps({path: body for paths in BODIES.values() for path, body in paths.items()})
    environment = {"PYTHONPATH": f"{package.parent}:{PACKAGE.parent}", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", ASK, asked], capture_output=True, text=True, check=True, cwd=HERE, env=environment
    )
    found, paths = json.loads(done.stdout)
    assert Path(found).parent == package
    return paths


@pytest.mark.parametrize("dialect", BODIES)
def test_without_one_dialect_the_others_answer(tmp_path, dialect):
    copy = tmp_path / "mlx_serve"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", dialect))
    assert not list(copy.rglob(f"{dialect}/"))
    paths = statuses(copy)
    assert {path for path, status in paths.items() if status == 404} == set(BODIES[dialect])
    assert {status for path, status in paths.items() if path not in BODIES[dialect]} == {200}


def test_the_dialects_are_all_of_them():
    assert set(BODIES) == {path.parent.name for path in PACKAGE.glob("api/*/endpoints.py")}
