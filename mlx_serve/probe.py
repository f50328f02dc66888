"""Prints what MLX and mlx-lm find on this machine as JSON: ``python -m mlx_serve.probe [MODEL] [FLAGS]``.

``mlx-serve doctor`` runs it as a process of its own: importing an MLX that cannot start (no Metal, a wrong build) may
end the importing process, and the doctor has to survive to report it.
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
    """Prints the results as one JSON object and returns the exit status."""
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
    parser.add_argument("--prompt-cache-bits", type=int)
    parser.add_argument("--draft-model", type=Path)
    return parser


def _device() -> dict[str, Any]:
    import mlx.core as mx

    # Importing MLX does not show a broken driver. A computation does.
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    facts = {name: value for name, value in mx.device_info().items() if isinstance(value, str | int)}
    return {"device": "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu", "device_info": facts}


def _model(wanted: argparse.Namespace) -> dict[str, Any]:
    """What is wrong with the model: its architecture, its tokenizer, and its caches with the flags. "" means nothing.

    Returns {} if the model's files cannot be read: the doctor finds that without MLX.
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

    if config.get("model_file"):  # the model brings its own code, which --trust-remote-code allows
        return ""
    try:
        _get_classes(config)
    except Exception:  # noqa: BLE001  the config's name may import any of mlx-lm's modules, and each may raise anything
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
    except BaseException as error:  # the model's files and code are untrusted: anything they raise is the result
        if not is_fault(error):
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def _caches_fault(wanted: argparse.Namespace) -> str:
    """Why flags about caches do not work with the model, or "". Creates the weights lazily, without reading."""
    if wanted.kv_bits is None and wanted.prompt_cache_bits is None and wanted.draft_model is None:
        return ""
    from mlx_lm.utils import load_model

    from mlx_serve.engine.cache.kinds import Quantization
    from mlx_serve.engine.generate.trial import refusal

    try:
        models = [
            load_model(path, lazy=True, trust_remote_code=wanted.trust_remote_code)[0] if path is not None else None
            for path in (wanted.model, wanted.draft_model)
        ]
    except Exception:  # noqa: BLE001  the model's files are untrusted; other checks report what is wrong with them
        return ""
    quantization = Quantization(wanted.kv_bits, wanted.kv_group_size) if wanted.kv_bits is not None else None
    model, draft_model = models
    return refusal(model, draft_model, quantization, computes=False, prompt_cache_bits=wanted.prompt_cache_bits)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
