"""KV caches of prompts in files, which survive a restart. This is the tier below the prefix cache in memory.

    store a prefix:  MLX thread: views of the arrays  -->  writer.py: the blocks that no file has yet
    use a prefix:    MLX thread: blank arrays  -->  reader.py: fill and check them  -->  MLX thread: a cache of them

Reading, checking and writing happen on threads of their own. The MLX thread looks into the index, makes views and makes
cache objects. A prompt whose cache is being read waits; all others go on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_serve.engine.cache import file, state
from mlx_serve.engine.cache.index import Path as BlockPath
from mlx_serve.engine.cache.loading import NO_MEMORY, Loading
from mlx_serve.engine.cache.reader import CacheReader
from mlx_serve.engine.cache.store import CacheStore
from mlx_serve.engine.cache.writer import CacheWriter, Save

log = logging.getLogger(__name__)

# The files that determine a model's numbers. Small ones are hashed; of large ones, only name, size and time count.
_READ = ("config.json", "tokenizer.json", "adapter_config.json")
_LOOKED_AT = (".safetensors", ".npz", ".gguf", ".py")
# Before the speed of prefilling is known, it is taken for this: tokens per second.
_PREFILL_SPEED = 1000.0


class DiskCache:
    """The cache files of one server and all its models: at most ``max_bytes``, evicted least recently used first.

    At most ``max_pending_bytes`` (by default an eighth of the machine's memory) wait to be written; caches beyond that
    are not saved. Raises StartError when the directory can't be used, or when another server uses it.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        *,
        max_pending_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = CacheStore(directory, max_bytes)
        self._writer = CacheWriter(self._store, max_pending_bytes)
        self._reader = CacheReader(self._store, clock)
        self._clock = clock

    def tier(self, identity: str) -> DiskTier:
        """The files of one model; ``identity`` is that of model_identity."""
        return DiskTier(self._store, self._writer, self._reader, identity, self._clock)

    def counts(self) -> dict[str, int]:
        """What has happened so far, and ``files``, ``bytes`` and ``pending_bytes`` of now. Any thread."""
        return self._store.counts() | {"pending_bytes": self._writer.pending_bytes}

    def flush(self, timeout_s: float) -> bool:
        """Wait until every saved cache is written or dropped. False when it took longer. Any thread."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Accept nothing more, wait for pending writes, and unlock the directory. Any thread; may be called twice."""
        has_written, has_read = self._writer.close(timeout_s), self._reader.close(timeout_s)
        # While a thread hangs, the directory stays locked. The lock ends with the process.
        if has_written and has_read:
            self._store.close()


class DiskTier:
    """The files of one model. Each scope (whose requests may use them) has separate files. Worker thread only."""

    def __init__(
        self, store: CacheStore, writer: CacheWriter, reader: CacheReader, identity: str, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._writer = writer
        self._reader = reader
        self._identity = identity
        self._clock = clock
        self._refused = False

    @property
    def unkept_bytes(self) -> int:
        """The bytes of dropped caches that stay in memory until they are written. Any thread."""
        return self._writer.unkept_bytes(self._identity)

    def find(self, tokens: Sequence[int] | NDArray[np.int64], scope: str = "") -> BlockPath | None:
        """The files that cover most leading tokens of a prompt, found in the index alone."""
        return self._store.find(self._owner(scope), file.to_key(tokens))

    def holds(self, tokens: Sequence[int] | NDArray[np.int64], scope: str = "") -> bool:
        """Whether files hold the cache of exactly these tokens."""
        found = self.find(tokens, scope)
        return found is not None and found.n_tokens == len(tokens)

    def load(
        self,
        ids: NDArray[np.int64],
        scope: str,
        keep: Callable[[list[Any], int], None],
        *,
        n_held: int,
        least: int,
        prefill_s: Callable[[int], float],
    ) -> Loading | None:
        """Begin to read the files that cover most leading tokens of a prompt, of which ``n_held`` are in memory.

        None if they cover less than ``least`` more, or if the disk is likely to take longer for these than
        ``prefill_s`` says (0: not known yet). ``keep`` gets the cache and the number of its tokens, the prompt's first
        ones.
        """
        found = self.find(ids, scope)
        if found is None or found.n_tokens < n_held + least:
            return None
        n_more = found.n_tokens - n_held
        within_s = prefill_s(n_more) or n_more / _PREFILL_SPEED
        if not self._reader.is_worth(found.n_bytes, within_s):
            return None
        key = b"".join(block.key for block in found.blocks)

        def check(cache: list[Any], n_tokens: int) -> None:
            # The reader has checked that the files hold these tokens. Any others would silently give wrong answers.
            if key[: n_tokens * file.TOKEN_BYTES] == file.to_key(ids[:n_tokens]):
                keep(cache, n_tokens)

        return Loading(self._store, self._reader, found, check, self._clock, within_s)

    def save(self, tokens: Sequence[int] | NDArray[np.int64], scope: str, cache: list[Any]) -> Save | None:
        """Queue what no file has of ``cache`` for writing. It holds exactly ``tokens`` and is evaluated.

        None: nothing is written, because files cover it already, too much is pending, or the cache has a type of
        mlx-lm's that kinds.py does not know. Call ``release`` with the result when the cache is dropped.
        """
        if self._refused or not len(tokens):
            return None
        try:
            parts = state.take_apart(cache, len(tokens))
            key, owner = file.to_key(tokens), self._owner(scope)
            *_, last = blocks = self._store.full(owner, parts.form, key)
            rest = key[last.end * file.TOKEN_BYTES :]
            # This raises ValueError for a header that is too long.
            file.head(file.Header(owner, parts.form, last.name, b"", parts.states))
        except (state.UnknownStateError, ValueError) as error:
            log.warning("prompt cache: this model's caches are not kept on disk: they hold %s", error)
            self._refused = True
            return None
        if len(rest) < file.BLOCK_KEY_BYTES and self._store.holds_last(last, rest):
            self._store.use(blocks)
            return None
        n_bytes = len(rest) // file.TOKEN_BYTES * parts.form.token_bytes + sum(a.nbytes for a in parts.last)
        try:
            save = Save(
                owner,
                parts.form,
                key,
                state.views(parts.growing),
                parts.states,
                state.views(parts.last),
                n_bytes,
                parts.n_bytes,
            )
        except NO_MEMORY as error:
            log.warning("prompt cache: a cache of %d bytes is not saved: %r", n_bytes, error)
            return None
        return save if self._writer.put(save) else None

    def release(self, save: Save) -> None:
        """The cache of a save is dropped. Until it is written, its memory counts as the disk cache's."""
        self._writer.release(save)

    def _owner(self, scope: str) -> str:
        return f"{self._identity} {scope}" if scope else self._identity


def model_identity(path: Path, *extra: str, adapter: Path | None = None, draft_model: Path | None = None) -> str:
    """A digest that identifies a model's caches: weights, adapter, draft model, tokenizer, mlx-lm's version, ``extra``.

    Of weights, only name, size and modification time count, so nothing large is read. Raises OSError.
    """
    folders = [_files(folder) if folder is not None else None for folder in (path, adapter, draft_model)]
    parts = [version("mlx-lm"), *folders, extra]
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
