"""Which model types mlx-lm has code for, found in its files: importing it would start MLX.

Touches the file system, never MLX.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def architecture_fault(config: Mapping[str, Any]) -> str:
    """Why mlx-lm cannot load a model with this config.json, in one line; "" when it may."""
    kind, known = config.get("model_type"), _known_types()
    # A model_file is code of the model's own, and which types an mlx-lm that is not installed has is not known.
    if not isinstance(kind, str) or config.get("model_file") or not known or kind in known:
        return ""
    return f"this mlx-lm has no model type {kind[:80]!r}"


@cache
def _known_types() -> frozenset[str]:
    """Empty: mlx-lm is not there, or is not laid out as expected."""
    found = importlib.util.find_spec("mlx_lm")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    package = Path(found.submodule_search_locations[0])
    modules = {path.stem for path in (package / "models").glob("*.py")}
    return frozenset(modules | _other_names(package / "utils.py"))


def _other_names(utils: Path) -> set[str]:
    """The types that share another one's module: the keys of mlx-lm's MODEL_REMAPPING."""
    for node in ast.parse(utils.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            return set(ast.literal_eval(node.value))
    return set()
