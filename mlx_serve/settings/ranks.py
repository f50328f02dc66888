"""Several ranks, as mlx.launch starts them: what they must have in common, and the work of ranks other than 0."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mlx_serve import __version__
from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.catalog import Catalog
from mlx_serve.engine.ranks.follower import Follower
from mlx_serve.engine.ranks.protocol import Store
from mlx_serve.machine import installed
from mlx_serve.settings.config import Config
from mlx_serve.values import StartError

if TYPE_CHECKING:
    from mlx_serve.engine.ranks.group import Ranks

log = logging.getLogger("mlx_serve")

_PACKAGES = ("mlx", "mlx-lm", "llguidance")
# Settings that decide which tokens are computed in which step.
_SETTINGS = (
    *("decode_concurrency", "prompt_concurrency", "prefill_step_size", "prompt_cache_size"),
    *("prompt_cache_bits", "kv_bits", "kv_group_size", "quantized_kv_start", "pipeline"),
)


def join() -> Ranks | None:
    """The ranks, once all are connected; None if this process is alone. Raises StartError."""
    from mlx_serve.engine.ranks import group as ranks

    try:
        return ranks.join()
    except RuntimeError as error:
        raise StartError(f"cannot reach the other ranks: {error}") from error


def check(settings: Config, catalog: Catalog) -> None:
    """Refuses settings that do not work with several ranks. Raises StartError."""
    if settings.draft_model is not None:
        raise StartError("--draft-model does not work with several ranks")
    if settings.prompt_cache_dir is not None:
        # The ranks would find different files, and would start their prefills at different tokens.
        raise StartError("--prompt-cache-dir does not work with several ranks")
    adapted = [entry.name for entry in catalog.models() if entry.adapter_path is not None]
    if adapted:
        raise StartError(f"adapters do not work with several ranks: {adapted[0]} has one")


def greet(ranks: Ranks, settings: Config, device_bytes: int) -> int:
    """Checks that all ranks have equal settings. Returns the smallest memory of a rank, in bytes. Raises StartError."""
    mine = _facts(settings)
    first: dict[str, Any] = mine
    if ranks.rank == 0:
        ranks.post([mine])
    else:
        (first,) = ranks.receive()
    differing = [
        f"{name} {mine.get(name)} (rank 0: {first.get(name)})" for name in mine if mine[name] != first.get(name)
    ]
    rows = ranks.gather([len(differing), device_bytes])
    if differing:
        raise StartError(f"rank {ranks.rank} is not like rank 0: {', '.join(differing)}")
    unlike = [rank for rank, row in enumerate(rows) if row[0]]
    if unlike:
        raise StartError(f"rank {unlike[0]} is not like rank 0: its log says how")
    return min(row[1] for row in rows)


def watch(ranks: Ranks, timeout_s: float) -> None:
    """Ends this process when the ranks have had no common operation for ``timeout_s`` seconds; 0: never."""
    from mlx_serve.engine.ranks.group import watch

    def end() -> None:
        log.critical("the ranks have not met for %g s (--rank-timeout): one of them hangs; ending", timeout_s)
        logging.shutdown()
        os._exit(1)

    if timeout_s:
        watch(ranks, timeout_s, end)


def follow(store: Store, ranks: Ranks) -> None:
    """Follows rank 0 until it ends. Raises EngineLost."""
    log.info("rank %d of %d: following rank 0, which serves", ranks.rank, ranks.size)
    # Runs in a thread of its own, as on rank 0, because the main thread handles signals.
    with ThreadPoolExecutor(1, thread_name_prefix="mlx-worker") as pool:
        error = pool.submit(Follower(store, ranks).run).exception()
    if error is None:
        return
    if not isinstance(error, EngineLost):
        log.error("rank %d failed", ranks.rank, exc_info=error)
    raise EngineLost(f"rank {ranks.rank} ends: {error}") from error


def _facts(settings: Config) -> dict[str, Any]:
    versions = {name: installed(name) for name in _PACKAGES}
    options = {name: getattr(settings, name) for name in _SETTINGS}
    return {"mlx-serve": __version__} | versions | options
