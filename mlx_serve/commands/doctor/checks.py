"""The doctor's checks of the machine and the server's flags. They yield findings; none raises or changes anything.

Must not import MLX: a child process (probe.py) reports what MLX finds.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from mlx_serve import __version__, machine
from mlx_serve.commands.doctor.finding import Finding
from mlx_serve.commands.terminal import bytes_text
from mlx_serve.neighbours import Neighbour
from mlx_serve.settings import http
from mlx_serve.settings.config import Config
from mlx_serve.values import ApiError, RawRequest, Response, StartError
from mlx_serve.wire.server_options import Application, Target

# cli raises the server's soft limit to the number of connections plus this.
OTHER_DESCRIPTORS = 256
_PROBE_TIMEOUT_S = 180
_NEEDED = ("mlx", "mlx-lm", "transformers", "huggingface-hub", "pydantic")
# The name of another server on PyPI, with the same module and command.
_NAMESAKE = "mlx-serve"
_EXTRAS = {"llguidance": "structured", "prometheus-client": "metrics"}


@dataclass(frozen=True, slots=True)
class Probe:
    """The output of probe.py, or why there is none."""

    facts: dict[str, Any]
    fault: str = ""
    # Why MLX was not asked.
    skipped: str = ""

    @property
    def memory_bytes(self) -> int | None:
        """The memory for a model: on Metal the recommended working set, elsewhere the machine's memory."""
        limit = self.facts.get("device_info", {}).get("max_recommended_working_set_size")
        return limit if isinstance(limit, int) else machine.memory_bytes()


def probe(model: Path | None, flags: Sequence[str] = ()) -> Probe:
    """Runs probe.py in a child process. ``flags``: the server's flags that concern the model."""
    command = [sys.executable, "-m", "mlx_serve.probe", *([str(model), *flags] if model is not None else [])]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    try:
        done = subprocess.run(  # noqa: S603  this Python, and a path as an argument
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False, env=environ
        )
    except subprocess.TimeoutExpired:
        return Probe({}, f"MLX did not answer within {_PROBE_TIMEOUT_S} s")
    except OSError as error:
        return Probe({}, f"cannot start {sys.executable}: {error.strerror}")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Probe({}, last[0])
    try:
        return Probe(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return Probe({}, "the child process that imports MLX printed no result")


def versions() -> Iterator[Finding]:
    """The versions of Python, mlx-serve, and the required and optional packages."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("ok", "versions", f"mlx-serve {__version__}, Python {platform.python_version()}, {system}")
    if sys.platform == "darwin" and platform.machine() != "arm64":
        advice = "use a native arm64 Python (this one runs under Rosetta, or the Mac has an Intel chip)"
        yield Finding("problem", "versions", f"this Python is for {platform.machine()}; MLX needs arm64", advice)
    yield from _namesake()
    for name in _NEEDED:
        found = machine.installed(name)
        if found is None:
            yield Finding(
                "problem",
                "versions",
                f"{name} is not installed",
                "pip install mlx-serve-http (Linux: mlx-serve-http[cpu])",
            )
        else:
            yield Finding("ok", "versions", f"{name} {found}")
    for name, extra in _EXTRAS.items():
        if (found := machine.installed(name)) is not None:
            yield Finding("ok", "versions", f"{name} {found}")
        else:
            yield Finding(
                "note",
                "versions",
                f"{name} is not installed",
                f"optional; install it with: pip install 'mlx-serve-http[{extra}]'",
            )


def _namesake() -> Iterator[Finding]:
    """PyPI's mlx-serve is another server. Installed beside this one, each overwrites files of the other."""
    try:
        other = distribution(_NAMESAKE)
    except PackageNotFoundError:
        return
    # A checkout's own record of this project under its former name has no such list.
    if other.read_text("RECORD") and any(file.parts[0] == "mlx_serve" for file in other.files or ()):
        text = f"{_NAMESAKE} {other.version} of PyPI is installed: another server, whose files replace this one's"
        advice = f"pip uninstall {_NAMESAKE}; pip install --force-reinstall --no-deps mlx-serve-http"
        yield Finding("problem", "versions", text, advice)


def device(found: Probe) -> Iterator[Finding]:
    """The device that MLX computes on, its memory, and the BLAS if it is a CPU."""
    if found.skipped:
        yield Finding("note", "device", f"MLX was not asked: {found.skipped}", "to check it too, stop the server first")
        return
    if found.fault:
        advice = "try `python -c 'import mlx.core'`; on Linux MLX needs an extra: pip install 'mlx-serve-http[cpu]'"
        yield Finding("problem", "device", f"MLX does not work: {found.fault}", advice)
        return
    info = found.facts.get("device_info", {})
    name = info.get("device_name", "unknown")
    yield Finding("ok", "device", f"MLX computes on the {found.facts.get('device')}: {name}")
    yield from _blas(found) if found.facts.get("device") == "cpu" else _metal(info)
    if total := machine.memory_bytes():
        yield Finding("ok", "memory", f"the machine has {bytes_text(total)}")


def _blas(found: Probe) -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    if library := found.facts.get("openblas"):
        yield Finding("ok", "BLAS", f"OpenBLAS ({library})")
    else:
        text = "MLX uses its reference BLAS, which is at least ten times slower"
        yield Finding("note", "BLAS", text, "install OpenBLAS (on Debian: apt install libopenblas0-pthread)")


def _metal(info: dict[str, Any]) -> Iterator[Finding]:
    limit, total = info.get("max_recommended_working_set_size"), info.get("memory_size")
    if not isinstance(limit, int):
        return
    text = f"the GPU's recommended working set is {bytes_text(limit)}"
    advice = ""
    if isinstance(total, int) and limit < 0.9 * total:
        most = (total - max(8 * 2**30, total // 20)) // 2**20
        advice = f"to give models more memory until the next restart: sudo sysctl iogpu.wired_limit_mb={most}"
    yield Finding("ok", "memory", text, advice)


def metal_users(others: Sequence[Neighbour]) -> Iterator[Finding]:
    """Other programs that may use the GPU."""
    for other in others:
        advice = "run one such program at a time: together they may run out of memory, or make the Mac panic"
        yield Finding("note", "device", f"{other} may use the GPU too", advice)


def memory(settings: Config) -> Iterator[Finding]:
    """Whether the machine has the memory that the flags give to models and caches."""
    total = machine.memory_bytes()
    for name, wanted in (("--memory-bytes", settings.memory_bytes), ("--kv-cache-bytes", settings.kv_cache_bytes)):
        if total and wanted and wanted > total:
            text = f"{name} {bytes_text(wanted)} is more than the machine's {bytes_text(total)}"
            yield Finding("problem", "memory", text, f"lower {name}, or leave it out: the default fits")


def descriptors(settings: Config) -> Iterator[Finding]:
    """Whether --max-connections fits in the limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        text = f"the limit of open files is {hard}; --max-connections {settings.max_connections} needs {wanted}"
        fewer = max(1, hard - OTHER_DESCRIPTORS)
        advice = f"raise the hard limit (ulimit -Hn, LimitNOFILE=), or use --max-connections {fewer}"
        yield Finding("note" if hard > OTHER_DESCRIPTORS else "problem", "open files", text, advice)
    else:
        allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        yield Finding("ok", "open files", f"the server needs {wanted}; the limit is {allowed}")


class _NoApplication:
    """A stand-in for the server: binding a port needs an application, but no request is accepted."""

    def find(self, path: str) -> Target:
        return Target(frozenset(), self._refuse, lambda error, request_id: Response(error.status, b""))

    def _refuse(self, request: RawRequest) -> Response:
        raise ApiError(503, "not serving")


def address(settings: Config) -> Iterator[Finding]:
    """Binds like the server and closes again: checks the port, the socket, the certificate and the keys."""
    application: Application = _NoApplication()
    where = settings.uds or f"{settings.host} port {settings.port}"
    if settings.uds and os.path.exists(settings.uds):
        # Binding would take the socket from a running server.
        yield Finding("note", "address", f"{settings.uds} exists", "if no server is using this socket, remove it")
        return
    try:
        http.bind(application, http.options(settings)).close()
    except StartError as error:
        yield Finding("problem", "address", str(error), _address_advice(settings, error))
        return
    yield Finding("ok", "address", f"{where} is free")
    if not http.is_loopback(settings) and not http.api_keys(settings):
        text = f"everyone who can reach {settings.host} can use this server"
        yield Finding("note", "address", text, "set --api-key-file")


def _address_advice(settings: Config, error: StartError) -> str:
    if not isinstance(error.__cause__, OSError) or "listen" not in str(error):
        return "correct the flag, or let this user read the file that it names"
    if isinstance(error.__cause__, PermissionError):
        return "choose a folder that this user may write to" if settings.uds else "choose a --port above 1023"
    return f"choose another --port, or stop the program that uses it (it is named by: lsof -nP -i :{settings.port})"
