"""The layers of the package: who may import whom, and what needs MLX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mlx_serve"
SHARED = {"core", "metrics"}
MAY_IMPORT = {
    "wire": SHARED | {"wire"},
    "text": SHARED | {"text"},
    "engine": SHARED | {"engine"},
    "api": SHARED | {"api", "wire", "text", "engine"},
    "core": set(),
}
MAY_IMPORT_MLX = {
    "engine/mlx_backend.py",
    "engine/sampling.py",
    "engine/choice.py",
    "engine/kv_size.py",
    "engine/prefix_cache.py",
    "engine/scoring.py",
    "engine/single_backend.py",
    "engine/cache_state.py",
    "engine/disk_cache.py",
    "engine/models.py",
    "engine/ranks.py",
    "engine/weights.py",
    "demo.py",
    "gguf.py",
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_a_layer_imports_only_what_it_may(module):
    own = {name.split(".")[1] for name in imports(PACKAGE / module) if name.startswith("mlx_serve.")}
    layer = module.split("/")[0].removesuffix(".py")
    assert own <= MAY_IMPORT.get(layer, own)


@pytest.mark.parametrize("module", MODULES)
def test_only_the_named_modules_import_mlx(module):
    mlx = {name for name in imports(PACKAGE / module) if name.split(".")[0] in ("mlx", "mlx_lm")}
    assert not mlx or module in MAY_IMPORT_MLX


def test_everything_else_imports_with_mlx_absent():
    code = "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
    code += "import mlx_serve.cli, mlx_serve.api.endpoints, mlx_serve.engine.worker, mlx_serve.engine.fake_backend\n"
    code += "import mlx_serve.engine.cache_store\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
