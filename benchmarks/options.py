"""The options that several benchmarks have: small sizes for a quick try, and a file for all figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The command line; with ``--quick`` the sizes are these, unless it names others."""
    sizes = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in quick.items())
    parser.add_argument("--quick", action="store_true", help=f"to see whether it works: {sizes}")
    parser.add_argument("--json", type=Path, help="file for all figures")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**quick)
    return parser.parse_args()
