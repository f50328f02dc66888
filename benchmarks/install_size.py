"""What installing this project adds to mlx-lm: packages and bytes, in two fresh virtual environments.

    python -m benchmarks.install_size [--extra cpu] [--json FILE]

Needs the package index and about a gigabyte of temporary space. The environments hold no pip of their own, so what is
listed and measured is exactly what was installed. The project is built from a copy, for the build leaves files behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.children import ROOT, end_on_sigterm

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "tests", "benchmarks", "docs")


@dataclass(frozen=True, slots=True)
class Environment:
    """``packages`` as name to version; ``size`` in bytes as the disk holds them."""

    requirement: str
    packages: dict[str, str]
    size: int


def install(requirement: str, folder: Path) -> Environment:
    print(f"installing {requirement}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=False)
    pip(folder, "install", "--quiet", requirement)
    listed = json.loads(pip(folder, "list", "--format", "json"))
    return Environment(requirement, {p["name"]: p["version"] for p in listed}, disk_size(folder))


def pip(environment: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    command += ["--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def disk_size(folder: Path) -> int:
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_blocks * 512 for path in paths)


def measure(extra: str) -> tuple[Environment, Environment]:
    suffix = f"[{extra}]" if extra else ""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "mlx-serve")
        shutil.copytree(ROOT, source, ignore=_LEFT_OUT)
        theirs = install(f"mlx-lm{suffix}", Path(scratch, "theirs"))
        ours = install(f"{source}{suffix}", Path(scratch, "ours"))
    return theirs, ours


def report(theirs: Environment, ours: Environment) -> str:
    more = sorted(ours.packages.items() - theirs.packages.items())
    less = sorted(theirs.packages.items() - ours.packages.items())
    return "\n".join(
        [
            "| | packages | MB |",
            "|---|--:|--:|",
            f"| mlx-lm | {len(theirs.packages)} | {theirs.size / 1e6:.0f} |",
            f"| mlx-serve | {len(ours.packages)} | {ours.size / 1e6:.0f} |",
            "",
            f"only with mlx-serve: {_listed(more)}",
            f"only with mlx-lm: {_listed(less)}",
        ]
    )


def _listed(packages: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.install_size", description=__doc__.splitlines()[0])
    default = "cpu" if sys.platform == "linux" else ""
    parser.add_argument("--extra", default=default, help="of mlx-lm and of this project (default on Linux: cpu)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    end_on_sigterm()
    theirs, ours = measure(options.extra)
    print(report(theirs, ours))
    if options.json:
        figures = {"mlx-lm": asdict(theirs), "mlx-serve": asdict(ours)}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
