"""``mlx-serve doctor``: checks whether a server with these flags would work here, and says how to fix problems.

Accepts the server's flags. Changes nothing and serves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import CacheNotFound, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from mlx_serve import neighbours
from mlx_serve.client.connection import one_line
from mlx_serve.commands import model_list
from mlx_serve.commands.doctor import checks, crashes, files
from mlx_serve.commands.doctor.checks import Probe
from mlx_serve.commands.doctor.finding import Finding, as_objects, as_text
from mlx_serve.commands.terminal import bytes_text
from mlx_serve.demo import model as demo
from mlx_serve.engine.catalog import NotAModelError
from mlx_serve.engine.model_files import look_into
from mlx_serve.neighbours import Neighbour
from mlx_serve.paths import expanded, is_repository, why_missing
from mlx_serve.settings import config
from mlx_serve.settings import models as model_options
from mlx_serve.settings.config import Config
from mlx_serve.values import StartError

# If the weights take more than this share of the memory, little is left for KV caches and computation.
_TIGHT = 0.9
_HUB_TIMEOUT_S = 5


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if a problem would stop the server."""
    given, flags = parser().parse_known_args(argv)
    try:
        findings = list(examine(config.from_args(flags)))
    except StartError as error:
        findings = [Finding("problem", "flags", str(error))]
    n_problems = sum(finding.level == "problem" for finding in findings)
    if given.json:
        print(json.dumps(as_objects(findings), indent=2))
    else:
        print(as_text(findings))
        verdict = (
            "No problem would stop the server." if not n_problems else f"Problems that stop the server: {n_problems}."
        )
        print(f"\n{verdict}")
    return 1 if n_problems else 0


def parser() -> argparse.ArgumentParser:
    """The command's own flags; all others are the server's."""
    top = argparse.ArgumentParser(
        prog="mlx-serve doctor",
        usage="mlx-serve doctor [--json] [FLAGS OF THE SERVER]",
        description="Check whether a server with these flags would work here. Exits with 1 if a problem would stop it.",
        epilog="Example: mlx-serve doctor --model ~/models/Qwen3-4B-4bit --port 8080",
        allow_abbrev=False,
    )
    top.add_argument("--json", action="store_true", help="print JSON")
    return top


def examine(settings: Config) -> Iterator[Finding]:
    """Yields all findings, those about the machine first."""
    yield from checks.versions()
    models, about_models = _locate(settings)
    first = models[0] if models else None
    others = neighbours.running() if sys.platform == "darwin" else []
    probe = _ask(others, first, [*_flags(settings), *_draft_flags(settings)])
    yield from checks.device(probe)
    yield from checks.metal_users(others)
    yield from checks.memory(settings)
    yield from checks.descriptors(settings)
    yield from checks.address(settings)
    yield from files.secret_files(settings)
    yield from files.prompt_cache(settings)
    yield from files.log_file(os.environ)
    yield from crashes.findings(os.environ)
    yield from about_models
    for model in models:
        about = probe if model is first else _ask(others, model, _flags(settings))
        yield from examine_model(model, about, settings)
    yield from _places(settings)


def _ask(others: Sequence[Neighbour], model: Path | None, flags: Sequence[str]) -> Probe:
    """What MLX finds. While a server runs, it is not asked: a second process on Metal could hurt that server."""
    server = next((other for other in others if other.name == neighbours.SERVER), None)
    return checks.probe(model, flags) if server is None else Probe({}, skipped=f"{server} is running")


def _flags(settings: Config) -> list[str]:
    """The flags that the server applies to every model."""
    flags = ["--trust-remote-code"] if settings.trust_remote_code else []
    if settings.kv_bits is not None:
        flags += ["--kv-bits", str(settings.kv_bits), "--kv-group-size", str(settings.kv_group_size)]
    if settings.prompt_cache_bits is not None:
        flags += ["--prompt-cache-bits", str(settings.prompt_cache_bits)]
    return flags


def _draft_flags(settings: Config) -> list[str]:
    """The flags of the draft model, which the server uses with the first model."""
    place = _place(settings.draft_model) if settings.draft_model is not None else None
    return ["--draft-model", str(place)] if isinstance(place, Path) else []


def _locate(settings: Config) -> tuple[list[Path], list[Finding]]:
    """The directories of the models that the flags name, and findings about models that are not on this machine."""
    if settings.demo:
        return [], list(_demo())
    named = [model_options.place(spec) for spec in model_options.named(settings)]
    places = [_place(text) for text in (*named, settings.draft_model) if text]
    there = [place for place in places if isinstance(place, Path)]
    findings = [place for place in places if isinstance(place, Finding)]
    return there, findings or list(_names(settings))


def _names(settings: Config) -> Iterator[Finding]:
    """Whether the server would accept the names, aliases and adapters."""
    if not all(os.path.isdir(expanded(root)) for root in settings.model_dir):
        return  # _places reports it
    try:
        model_options.catalog(settings, _local)
    except NotAModelError:  # examine_model reports what is wrong with its files
        return
    except StartError as error:
        yield Finding("problem", "models", str(error), "correct the flag or the --config file")


def _local(name: str) -> Path:
    place = _place(name)
    if isinstance(place, Path):
        return place
    raise StartError(place.text)


def _place(name: str) -> Path | Finding:
    path = expanded(name)
    if os.path.exists(path):
        return path
    if not is_repository(name):
        advice = "name an existing directory that this user can read, or a repository as OWNER/NAME"
        return Finding("problem", "model", f"there is no directory {name!r}{why_missing(path)}", advice)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, CacheNotFound, OSError):
        return _not_here(name)


def _not_here(name: str) -> Finding:
    """A repository that the server would download at its start: whether it can."""
    text, advice = f"{name} is not in the hub cache", f"download it: mlx-serve pull {name}"
    for fault in files.unwritable(Path(HF_HUB_CACHE), "model", "set HF_HOME to another folder"):
        return replace(fault, text=f"{text}, and {fault.text}")
    if _is_offline():
        return Finding("problem", "model", f"{text}, and HF_HUB_OFFLINE is set", advice)
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        return Finding("problem", "model", f"{text}, and the hub says: {one_line(str(error))}", "correct its name")
    except Exception as error:  # noqa: BLE001 - the hub's client is of a library whose name changes with its version
        reason = f"{text}, and the hub cannot be reached: {one_line(str(error))}"
        return Finding("problem", "model", reason, f"{advice}, with a network")
    return Finding("note", "model", f"{text}: the server downloads it when it starts", advice)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _demo() -> Iterator[Finding]:
    try:
        folder = demo.default_cache_dir(os.environ, sys.platform)
    except demo.DemoError as error:
        yield Finding("problem", "model", str(error))
        return
    if any(folder.glob("demo-*/*/manifest.json")):
        yield Finding("ok", "model", f"the demo model is in {folder}")
    else:
        yield Finding("ok", "model", "the server will download the demo model from PyPI (93 MB)")
        yield from files.unwritable(folder, "model", "set MLX_SERVE_CACHE to another folder")


def examine_model(path: Path, probe: Probe, settings: Config) -> Iterator[Finding]:
    """Checks one model directory: its files, whether mlx-lm can load it, and whether it fits in memory."""
    files = look_into(path)
    facts = [files.model_type, files.quantization, f"{bytes_text(files.weight_bytes)} of weights"]
    if files.context_tokens:
        facts.append(f"context {files.context_tokens} tokens")
    yield Finding("ok", "model", f"{path}: {', '.join(fact for fact in facts if fact)}")
    for fault in files.faults:
        if fault.fatal or not settings.chat_template:
            yield Finding("problem" if fault.fatal else "note", "model", fault.text, fault.advice)
    unknown = probe.facts.get("architecture")
    if unknown and unknown not in (fault.text for fault in files.faults):
        advice = "update mlx-lm within the range that mlx-serve allows, or use another model"
        yield Finding("problem", "model", unknown, advice)
    if unreadable := probe.facts.get("tokenizer"):
        advice = "download the tokenizer's files again; if it contains code that you trust, use --trust-remote-code"
        yield Finding("problem", "model", f"its tokenizer does not load: {unreadable}", advice)
    if refused := probe.facts.get("caches"):
        yield Finding("problem", "model", refused, "remove the flag, or use another model")
    yield from fit(files.weight_bytes, probe, settings.memory_bytes)


def fit(weight_bytes: int, probe: Probe, memory_bytes: int | None = None) -> Iterator[Finding]:
    """Whether the weights fit in --memory-bytes, or by default in the memory of the device."""
    most = memory_bytes or probe.memory_bytes
    if not most or not weight_bytes:
        return
    share = f"the weights take {bytes_text(weight_bytes)} of {bytes_text(most)}"
    if weight_bytes > most:
        yield Finding(
            "problem",
            "memory",
            share,
            "use a smaller or more quantized model; see --memory-bytes, and on a Mac iogpu.wired_limit_mb",
        )
    elif weight_bytes > _TIGHT * most:
        yield Finding(
            "note",
            "memory",
            f"{share}, so little memory remains for KV caches",
            "few requests will run at a time; --max-model-len limits the memory of each",
        )
    else:
        yield Finding("ok", "memory", share)


def _places(settings: Config) -> Iterator[Finding]:
    """Lists the model directories and the hub's cache. Each model there that cannot be served gets one note."""
    for root in settings.model_dir:
        if not os.path.isdir(expanded(root)):
            text = f"model directory not found: {root}{why_missing(expanded(root))}"
            yield Finding("problem", "models", text, "correct --model-dir or $MLX_MODEL_PATH")
    models = [model for model in model_list.models(settings) if model.source != "--model"]
    for model in models:
        fault = next((fault for fault in model.files.faults if fault.fatal), None)
        if fault is not None:
            yield Finding("note", "models", f"{model.name} cannot be served: {fault.text}", fault.advice)
    n_good = sum(model.files.servable for model in models)
    size = bytes_text(sum(model.files.weight_bytes for model in models))
    hub = [f"the hub cache ({HF_HUB_CACHE})"] if model_options.uses_hub_cache(settings) else []
    if where := ", ".join([*settings.model_dir, *hub]):
        text = f"servable models: {n_good}, {size} in {where}"
        is_missing = not all(os.path.isdir(expanded(root)) for root in settings.model_dir)
        if n_good or is_missing or settings.demo or settings.model or settings.models:
            yield Finding("ok", "models", text)
        else:
            advice = "download one (mlx-serve pull OWNER/NAME), name one with --model, or try --demo"
            yield Finding("problem", "models", f"there is no model to serve: {text}", advice)
