"""Signals before anything runs: a process of its own each."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_serve

DEADLINE_S = 60
ROOT = str(Path(mlx_serve.__file__).parents[1])


def process(*args, path=()):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), ROOT])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *args], env=environ, cwd="/", **pipes)


def test_ctrl_c_during_the_imports_leaves_no_traceback(tmp_path):
    # One of the packages that the command imports, which takes its time.
    (tmp_path / "pydantic.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    with process("-m", "mlx_serve", "--help", path=[tmp_path]) as command:
        assert command.stdout.readline() == "importing\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=DEADLINE_S) == ("", "")
        assert command.returncode == -signal.SIGINT


UNWIND = """
import signal, sys
from mlx_serve import signals
if "ignored" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with signals.unwinding():
    try:
        print("ready", flush=True)
        signal.pause()
        signal.pause()
    finally:
        print("tidied up", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_held_is_tidied_up(number):
    with process("-c", UNWIND) as command:
        assert command.stdout.readline() == "ready\n"
        command.send_signal(number)
        assert command.communicate(timeout=DEADLINE_S) == ("tidied up\n", "")
        assert command.returncode == 128 + number


def test_nohup_is_respected():
    with process("-c", UNWIND, "ignored") as command:
        assert command.stdout.readline() == "ready\n"
        command.send_signal(signal.SIGHUP)
        command.send_signal(signal.SIGTERM)
        command.communicate(timeout=DEADLINE_S)
        assert command.returncode == 128 + signal.SIGTERM


def test_standard_descriptors_that_were_closed_are_given_to_nobody():
    code = "from mlx_serve.__main__ import _open_standard_descriptors; _open_standard_descriptors();"
    code += (
        "import os; null = os.stat(os.devnull).st_rdev; os._exit(sum(os.fstat(i).st_rdev == null for i in range(3)))"
    )
    closed = f'exec "{sys.executable}" -c "$0" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, code], check=False).returncode == 3
