"""``mlx-serve pull`` against a hub of our own: what it checks, downloads and resumes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_serve.commands import pull as command
from tests.waiting import DEADLINE_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOOD = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "model.safetensors": b"w" * 5000,
    "README.md": b"not wanted",
}


class Hub(ThreadingHTTPServer):
    """A hub with one repository, o/m. ``sizes`` are what it says of its files, where that is not the truth."""

    def __init__(self, files, sizes):
        self.files, self.sizes, self.asked = files, sizes, []
        super().__init__(("127.0.0.1", 0), Handler)

    def size(self, name):
        return self.sizes.get(name, len(self.files[name]))

    def body(self, path):
        """None: there is no such thing."""
        if path.startswith("/api/models/o/m/tree"):
            entries = ((name, self.size(name), etag(body)) for name, body in self.files.items())
            return json.dumps(
                [{"type": "file", "path": n, "size": size, "oid": oid} for n, size, oid in entries]
            ).encode()
        if path.startswith("/api/models/o/m") and self.files:
            siblings = [{"rfilename": name, "size": self.size(name)} for name in self.files]
            return json.dumps({"id": "o/m", "sha": COMMIT, "siblings": siblings}).encode()
        return self.files.get(path.rpartition("/")[2]) if path.startswith("/o/m/resolve/") else None


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        path = self.path.split("?")[0]
        self.server.asked.append((self.command, path))
        body = self.server.body(path)
        self.send_response(404 if body is None else 200)
        self.send_header("ETag", f'"{etag(body or b"")}"')
        self.send_header("X-Repo-Commit", COMMIT)
        name = path.rpartition("/")[2]
        is_head = self.command == "HEAD" and name in self.server.files
        self.send_header("Content-Length", str(self.server.size(name) if is_head else len(body or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    do_HEAD = do_GET  # noqa: N815 - the base class's name


@contextmanager
def hub(files, sizes=None):
    with Hub(files, sizes or {}) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.asked
        finally:
            server.shutdown()
            thread.join()


def etag(body):
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()


@pytest.fixture
def pull(tmp_path):
    def run(endpoint, *args):
        environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-m", "mlx_serve", "pull", "o/m", *args]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False)

    return run


def test_a_model_is_downloaded_without_what_is_not_wanted(pull, tmp_path):
    with hub(GOOD) as (endpoint, asked):
        done = pull(endpoint)
        assert done.returncode == 0, done.stderr
        (folder,) = (tmp_path / "hub/models--o--m/snapshots").iterdir()
        assert done.stdout.strip() == str(folder)
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
        assert "mlx-serve o/m" in done.stderr
        before = asked.count(("GET", f"/o/m/resolve/{COMMIT}/model.safetensors"))
        assert pull(endpoint).returncode == 0
        # It is here already.
        assert asked.count(("GET", f"/o/m/resolve/{COMMIT}/model.safetensors")) == before == 1


@pytest.mark.parametrize(
    ("files", "sizes", "says"),
    [
        ({**GOOD, "config.json": b'{"model_type": "bert"}'}, None, "no model type 'bert'"),
        ({**GOOD, "config.json": b"[]"}, None, "no JSON object"),
        ({"config.json": GOOD["config.json"], "x.gguf": b"1"}, None, "no model for MLX"),
        (GOOD, {"model.safetensors": 10**18}, "are missing, and the disk"),
    ],
)
def test_what_cannot_be_served_is_not_downloaded(pull, files, sizes, says):
    with hub(files, sizes) as (endpoint, asked):
        done = pull(endpoint)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert not any(method == "GET" and "safetensors" in path for method, path in asked)


def test_no_such_repository_is_one_line(pull):
    with hub({}) as (endpoint, _):
        done = pull(endpoint)
    assert done.returncode == 1
    assert done.stderr.startswith("mlx-serve pull: ")
    assert done.stderr.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch):
    def unreachable(*_, **__):
        raise command.LocalEntryNotFoundError("as huggingface_hub does after its retries")

    monkeypatch.setattr(command, "hf_hub_download", unreachable)
    with pytest.raises(command.PullError, match=r"^o/m is not in the cache, and http.* cannot be reached: check"):
        command.pull("o/m")


def test_what_is_no_repository_is_not_asked_for():
    with pytest.raises(command.PullError, match="OWNER/NAME"):
        command.pull("model")


def test_weights_beyond_what_the_gpu_may_use_need_force(monkeypatch, capsys):
    monkeypatch.setattr(command.machine, "memory_bytes", lambda: 64 * 10**9)
    command._check_memory(48 * 10**9, force=False)
    with pytest.raises(command.PullError, match=r"49\.0 GB, and this machine has 64\.0 GB of memory; --force"):
        command._check_memory(49 * 10**9, force=False)
    command._check_memory(49 * 10**9, force=True)
    assert "64.0 GB" in capsys.readouterr().err
