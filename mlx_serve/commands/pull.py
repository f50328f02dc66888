"""``mlx-serve pull``: downloads a model of the Hugging Face hub into its cache, from which servers serve it.

Before anything large is downloaded it checks that mlx-lm has code for the model, and that disk and memory can hold it.
A download that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from mlx_serve import machine, progress
from mlx_serve.client.connection import one_line
from mlx_serve.commands.terminal import bytes_text
from mlx_serve.engine.architectures import architecture_fault
from mlx_serve.engine.model_places import HUB_FILES
from mlx_serve.paths import is_repository

# The part of a machine's memory that a GPU may use, by Apple's default: more weights than that cannot run.
_GPU_SHARE = 0.75
_OF_HUB = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError)


class PullError(Exception):
    """The model is not downloaded. The text is one line for the user."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status: 1 if the model is not here at the end."""
    given = parser().parse_args(argv)
    try:
        path = pull(given.model, given.revision, force=given.force)
    except PullError as error:
        print(f"mlx-serve pull: {error}", file=sys.stderr)
        return 1
    print(path)
    print(f"serve it with: mlx-serve {given.model}\nremove it with: hf cache rm model/{given.model}", file=sys.stderr)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    top = argparse.ArgumentParser(
        prog="mlx-serve pull",
        description="Download a model of the Hugging Face hub, if mlx-lm can load it and it fits on this machine.",
    )
    top.add_argument("model", help="repository, as OWNER/NAME")
    top.add_argument("--revision", help="branch, tag or commit (default: main)")
    top.add_argument("--force", action="store_true", help="download it even if it does not fit into memory")
    return top


def pull(name: str, revision: str | None = None, *, force: bool = False) -> Path:
    """The directory of the downloaded model. Raises PullError."""
    if not is_repository(name):
        raise PullError(f"{name!r} is no repository of the hub: name one as OWNER/NAME")
    try:
        _check_type(name, revision)
        files = snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, dry_run=True)
        n_weights = sum(file.file_size or 0 for file in files if file.filename.endswith(".safetensors"))
        if not n_weights:
            raise PullError(f"{name}: it has no model*.safetensors, so it is no model for MLX")
        n_missing = sum(file.file_size or 0 for file in files if file.will_download)
        _check_disk(n_missing)
        _check_memory(n_weights, force=force)
        print(f"{name}: {bytes_text(n_weights)} of weights, {bytes_text(n_missing)} to download", file=sys.stderr)
        # On a terminal, huggingface_hub draws its own bars.
        bars = None if sys.stderr.isatty() else progress.hub_bars(progress.logged(_log()), f"fetching {name}")
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, tqdm_class=bars))
    except LocalEntryNotFoundError:  # nothing came of the hub, and the cache has nothing
        advice = "check the network, HTTPS_PROXY, HF_ENDPOINT and HF_HUB_OFFLINE"
        raise PullError(f"{name} is not in the cache, and {constants.ENDPOINT} cannot be reached: {advice}") from None
    except _OF_HUB as error:
        raise PullError(f"the hub says: {one_line(str(error))}") from None


def _log() -> logging.Logger:
    log = logging.getLogger("mlx_serve.pull")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    return log


def _check_type(name: str, revision: str | None) -> None:
    try:
        config = json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PullError(f"{name}: its config.json is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise PullError(f"{name}: its config.json is no JSON object")
    if fault := architecture_fault(config):
        raise PullError(f"{name}: {fault}")


def _check_disk(n_bytes: int) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    if n_bytes > (free := shutil.disk_usage(cache).free):
        raise PullError(f"{bytes_text(n_bytes)} are missing, and the disk of {cache} has {bytes_text(free)} left")


def _check_memory(n_weights: int, *, force: bool) -> None:
    total = machine.memory_bytes()
    if total is None or n_weights <= _GPU_SHARE * total:
        return
    text = f"its weights take {bytes_text(n_weights)}, and this machine has {bytes_text(total)} of memory"
    if not force:
        raise PullError(f"{text}; --force downloads it all the same")
    print(f"mlx-serve pull: {text}", file=sys.stderr)
