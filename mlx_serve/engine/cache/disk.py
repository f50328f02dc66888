"""KV caches of prompts in files, which survive a restart. This is the tier below the prefix cache in memory.

The worker thread converts cache objects to bytes and back here. The writer thread of store.py never sees an mlx array.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_serve.engine.cache import file, state
from mlx_serve.engine.cache.file import DamagedFileError, Header
from mlx_serve.engine.cache.index import Entry
from mlx_serve.engine.cache.kinds import can_trim
from mlx_serve.engine.cache.store import CacheStore

log = logging.getLogger(__name__)

# The files that determine a model's numbers. Small ones are hashed; of large ones, only name, size and time count.
_READ = ("config.json", "tokenizer.json", "adapter_config.json")
_LOOKED_AT = (".safetensors", ".npz", ".gguf", ".py")
# How Python and MLX report a lack of memory. Saving a cache must not fail the requests that are being decoded.
_NO_MEMORY = (MemoryError, RuntimeError)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file whose first ``n_tokens`` tokens match a prompt. ``held``: all its tokens; ``file``: its index entry."""

    n_tokens: int
    held: NDArray[np.int64]
    file: Entry


class DiskCache:
    """The cache files of one server and all its models: at most ``max_bytes``, evicted least recently used first.

    At most ``max_pending_bytes`` (by default an eighth of the machine's memory) wait to be written; caches beyond that
    are not saved. Raises StartError when the directory can't be used, or when another server uses it.
    """

    def __init__(self, directory: Path, max_bytes: int, *, max_pending_bytes: int | None = None) -> None:
        self._store = CacheStore(directory, max_bytes, max_pending_bytes=max_pending_bytes)

    def tier(self, identity: str) -> DiskTier:
        """The files of one model; ``identity`` is that of model_identity."""
        return DiskTier(self._store, identity)

    def counts(self) -> dict[str, int]:
        """What has happened so far, and ``files``, ``bytes`` and ``pending_bytes`` of now. Any thread."""
        return self._store.counts()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every saved cache is written or dropped. False when it took longer. Any thread."""
        return self._store.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Accept nothing more, wait for pending writes, and unlock the directory. Any thread; may be called twice."""
        self._store.close(timeout_s)


class DiskTier:
    """The files of one model. Each scope (whose requests may use them) has separate files. Worker thread only."""

    def __init__(self, store: CacheStore, identity: str) -> None:
        self._store = store
        self._identity = identity
        self._refused = False

    def covers(self, tokens: Sequence[int], scope: str = "", *, trimmable: bool) -> int:
        """How many leading tokens of a prompt the best file covers now."""
        found = self._store.find(self._owner(scope), file.to_key(tokens), trimmable=trimmable)
        return found[1] if found is not None else 0

    def find(self, tokens: Sequence[int], scope: str = "", *, trimmable: bool) -> FoundFile | None:
        """The file that covers most leading tokens of a prompt, found in the index alone.

        A cache that can be trimmed covers the longest common prefix. Any other cache covers all its tokens or none. A
        cache can be trimmed if the model's caches can (``trimmable``) and the file says that its own still could.
        """
        found = self._store.find(self._owner(scope), file.to_key(tokens), trimmable=trimmable)
        return FoundFile(found[1], file.from_key(found[0].key), found[0]) if found is not None else None

    def load(self, found: FoundFile) -> list[Any] | None:
        """The whole cache of a file; None when the file is gone or damaged."""
        entry = found.file

        def decode(header: Header, take: Callable[[int], bytearray]) -> list[Any]:
            if (header.identity, header.key) != (entry.identity, entry.key):
                raise DamagedFileError("it holds another prompt")
            return state.put_together(header.layout, take)

        try:
            return self._store.read(entry, decode)
        except _NO_MEMORY as error:
            log.warning("prompt cache: a cache of %d bytes is not loaded: %r", entry.size, error)
            return None

    def save(self, tokens: Sequence[int], scope: str, cache: list[Any]) -> None:
        """Queue ``cache`` for writing. It holds exactly ``tokens`` and is evaluated.

        Nothing is written when a file already covers it, when too much is pending, or when the cache has a type of
        mlx-lm's that kinds.py does not know.
        """
        if self._refused or not tokens:
            return
        key, owner = file.to_key(tokens), self._owner(scope)
        trimmable = can_trim(cache)
        if self._store.covers(self._store.entry(owner, key, trimmable=trimmable)):
            return
        try:
            layout, arrays = state.take_apart(cache)
            n_bytes = sum(array.nbytes for array in arrays)
            head = file.head(Header(owner, key, trimmable, layout, n_bytes))
        except (state.UnknownStateError, ValueError) as error:
            log.warning("prompt cache: this model's caches are not kept on disk: they hold %s", error)
            self._refused = True
            return
        size = file.file_size(head, n_bytes)
        entry = self._store.entry(owner, key, trimmable=trimmable, size=size)
        if not self._store.admit(entry):
            return
        try:
            copies = state.to_bytes(arrays)
        except _NO_MEMORY as error:
            log.warning("prompt cache: a cache of %d bytes is not saved: %r", size, error)
        else:
            self._store.put(entry, head, copies)

    def _owner(self, scope: str) -> str:
        return f"{self._identity} {scope}" if scope else self._identity


def model_identity(path: Path, *extra: str, adapter: Path | None = None) -> str:
    """A digest that identifies a model's caches: weights, adapter, tokenizer, mlx-lm's version, and ``extra``.

    Of weights, only name, size and modification time count, so nothing large is read. Raises OSError.
    """
    parts = [version("mlx-lm"), _files(path), _files(adapter) if adapter is not None else None, extra]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _files(directory: Path) -> list[tuple[str | int, ...]]:
    found: list[tuple[str | int, ...]] = []
    for path in sorted(directory.iterdir()):
        if path.name in _READ:
            found.append((path.name, hashlib.sha256(path.read_bytes()).hexdigest()))
        elif path.suffix in _LOOKED_AT:
            about = path.stat()
            found.append((path.name, about.st_size, about.st_mtime_ns))
    return found
