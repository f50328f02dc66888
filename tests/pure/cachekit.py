"""Cache files without MLX: arrays that say of which tokens they are."""

import numpy as np

from mlx_serve.engine.cache import file as cache_file
from mlx_serve.engine.cache import index as cache_index
from mlx_serve.engine.cache import writer as cache_writer
from mlx_serve.engine.cache.file import Header, file_size, head, to_key
from mlx_serve.engine.cache.form import dumped, parsed
from mlx_serve.engine.cache.reader import CacheReader, Read
from mlx_serve.engine.cache.store import CacheStore
from mlx_serve.engine.cache.writer import CacheWriter, Save

LONG_S = 60
GROWS = {"kind": "K", "grows": {"dtype": "uint32", "shape": [2, 30]}, "settings": []}
WHOLE, STATEFUL = parsed(dumped([GROWS])), parsed(dumped([GROWS, {"kind": "L"}]))
STATES = [{"dtype": "int64", "shape": [1]}]


def small_blocks(monkeypatch):
    """Full blocks of two tokens."""
    monkeypatch.setattr(cache_file, "BLOCK_KEY_BYTES", 2 * cache_file.TOKEN_BYTES)
    for module in (cache_index, cache_writer):
        monkeypatch.setattr(module, "BLOCK_KEY_BYTES", 2 * cache_file.TOKEN_BYTES)
    monkeypatch.setattr(cache_writer, "BLOCK_TOKENS", 2)


def size_of(n_tokens, form=WHOLE):
    """The bytes of a file of so many tokens."""
    states = STATES if form is STATEFUL and n_tokens < 2 else []
    header = Header("m", form, "0" * 64, to_key([0] * n_tokens), states)
    return file_size(head(header), header.n_bytes)


def save_of(tokens, form=WHOLE, owner="m"):
    """A save of these tokens."""
    growing = np.zeros((2, len(tokens) + 5, 30), np.uint32)
    growing[:, : len(tokens)] = np.asarray(tokens, np.uint32)[None, :, None]
    last = [np.array([sum(tokens)])] if form is STATEFUL else []
    views = [growing[:, : len(tokens)]]
    n_bytes = views[0].nbytes + sum(array.nbytes for array in last)
    return Save(owner, form, to_key(tokens), views, STATES if last else [], last, n_bytes, n_bytes)


class Disk:
    """A store with its threads."""

    def __init__(self, directory, max_bytes, max_pending_bytes=None, clock=None):
        self.store = CacheStore(directory, max_bytes)
        self.writer = CacheWriter(self.store, max_pending_bytes)
        self.reader = CacheReader(self.store, *([clock] if clock else []))

    def save(self, tokens, *args, flush=True, **kwargs):
        taken = self.writer.put(save_of(tokens, *args, **kwargs))
        assert not flush or self.writer.flush(LONG_S)
        return taken

    def covers(self, tokens, owner="m"):
        found = self.store.find(owner, to_key(tokens))
        return found.n_tokens if found else 0

    def read(self, tokens, owner="m"):
        """Begin to read; None: there is nothing."""
        path = self.store.find(owner, to_key(tokens))
        if path is None:
            return None
        target = np.zeros((2, path.n_tokens, 30), np.uint32)
        read = Read(path, [target])
        self.reader.put(read)
        return read

    def load(self, tokens, owner="m"):
        """How many tokens came; all of them are checked."""
        read = self.read(tokens, owner)
        if read is None:
            return 0
        self.reader.wait(read, LONG_S)
        assert read.state == "done"
        check(read, tokens)
        return read.n_tokens

    def counts(self, *names):
        counts = self.store.counts()
        return [counts[name] for name in names] if len(names) > 1 else counts[names[0]]

    def close(self, timeout_s=LONG_S):
        closed = [self.writer.close(timeout_s), self.reader.close(timeout_s)]
        if all(closed):
            self.store.close()


def check(read, tokens):
    """What was read is of these tokens."""
    n = read.n_tokens
    assert (read.targets[0][:, :n] == np.asarray(tokens[:n], np.uint32)[None, :, None]).all()
    if read.states and n == read.path.n_tokens:
        assert read.last[0].tolist() == [sum(tokens[:n])]
