"""What MLX and mlx-lm find on this machine, as one JSON object on stdout: ``python -m mlx_serve.probe [MODEL]``.

A process of its own, for ``mlx-serve doctor``: an MLX that can't start (no Metal, a wrong build) may end the process
that imports it, and to say so is the doctor's work.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from mlx_serve import blas
from mlx_serve.engine.model_dir import check_files, read_object


def main(argv: list[str]) -> int:
    """Print what was found; gives the exit status."""
    library = blas.preload_openblas()
    found: dict[str, Any] = {"openblas": library, **_device()}
    if argv:
        found |= _model(Path(argv[0]), trust_remote_code="--trust-remote-code" in argv[1:])
    print(json.dumps(found))
    return 0


def _device() -> dict[str, Any]:
    import mlx.core as mx

    # Something computed, or a broken driver would not show.
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    facts = {name: value for name, value in mx.device_info().items() if isinstance(value, str | int)}
    return {"device": "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu", "device_info": facts}


def _model(path: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Whether mlx-lm has code for the model, and whether its tokenizer loads; faults as one line, or "".

    Nothing when its files are not readable: that shows without MLX.
    """
    try:
        check_files(path)
        config = read_object(path / "config.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(config.get("model_type"), str):
        return {}
    return {
        "architecture": _architecture_fault(config),
        "tokenizer": _tokenizer_fault(path, trust_remote_code=trust_remote_code),
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
    except Exception as error:  # noqa: BLE001  foreign files, foreign code: whatever it raises is the finding
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
