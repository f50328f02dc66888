"""The layers of the package: who may import whom, and what needs MLX."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_serve.cli import COMMANDS

PACKAGE = Path(__file__).parents[2] / "mlx_serve"
SHARED = {"values", "metrics", "paths"}
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
NAMES = {module.split("/")[0].removesuffix(".py") for module in MODULES}
# What is not named here, of the modules beside the layers, imports values and paths alone.
MAY_IMPORT = {
    "wire": SHARED | {"wire"},
    "text": SHARED | {"text"},
    "engine": SHARED | {"engine"},
    "api": SHARED | {"api", "wire", "text", "engine"},
    "values": set(),
    "cli": NAMES,
    "__main__": {"cli"},
    "settings": SHARED | {"settings", "engine", "wire", "api", "demo", "__version__"},
    "demo": {"values", "demo", "paths", "progress", "signals"},
    "probe": {"blas", "engine"},
    # Sub-commands are a part of the command line.
    **{path.removeprefix("mlx_serve.").split(".")[0]: NAMES for path in COMMANDS.values()},
    "client": {"client"},
    "testing": SHARED | {"engine"},
}
MAY_IMPORT_MLX = {
    "engine/generate/batch.py",
    "engine/generate/prefill.py",
    "engine/generate/sampling.py",
    "engine/generate/token_choice.py",
    "engine/cache/size.py",
    "engine/cache/prefixes.py",
    "engine/generate/scoring.py",
    "engine/generate/embedding.py",
    "engine/generate/single.py",
    "engine/cache/kinds.py",
    "engine/cache/state.py",
    "engine/cache/disk.py",
    "engine/models/store.py",
    "commands/bench/offline.py",
    "probe.py",
    "engine/ranks/group.py",
    "engine/generate/trial.py",
    "engine/models/weights.py",
    "demo/model.py",
    "demo/gguf.py",
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the package's own modules are imported by their whole names"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_layer_imports_only_what_it_may(module):
    own = {name.split(".")[1] for name in imports(PACKAGE / module) if name.startswith("mlx_serve.")} & NAMES
    layer = module.split("/")[0].removesuffix(".py")
    assert own <= MAY_IMPORT.get(layer, {"values", "paths"})


def test_an_import_across_layers_is_found():
    assert imports(PACKAGE / "cli.py") >= {
        "mlx_serve.settings.config",
        "mlx_serve.values.ApiError",
        "mlx_serve.engine.models.store.locate",
    }


@pytest.mark.parametrize("module", MODULES)
def test_only_the_named_modules_import_mlx(module):
    mlx = {name for name in imports(PACKAGE / module) if name.split(".")[0] in ("mlx", "mlx_lm")}
    assert not mlx or module in MAY_IMPORT_MLX


def test_the_page_on_the_architecture_names_modules_that_are_there():
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    table = page.partition("## What is where")[2].partition("\n## ")[0]
    named = {Path(name).stem for name in re.findall(r"`([a-z_./]+)`", table)} - {"echo"}
    there = {path.stem for path in PACKAGE.rglob("*")}
    assert len(named) > 60
    assert not named - there


def test_everything_else_imports_with_mlx_absent():
    code = "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
    code += "import mlx_serve.cli, mlx_serve.api.endpoints, mlx_serve.engine.schedule.worker, mlx_serve.testing\n"
    code += "import mlx_serve.engine.cache.store\n"
    code += "import mlx_serve.commands.bench.command\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
