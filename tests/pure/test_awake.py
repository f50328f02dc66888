"""When the program that keeps a Mac awake runs. In its place a program that says when it begins and ends."""

import sys
import threading

import pytest

from mlx_serve.awake import KeepAwake
from mlx_serve.metrics import Metrics, Trace
from tests.waiting import until

PROGRAM = """
import signal, sys
path = sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
try:
    open(path, "a").write("begin ")
    signal.pause()
finally:
    open(path, "a").write("end ")
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "said").touch()
    return tmp_path / "said"


def keep_awake(file, **options):
    return KeepAwake(command=[sys.executable, "-c", PROGRAM, str(file)], **options)


def says(file, text):
    until(lambda: file.read_text().strip() == text, f"{text!r}, not {file.read_text()!r}")


def test_it_runs_while_there_are_requests(file):
    awake = keep_awake(file, linger_s=0)
    one, two = (Trace(Metrics(), "m") for _ in range(2))
    awake.entered(one, [])
    says(file, "begin")
    awake.entered(two, [])
    awake.left(one)
    awake.left(two)
    says(file, "begin end")
    awake.entered(one, [])
    says(file, "begin end begin")
    awake.close()
    says(file, "begin end begin end")


def test_the_next_request_finds_it_running(file):
    awake = keep_awake(file, linger_s=60)
    for _ in range(3):
        trace = Trace(Metrics(), "m")
        awake.entered(trace, [])
        says(file, "begin")
        awake.left(trace)
    awake.close()
    says(file, "begin end")


def test_always_needs_no_request(file):
    awake = keep_awake(file, always=True)
    says(file, "begin")
    awake.close()
    says(file, "begin end")


def test_without_the_program_the_server_goes_on(caplog):
    awake = KeepAwake(command=["/does/not/exist"])
    awake.entered(Trace(Metrics(), "m"), [])
    until(lambda: "cannot keep the Mac awake" in caplog.text, "the warning")
    awake.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "keep-awake"]
