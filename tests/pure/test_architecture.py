"""The layers of the package: who may import whom, and what needs MLX."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mlx_serve.commands import COMMANDS

PACKAGE = Path(__file__).parents[2] / "mlx_serve"
SHARED = {"values", "metrics", "paths", "machine"}
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
NAMES = {module.split("/")[0].removesuffix(".py") for module in MODULES}
# What is not named here, of the modules beside the layers, imports values and paths alone.
MAY_IMPORT = {
    "wire": SHARED | {"wire"},
    "text": SHARED | {"text"},
    "engine": SHARED | {"engine"},
    "api": SHARED | {"api", "wire", "text", "engine"},
    "values": set(),
    "awake": SHARED,
    "cli": NAMES,
    "__main__": {"cli", "commands", "supervise"},
    "supervise": SHARED | {"supervise", "settings", "engine", "wire", "logs", "signals", "__version__"},
    "serve": SHARED | {"settings", "engine", "wire", "api", "progress", "__version__"},
    "reload": {"engine", "serve", "settings", "values"},
    "settings": SHARED | {"settings", "engine", "wire", "api", "demo", "__version__"},
    "demo": {"values", "demo", "paths", "progress", "signals"},
    "probe": {"blas", "engine"},
    # Sub-commands are a part of the command line.
    **{path.removeprefix("mlx_serve.").split(".")[0]: NAMES for path in COMMANDS.values()},
    "client": {"client"},
    "testing": SHARED | {"engine", "wire", "api", "serve"},
}
# The modules and folders of each package, in an order in which each may import only those before it. Every cycle of
# imports contains an import against one of these orders, so this excludes cycles too.
ORDER = {
    "": "values metrics paths machine awake neighbours signals blas logs progress client wire text engine demo api"
    " probe settings supervise serve reload testing commands cli __main__",
    "api": "fields structured errors scope cost body generation_request request_fields shapes response_store"
    " running_jobs token_logprobs generation grammar_messages grammar_child grammars serving routes prompts pipeline"
    " models embeddings status openai responses anthropic endpoints",
    "api/anthropic": "errors blocks schema render endpoints",
    "api/openai": "tools schema render tokenize endpoints",
    "api/responses": "items tools freetext history truncation schema outputs resolved_request render compaction"
    " endpoints",
    "api/status": "prometheus stats page health",
    "client": "events place errors answer connection",
    "commands": "terminal model_list models ps stop chat bench doctor service selftest pull completion",
    "commands/bench": "arrivals workload dataset ceiling offline drafts stats load options report probe progress plot "
    "command",
    "commands/doctor": "finding checks files crashes command",
    "commands/selftest": "sizes server checks run command",
    "commands/service": "files command",
    "demo": "gguf model",
    "engine": "errors token_ids footprint memory architectures model_directory model_places catalog backend load_errors"
    " model_files cache generate ranks models schedule",
    "engine/cache": "kinds checkpoints size rows banks batch_cache lone form file index store writer reader state"
    " loading disk prefix_tree prefixes",
    "engine/generate": "pass_cost prefill_budget prefill side_by_side logprobs prediction drafts draft_length"
    " draft_model row bank rows trial pooling reasoning grammars constraints look_ahead sampling token_choice scoring"
    " embedding sequence sharing prompts in_line batch",
    "engine/models": "wired encoding tokenizer tokenizers weights sharding store",
    "engine/ranks": "group protocol follower leader",
    "engine/schedule": "deadlines heartbeat queue output_lengths charges loaded_models room pressure scheduler watch"
    " worker",
    "settings": "flags file config http models ranks",
    "supervise": "messages policy systemd doorway report child process start parent",
    "text": "symbols tokenizer detokenizer stops marker_tokens guard grammar grammar_task calls splitter"
    " formats templates prompt",
    "text/calls": "values literals shapes readers json_reader xml_reader harmony forced descriptions registry",
    "text/templates": "call_forms probe_words turn_forms tools_as_text forms probe kept rendering",
    "wire": "framing sockets access request_log server_options channel body sse reply connections admission body_budget"
    " request_reader exchange connection doorstep listener server",
}
MAY_IMPORT_MLX = {
    "engine/generate/prompts.py",
    "engine/generate/prefill.py",
    "engine/generate/side_by_side.py",
    "engine/generate/logprobs.py",
    "engine/generate/sampling.py",
    "engine/generate/token_choice.py",
    "engine/cache/size.py",
    "engine/cache/checkpoints.py",
    "engine/cache/rows.py",
    "engine/cache/batch_cache.py",
    "engine/generate/rows.py",
    "engine/generate/bank.py",
    "engine/generate/row.py",
    "engine/cache/prefixes.py",
    "engine/generate/scoring.py",
    "engine/generate/embedding.py",
    "engine/generate/draft_model.py",
    "engine/cache/kinds.py",
    "engine/cache/state.py",
    "engine/cache/loading.py",
    "engine/models/store.py",
    "engine/models/wired.py",
    "engine/models/tokenizers.py",
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


def children(package: str) -> set[str]:
    found = (PACKAGE / package).iterdir()
    return {path.stem for path in found if path.suffix == ".py" or any(path.glob("*.py"))} - {"__init__"}


def imports_inside(package: str, child: str) -> set[str]:
    """What a module or a folder of a package imports of its neighbours."""
    prefix = ".".join(filter(None, ["mlx_serve", *package.split("/")])) + "."
    one = PACKAGE / package / child
    paths = one.rglob("*.py") if one.is_dir() else [one.with_suffix(".py")]
    names = {name.removeprefix(prefix) for path in paths for name in imports(path) if name.startswith(prefix)}
    return {name.split(".")[0] for name in names} & children(package) - {child}


def test_every_package_has_an_order():
    assert set(ORDER) == {
        path.parent.relative_to(PACKAGE).as_posix().strip(".") for path in PACKAGE.rglob("__init__.py")
    }
    assert {package: sorted(order.split()) for package, order in ORDER.items()} == {
        package: sorted(children(package)) for package in ORDER
    }


@pytest.mark.parametrize("package", ORDER)
def test_a_module_imports_only_what_comes_before_it(package):
    order = ORDER[package].split()
    back = {
        (child, name)
        for place, child in enumerate(order)
        for name in imports_inside(package, child) - set(order[:place])
    }
    assert not back


def test_an_import_across_layers_is_found():
    assert imports(PACKAGE / "serve.py") >= {
        "mlx_serve.settings.http",
        "mlx_serve.values.ApiError",
        "mlx_serve.engine.models.store.locate",
    }
    assert imports_inside("", "testing") == {"serve", "api", "wire", "engine", "values"}
    assert imports_inside("engine", "load_errors") == {"backend", "catalog", "errors"}
    assert imports_inside("text", "calls") == {"symbols", "tokenizer"}


@pytest.mark.parametrize("module", MODULES)
def test_only_the_named_modules_import_mlx(module):
    mlx = {name for name in imports(PACKAGE / module) if name.split(".")[0] in ("mlx", "mlx_lm")}
    assert not mlx or module in MAY_IMPORT_MLX


# Of mlx-lm's module of caches, what names no kind: one makes a model's own, one holds tokens.
NAMES_NO_KIND = {"mlx_lm.models.cache.make_prompt_cache", "mlx_lm.models.cache.TokenBuffer"}
KNOW_KINDS = {"engine/cache/kinds.py", "engine/cache/rows.py"}


@pytest.mark.parametrize("module", sorted(MAY_IMPORT_MLX))
def test_only_the_modules_for_that_know_the_kinds_of_caches(module):
    text = (PACKAGE / module).read_text()
    known = {name for name in imports(PACKAGE / module) if name.startswith("mlx_lm.models")} - NAMES_NO_KIND
    words = set(re.findall(r"\b\w*(?:KVCache|ArraysCache|CacheList|RotatingKV)\w*", text))
    words |= set(re.findall(r"\.(?:offset|is_trimmable|trim|merge|start_position|max_size|keys_and_values)\b", text))
    assert bool(known | words) == (module in KNOW_KINDS)


def test_a_public_class_name_is_used_once():
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(names) > 200
    assert not {name for name, n in names.items() if n > 1}


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


def test_a_sampling_parameter_with_a_server_default_is_known_in_four_files():
    # The page on the architecture says which; a default that is the request's own needs no flag.
    knowing = {module for module in MODULES if re.search(r"\bmin_p\b", (PACKAGE / module).read_text())}
    assert knowing == {"values.py", "api/request_fields.py", "engine/generate/sampling.py", "settings/config.py"}
