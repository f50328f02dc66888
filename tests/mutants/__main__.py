"""Puts one small fault after the other into a copy of the project, and tells which of them no test notices.

python -m tests.mutants mlx_serve/engine/cache/prefixes.py --tests tests/engine/test_prefixes.py
python -m tests.mutants mlx_serve/engine/schedule/scheduler.py --tests tests/pure/test_scheduler.py --most 40 --seed 2
python -m tests.mutants --faults            # the faults by hand, each with the tests that must notice it

Each fault takes a run of the tests until the first one fails. The work tree is not touched.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.changes import mutants
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.faults import FAULTS, faulty

ROOT = Path(__file__).parents[2]
_NOT_COPIED = shutil.ignore_patterns(".*", "node_modules", "__pycache__", "dist", "build", "*.egg-info")
# A fault may make a loop endless: so long the tests may take, and ten times as long as without it.
_PATIENCE_S = 600.0
# Ends the process itself, since a failed test may leave threads behind that never end.
_PYTEST = "import os, sys, pytest; status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"


class Copy:
    """A copy of the project, in which tests run. It stays as it is when somebody changes the work tree."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "project"
        shutil.copytree(ROOT, self.root, ignore=_NOT_COPIED)
        self._timeout_s = _PATIENCE_S

    def check(self, tests: Sequence[str]) -> None:
        """Without a fault the tests pass, or nothing could be learnt from them."""
        started_s = time.monotonic()
        if self._fails(tests):
            sys.exit(f"these tests fail without a fault: {' '.join(tests)}")
        self._timeout_s = max(_PATIENCE_S, 10 * (time.monotonic() - started_s))

    def notices(self, module: str, source: str, tests: Sequence[str]) -> bool:
        """Whether a test fails when a module is another one."""
        path = self.root / module
        right = path.read_text()
        path.write_text(source)
        try:
            return self._fails(tests)
        finally:
            path.write_text(right)

    def _fails(self, tests: Sequence[str]) -> bool:
        command = [sys.executable, "-c", _PYTEST, "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        # A .pyc of the right module must not be taken for the wrong one's.
        environment = os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            run = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, timeout=self._timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        if run.returncode not in (0, 1, 2):
            # 3 to 5: pytest itself failed, or found no test. A signal (below 0) is a fault that was noticed.
            return run.returncode < 0 or sys.exit(run.stdout.decode())
        return run.returncode != 0


def try_module(copy: Copy, module: str, tests: Sequence[str], most: int | None, seed: int) -> Counter[str]:
    """Up to ``most`` mutants of a module, chosen at random; tells of those that live."""
    found = list(mutants((copy.root / module).read_text()))
    if most is not None and most < len(found):
        chosen = set(random.Random(seed).sample(range(len(found)), most))
        found = [mutant for i, mutant in enumerate(found) if i in chosen]
    copy.check(tests)
    counts: Counter[str] = Counter()
    for mutant in found:
        if copy.notices(module, mutant.source, tests):
            counts["killed"] += 1
            continue
        why = EQUIVALENT.get((module, mutant.was, mutant.change), "")
        counts["equivalent" if why else "survived"] += 1
        print(f"{'equivalent' if why else 'SURVIVED'}  {module}:{mutant.line}  {mutant.change}", flush=True)
        if why:
            print(f"            {why}", flush=True)
    return counts


def try_faults(copy: Copy, wanted: str) -> Counter[str]:
    """The faults by hand whose names have ``wanted`` in them."""
    counts: Counter[str] = Counter()
    for fault in FAULTS:
        if wanted in fault.name:
            module, source = faulty(fault, copy.root)
            outcome = "killed" if copy.notices(module, source, fault.tests) else "SURVIVED"
            counts[outcome.lower()] += 1
            print(f"{outcome:8}  {fault.name}  ({module})", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("module", nargs="?", help="a module's path")
    parser.add_argument("--tests", nargs="+", default=[], help="files of tests, and what else pytest takes as a place")
    parser.add_argument("--most", type=int, help="so many of the module's mutants, at random")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument(
        "--faults", nargs="?", const="", metavar="NAME", help="the faults by hand with this in the name"
    )
    options = parser.parse_args()
    if (options.module is None) == (options.faults is None) or bool(options.module) != bool(options.tests):
        parser.error("give a MODULE with --tests, or --faults")
    with tempfile.TemporaryDirectory() as directory:
        copy = Copy(Path(directory))
        if options.faults is not None:
            counts = try_faults(copy, options.faults)
        else:
            counts = try_module(copy, options.module, options.tests, options.most, options.seed)
    print(f"{counts.total()} tried: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
