"""How a model's hidden states become one vector, read from the sentence-transformers files of its directory.

Knows no MLX. Without such files it is the last token's state: in a causal model, only that token sees the whole text.
https://sbert.net/docs/package_reference/sentence_transformer/modules.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_serve.engine.model_directory import read_json
from mlx_serve.values import ApiError

# The steps that may follow the model. Normalizing needs no support, because vectors always have length 1 here.
_STEPS = frozenset({"Transformer", "Pooling", "Normalize"})
_MODES: Mapping[str, Literal["last", "mean"]] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """``last``: the last token's state; ``mean``: the mean of all. ``fault``: why vectors would be wrong, or ""."""

    mode: Literal["last", "mean"] = "last"
    fault: str = ""


LAST_TOKEN = Pooling()


def too_many_dimensions(wanted: int, width: int) -> ApiError:
    """The error for a request of more dimensions than the model's vectors have."""
    return ApiError(
        400, f"Invalid value for 'dimensions': {wanted} is more than this model's {width}.", param="dimensions"
    )


def read_pooling(path: Path) -> Pooling:
    """The pooling of a model directory. A fault in its files affects requests for embeddings only."""
    try:
        return _read(path)
    except (OSError, ValueError, LookupError, TypeError):
        return Pooling(fault="its files do not say how in a way that can be read")


def _read(path: Path) -> Pooling:
    config = _load(path / "config.json", {})
    if _is_bidirectional(config):
        return Pooling(fault="its tokens look at the ones behind them too, which mlx-lm does not let them do")
    folder = "1_Pooling"
    for step in _load(path / "modules.json", []):
        kind = str(step["type"]).rpartition(".")[2]
        if kind not in _STEPS:
            return Pooling(fault=f"a step behind it ('{kind[:64]}') is not served")
        if kind == "Pooling":
            folder = str(step["path"])
    return _pooling(_load(path / folder / "config.json", {}))


def _is_bidirectional(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    settings = {**config, **text} if isinstance(text, dict) else config
    return settings.get("use_bidirectional_attention") in (True, "all") or settings.get("is_causal") is False


def _pooling(config: Mapping[str, Any]) -> Pooling:
    # Newer versions have one field. Older ones have a switch for each mode, and several may be on.
    found = config.get("pooling_mode")
    modes = [found] if found else [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if not modes:
        return LAST_TOKEN
    if len(modes) > 1 or modes[0] not in _MODES:
        return Pooling(fault="its way of pooling is not served: it must be the last token or the mean")
    return Pooling(_MODES[modes[0]])


def _load(path: Path, absent: Any) -> Any:
    """A JSON file of the same type as ``absent``. Raises ValueError, OSError."""
    if not path.is_file():
        return absent
    value = read_json(path)
    if type(value) is not type(absent):
        raise ValueError(f"{path} has another type")
    return value
