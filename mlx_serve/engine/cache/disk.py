"""KV caches of prompts in files, which survive a restart: the tier below the prefix cache in memory.

Here cache objects become bytes and back, on the worker thread: the writer of store.py never sees an mlx array.
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

# What makes a model's numbers: small files are read, large ones looked at.
_READ = ("config.json", "tokenizer.json", "adapter_config.json")
_LOOKED_AT = (".safetensors", ".npz", ".gguf", ".py")
# Python's and MLX's words for it. The requests that are being decoded must not fail for the sake of a cache.
_NO_MEMORY = (MemoryError, RuntimeError)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file whose first ``n_tokens`` tokens are a prompt's; ``held`` are all of its tokens, ``file`` is its entry."""

    n_tokens: int
    held: NDArray[np.int64]
    file: Entry


class DiskCache:
    """The cache files of one server, for all its models: at most ``max_bytes``, the least recently used go first.

    At most ``max_pending_bytes`` (by default an eighth of the machine's memory) wait to be written; what comes on top
    is not kept. Raises StartError when the directory can't be used, or when another server uses it.
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
        """Wait until all that was saved is written or given up. False when it took longer. Any thread."""
        return self._store.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Take nothing more, wait for what is being written, and let the directory go. Any thread, also twice."""
        self._store.close(timeout_s)


class DiskTier:
    """The files of one model, those of each scope (whose requests may use them) for themselves. Worker thread only."""

    def __init__(self, store: CacheStore, identity: str) -> None:
        self._store = store
        self._identity = identity
        self._refused = False

    def covers(self, tokens: Sequence[int], scope: str = "", *, trimmable: bool) -> int:
        """How many leading tokens the best file could give now."""
        found = self._store.find(self._owner(scope), file.to_key(tokens), trimmable=trimmable)
        return found[1] if found is not None else 0

    def find(self, tokens: Sequence[int], scope: str = "", *, trimmable: bool) -> FoundFile | None:
        """The file that gives most leading tokens of a prompt, by the index alone.

        Of a cache that can be cut back (``trimmable`` says that this model's can, the file that its own still could)
        the longest common prefix counts; of another one all its tokens or none.
        """
        found = self._store.find(self._owner(scope), file.to_key(tokens), trimmable=trimmable)
        return FoundFile(found[1], file.from_key(found[0].key), found[0]) if found is not None else None

    def load(self, found: FoundFile) -> list[Any] | None:
        """That file's whole cache; None when the file is gone by now, or damaged."""
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
        """Have the writer keep ``cache``, which holds exactly ``tokens`` and is evaluated.

        Writes nothing when a file covers it, when the writer is too far behind, or when mlx-lm has a kind of cache here
        that we don't know.
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
    """What tells one model's caches from another's: weights, adapter, tokenizer, mlx-lm's version, and ``extra``.

    Weights count by name, size and time of change: nothing large is read. Raises OSError.
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
