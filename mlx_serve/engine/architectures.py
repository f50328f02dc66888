"""Which model types mlx-lm has code for. This is read from its files, because importing it would start MLX.

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
    # A model with a ``model_file`` brings its own code. Without mlx-lm installed, its types are unknown.
    if not isinstance(kind, str) or config.get("model_file") or not known or kind in known:
        return ""
    return f"this mlx-lm has no model type {kind[:80]!r}"


@cache
def _known_types() -> frozenset[str]:
    """The model types with code. Empty: mlx-lm is not installed, or its files are not laid out as expected."""
    found = importlib.util.find_spec("mlx_lm")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    package = Path(found.submodule_search_locations[0])
    modules = {path.stem for path in (package / "models").glob("*.py")}
    return frozenset(modules | _other_names(package / "utils.py"))


def _other_names(utils: Path) -> set[str]:
    """The types that use the module of another type: the keys of mlx-lm's MODEL_REMAPPING."""
    for node in ast.parse(utils.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            return set(ast.literal_eval(node.value))
    return set()
