"""What signals, and a log that nobody reads, do to the running command."""

import http.client
import os
import pty
import re
import signal
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from tests.engine.tinymodel import write_model

DEADLINE_S = 60
# Makes the terminal the program's own.
ON_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from mlx_serve.__main__ import run; run()"
# In place of pip: tells its process id, and downloads for ever.
PIP = "import os, signal; open(os.environ['PIP_ID'], 'w').write(str(os.getpid())); signal.pause()"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def command(*args, start=("-m", "mlx_serve"), stdin=subprocess.DEVNULL, **environ):
    """The running command, in a session of its own, without a terminal; it is ended when the block is left."""
    process = subprocess.Popen(
        [sys.executable, *start, *map(str, args)],
        stdin=stdin,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environ},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stderr.close()


def port_of(process):
    for line in process.stderr:
        if "ready:" in line:
            return int(re.search(r"https?://127\.0\.0\.1:(\d+)/v1", line)[1])
    raise AssertionError("it ended before it was ready")


def status_of(port, path="/v1/models"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_a_log_that_nobody_reads_stops_neither_requests_nor_the_end(model):
    with command("--model", model, "--port", 0) as process:
        port = port_of(process)
        # More than any pipe holds; from here on nobody reads.
        for _ in range(300):
            assert status_of(port, "/v1/" + "x" * 1000) == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_sighup_reads_the_certificate_again_and_ends_nothing(model, tmp_path):
    cert, key = make_certificate(tmp_path, "first")
    with command("--model", model, "--port", 0, "--tls-cert", cert, "--tls-key", key) as process:
        port = port_of(process)
        first = ssl.get_server_certificate(("127.0.0.1", port))
        make_certificate(tmp_path, "second")
        process.send_signal(signal.SIGHUP)
        assert any("SIGHUP: keys, certificates and models are read again" in line for line in process.stderr)
        assert ssl.get_server_certificate(("127.0.0.1", port)) != first
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def make_certificate(folder, name):
    cert, key = folder / "cert.pem", folder / "key.pem"
    line = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*line, "-subj", f"/CN={name}", "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_a_terminal_that_is_closed_ends_it_in_order(model):
    ours, theirs = pty.openpty()
    with command("--model", model, "--port", 0, start=("-c", ON_TERMINAL), stdin=theirs) as process:
        os.close(theirs)
        port_of(process)
        os.close(ours)
        assert any("ending: no new requests" in line for line in process.stderr)
        assert process.wait(DEADLINE_S) == 0


def test_sigterm_while_the_demo_model_is_fetched_leaves_nothing(tmp_path):
    (tmp_path / "stub" / "pip").mkdir(parents=True)
    (tmp_path / "stub" / "pip" / "__init__.py").touch()
    (tmp_path / "stub" / "pip" / "__main__.py").write_text(PIP)
    (tmp_path / "id").touch()
    path = os.pathsep.join([str(tmp_path / "stub"), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path, "MLX_SERVE_CACHE": str(tmp_path / "cache"), "PIP_ID": str(tmp_path / "id")}
    with command("--demo", "--port", 0, **environ) as process:
        while not (pip := (tmp_path / "id").read_text()):
            assert process.poll() is None
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert "Traceback" not in process.stderr.read()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pip), 0)
    assert [path.name for path in (tmp_path / "cache").glob("*/*")] == [".lock"]
