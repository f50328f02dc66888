"""Splitting a model among ranks, with what mlx-lm has for it: the layers (a pipeline) or every layer (tensors)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_serve.engine.model_directory import read_object
from mlx_serve.engine.ranks.group import Ranks

# Each of these is divided by the number of ranks. mlx-lm does not check for a remainder; a bad split may go unnoticed.
_DIVIDED = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How models are split among ``ranks``: by layers with ``pipeline``, else each layer."""

    ranks: Ranks
    pipeline: bool = False

    def apply(self, model: Any, path: Path) -> None:
        """Keep this rank's part of a lazily loaded model. Raises ValueError when mlx-lm can't split it."""
        has_pipeline = hasattr(getattr(model, "model", None), "pipeline")
        has_tensors = hasattr(model, "shard")
        if self.pipeline and not has_pipeline:
            raise ValueError(_unsupported(path, "as a pipeline", "start without --pipeline" if has_tensors else ""))
        if not self.pipeline and not has_tensors:
            raise ValueError(_unsupported(path, "by tensors", "start with --pipeline" if has_pipeline else ""))
        if self.pipeline:
            model.model.pipeline(self.ranks.group)
            return
        _check_divisible(_config(path), self.ranks.size)
        model.shard(self.ranks.group)

    def agree_on(self, path: Path, n_bytes: int, facts: Sequence[bool]) -> tuple[int, list[bool]]:
        """The size of the largest rank's part of a model, and which of the facts are true on all ranks.

        Raises ValueError, on all ranks, when they have different models.
        """
        rows = self.ranks.gather([_config_digest(path), n_bytes, *facts])
        digests, sizes, *columns = zip(*rows, strict=True)
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(f"rank {others[0]} has another config.json for it than rank 0")
        return max(sizes), [all(column) for column in columns]


def _config_digest(path: Path) -> int:
    """A number that tells models of the same name apart: 63 bits of their config.json's digest."""
    digest = hashlib.blake2b((path / "config.json").read_bytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _config(path: Path) -> dict[str, Any]:
    config = read_object(path / "config.json")
    text_config = config.get("text_config")
    return config | text_config if isinstance(text_config, dict) else config


def _check_divisible(config: Mapping[str, Any], n_ranks: int) -> None:
    for key in _DIVIDED:
        n = config.get(key)
        if isinstance(n, int) and n % n_ranks:
            raise ValueError(f"{key} is {n}, which {n_ranks} ranks can't share equally (start with other ranks)")


def _unsupported(path: Path, how: str, instead: str) -> str:
    kind = _config(path).get("model_type")
    return f"mlx-lm can't split models of the type {kind!r} {how}" + (f"; {instead}" if instead else "")
