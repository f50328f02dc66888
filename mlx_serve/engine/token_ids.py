"""Checks token ids. MLX does not check indices: an id outside the vocabulary ends the process."""

from __future__ import annotations

from collections.abc import Collection

from mlx_serve.values import ApiError


def check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 that names ``param`` when an id is no token of the model."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise ApiError(
            400, f"'{param}' has a token id outside of the model's vocabulary (0 to {vocab_size - 1}).", param=param
        )
