"""What MLX and mlx-lm find on this machine, as JSON on stdout: ``python -m mlx_serve.probe [MODEL] [FLAGS]``.

A process of its own, for ``mlx-serve doctor``: an MLX that can't start (no Metal, a wrong build) may end the process
that imports it, and to say so is the doctor's work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from mlx_serve import blas
from mlx_serve.engine.errors import is_fault
from mlx_serve.engine.model_directory import check_files, read_object


def main(argv: list[str]) -> int:
    """Print what was found; gives the exit status."""
    wanted = _parser().parse_args(argv)
    library = blas.preload_openblas()
    found: dict[str, Any] = {"openblas": library, **_device()}
    if wanted.model is not None:
        found |= _model(wanted)
    print(json.dumps(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--kv-group-size", type=int, default=64)
    parser.add_argument("--draft-model", type=Path)
    return parser


def _device() -> dict[str, Any]:
    import mlx.core as mx

    # Something computed, or a broken driver would not show.
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    facts = {name: value for name, value in mx.device_info().items() if isinstance(value, str | int)}
    return {"device": "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu", "device_info": facts}


def _model(wanted: argparse.Namespace) -> dict[str, Any]:
    """Whether mlx-lm has code for the model, its tokenizer loads and its caches do what the flags ask; else why not.

    Nothing when its files are not readable: that shows without MLX.
    """
    try:
        check_files(wanted.model)
        config = read_object(wanted.model / "config.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(config.get("model_type"), str):
        return {}
    architecture = _architecture_fault(config)
    return {
        "architecture": architecture,
        "tokenizer": _tokenizer_fault(wanted.model, trust_remote_code=wanted.trust_remote_code),
        "caches": "" if architecture else _caches_fault(wanted),
    }


def _architecture_fault(config: dict[str, Any]) -> str:
    from mlx_lm.utils import MODEL_REMAPPING, _get_classes

    if config.get("model_file"):  # code of the model's own, for --trust-remote-code
        return ""
    try:
        _get_classes(config)
    except Exception:  # noqa: BLE001  a foreign name leads to any module of mlx-lm's, or to none
        kind = config["model_type"]
        module = f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}"
        if not kind.isidentifier() or importlib.util.find_spec(module) is None:
            return f"this mlx-lm has no model type {kind!r}"
        return f"the code for model type {kind!r} cannot be imported"
    return ""


def _tokenizer_fault(path: Path, *, trust_remote_code: bool) -> str:
    from mlx_lm.utils import load_tokenizer

    try:
        load_tokenizer(path, {"trust_remote_code": trust_remote_code})
    except BaseException as error:  # foreign files, foreign code: whatever it raises is the finding
        if not is_fault(error):
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def _caches_fault(wanted: argparse.Namespace) -> str:
    """Whether --kv-bits and --draft-model work with the model: its weights are named and not read."""
    if wanted.kv_bits is None and wanted.draft_model is None:
        return ""
    from mlx_lm.utils import load_model

    from mlx_serve.engine.generate.trial import refusal

    try:
        models = [
            load_model(path, lazy=True, trust_remote_code=wanted.trust_remote_code)[0] if path is not None else None
            for path in (wanted.model, wanted.draft_model)
        ]
    except Exception:  # noqa: BLE001  foreign files: what is wrong with them is a finding of its own
        return ""
    return refusal(*models, kv_bits=wanted.kv_bits, kv_group_size=wanted.kv_group_size, computes=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
