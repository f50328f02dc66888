"""Whether what `make dist` built is whole, and works where nothing else is installed: `check_dist.py DIST EXTRAS`.

Installs the wheel into an environment of its own, from the package index or pip's cache, and does what a reader of the
README does first: version, help, doctor, the demo server, a chat request, the page. Ends with status 1 and the reason
at the first fault.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
DEADLINE_S = 300
QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}


def main(dist: Path, extras: str) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_contents(wheel, sdist)
    with TemporaryDirectory() as folder:
        bin_folder = install(wheel, extras, Path(folder) / "venv")
        # Away from the checkout, which would be imported in place of what is installed.
        use(bin_folder, Path(folder))
    for built in (wheel, sdist):
        print(f"{built.name}: {built.stat().st_size / 1000:.0f} kB, good")


def check_contents(wheel: Path, sdist: Path) -> None:
    """The package's files, the licence and what describes them; no tests, no caches."""
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mlx_serve").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    with zipfile.ZipFile(wheel) as archive:
        expect(wheel.name, re.sub(r"(?m)^[^/]+\.dist-info/", "", "\n".join(archive.namelist())), package | about)
    about = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    expect(sdist.name, "\n".join(name for name in names if ".egg-info/" not in name), package | about)


def expect(archive: str, names: str, wanted: set[str]) -> None:
    found = set(names.splitlines())
    if found != wanted:
        sys.exit(f"{archive}: missing {sorted(wanted - found)}, too many {sorted(found - wanted)}")


def install(wheel: Path, extras: str, folder: Path) -> Path:
    """The folder of the commands of a new environment with the wheel."""
    venv.create(folder, with_pip=True)
    package = f"{wheel}[{extras}]" if extras else str(wheel)
    run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package], folder)
    return folder / "bin"


def run(line: list[Path | str], folder: Path) -> str:
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, line))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def use(bin_folder: Path, folder: Path) -> None:
    """The commands, and a server."""
    command = bin_folder / "mlx-serve"
    installed = run([bin_folder / "python", "-c", "import mlx_serve; print(mlx_serve.__version__)"], folder)
    if run([command, "--version"], folder) != f"mlx-serve {installed}":
        sys.exit("--version says another version than the package")
    if "--model" not in run([command, "--help"], folder):
        sys.exit("--help does not list the flags")
    run([command, "doctor", "--demo", "--port", "0"], folder)
    line = [command, "--demo", "--port", "0"]
    with subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        try:
            ask(address(server))
        finally:
            server.terminate()
            server.communicate(timeout=DEADLINE_S)
    if server.returncode:
        sys.exit(f"the server ended with status {server.returncode}")


def address(server: subprocess.Popen[str]) -> str:
    """Where it listens, as its log says once the model is loaded."""
    lines = []
    for line in server.stderr or ():
        lines.append(line)
        if ready := re.search(r"ready: (http://[\d.]+:\d+)/v1", line):
            return ready[1]
    sys.exit(f"the server ended before it was ready:\n{''.join(lines)}")


def ask(url: str) -> None:
    body = json.dumps(QUESTION).encode()
    request = Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=DEADLINE_S) as reply:
        if not json.load(reply)["choices"][0]["message"]["content"]:
            sys.exit("an answer without text")
    # The page, and what it loads.
    with urlopen(f"{url}/", timeout=DEADLINE_S) as reply:
        page = reply.read().decode()
    names = re.findall(r'(?:src|href)="([\w./]+\.\w+)"', page)
    if not names:
        sys.exit(f"not the page at /: {page[:200]}")
    seen = set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        with urlopen(f"{url}/{name}", timeout=DEADLINE_S) as reply:
            names += [f"ui/{module}" for module in re.findall(r'from "\./([\w.]+)"', reply.read().decode())]


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else "")
