"""A block of a prompt's KV cache as a file: its tokens, and the bytes of its arrays.

    magic and sizes | header, JSON | tokens | SHA-256 of what came | arrays | SHA-256 of all that came

The first digest covers the header and the tokens, so the server can index files without reading arrays. Numbers are
little-endian. Tokens are big-endian, so that they sort as bytes. Knows no MLX.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlx_serve.engine.cache.form import Form, arrays_of, dumped, parsed

TOKEN_BYTES = 4
# The tokens of a full block. A prompt's cache is its full blocks and a last, shorter one.
BLOCK_TOKENS = 256
BLOCK_KEY_BYTES = BLOCK_TOKENS * TOKEN_BYTES
# The last digit is the format's version. Files of other versions count as damaged: version 1 could store a cache under
# another prompt's tokens, version 2 had all of a prompt's cache in one file.
_MAGIC = b"MLXKV\0\0\3"
_SIZES = struct.Struct("<8sIIQ")
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_HEADER_BYTES = 4 * 2**20
# Cache files are never links. Whoever can write in the directory could place a link to files that this process must
# not read or write.
_OURS = os.O_NOFOLLOW | os.O_CLOEXEC
# Files are read and written in pieces of this size, so that the thread can stop soon.
_PIECE_BYTES = 8 * 2**20


class DamagedFileError(Exception):
    """The file is not a cache file, or not a complete one. The text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header.

    ``parent``: the name of the block before. ``key``: the tokens of this block. ``states``: the layers that can't be
    cut back, as they are at its end (state.py describes them); a full block has none.
    """

    owner: str
    form: Form
    parent: str
    key: bytes
    states: list[Any]

    @property
    def n_bytes(self) -> int:
        """The bytes of the arrays."""
        n_tokens = len(self.key) // TOKEN_BYTES
        return n_tokens * self.form.token_bytes + sum(array.n_bytes for array in arrays_of(self.states))


def to_key(tokens: Sequence[int] | NDArray[np.int64]) -> bytes:
    """Token ids as bytes with the same order and prefixes. Raises OverflowError below 0 and above 32 bits."""
    ids = np.asarray(tokens, dtype=np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= 2 ** (8 * TOKEN_BYTES)):
        raise OverflowError("a token id does not fit into 32 bits")
    return ids.astype(">u4").tobytes()


def root_name(owner: str, form: str) -> str:
    """The name that stands for the parent of a prompt's first block."""
    digest = hashlib.sha256(f"{len(owner)} {owner} {form}".encode(errors="surrogatepass"))
    return digest.hexdigest()


def name(parent: str, key: bytes) -> str:
    """The name of a block's file: a digest of all tokens up to its end, the model and the form."""
    return hashlib.sha256(parent.encode() + key).hexdigest()


def head(header: Header) -> bytes:
    """The part of a file before its arrays. Raises ValueError when the header is too long."""
    about = {"owner": header.owner, "parent": header.parent, "states": header.states}
    # The form is JSON already.
    text = f'{{"form":{header.form.text},{dumped(about)[1:]}'.encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is over {_MAX_HEADER_BYTES}")
    start = _SIZES.pack(_MAGIC, len(text), len(header.key), header.n_bytes) + text + header.key
    return start + hashlib.sha256(start).digest()


def file_size(head: bytes, n_bytes: int) -> int:
    """The size of a file with this ``head`` and ``n_bytes`` of arrays."""
    return len(head) + n_bytes + _DIGEST_BYTES


def write(path: Path, head: bytes, arrays: Iterable[bytes], go_on: Callable[[], bool]) -> bool:
    """Write the file completely or not at all. False when ``go_on`` returned False before the end. Raises OSError."""
    temporary = path.with_suffix(".tmp")
    try:
        with create(temporary) as file:
            for piece in _pieces(head, arrays):
                if not go_on():
                    return False
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)
    return True


def create(path: Path) -> BinaryIO:
    """Create a file that no other user may read, because it holds users' texts. Raises OSError."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OURS, 0o600), "wb")


def read_header(path: Path) -> tuple[Header, int]:
    """The header, and the file's size in bytes. Raises DamagedFileError and OSError."""
    with _open(path) as file:
        header, _ = _read_head(file)
        return header, os.fstat(file.fileno()).st_size


def read(path: Path, go_on: Callable[[], bool]) -> tuple[Header, memoryview] | None:
    """The header, and the bytes of the arrays, if the digest of the whole file is right.

    None when ``go_on`` returned False before the end. Raises DamagedFileError and OSError.
    """
    with _open(path) as file:
        header, digest = _read_head(file)
        data = memoryview(bytearray(header.n_bytes))
        for start in range(0, len(data), _PIECE_BYTES):
            if not go_on():
                return None
            piece = data[start : start + _PIECE_BYTES]
            _fill(file, piece)
            digest.update(piece)
        if _exactly(file, _DIGEST_BYTES) != digest.digest():
            raise DamagedFileError("its arrays have changed since it was written")
        return header, data.toreadonly()


def _open(path: Path) -> BufferedReader:
    """Open a cache file. Raises OSError, and DamagedFileError for a link or anything but a regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OURS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError("it is a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedFileError("it is not a regular file")
    return open(fd, "rb")


def _pieces(head: bytes, arrays: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    digest = hashlib.sha256(head)
    yield head
    for data in arrays:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = memoryview(data)[start : start + _PIECE_BYTES]
            digest.update(piece)
            yield piece
    yield digest.digest()


def _read_head(file: BufferedReader) -> tuple[Header, hashlib._Hash]:
    sizes = _exactly(file, _SIZES.size)
    magic, n_header, n_key, n_bytes = _SIZES.unpack(sizes)
    if magic != _MAGIC:
        raise DamagedFileError("it is not a prompt cache of this version")
    # Lengths in the file are not trusted, and no memory is allocated for them, until they add up to the file's size.
    size = len(sizes) + n_header + n_key + n_bytes + 2 * _DIGEST_BYTES
    if size != os.fstat(file.fileno()).st_size or n_header > _MAX_HEADER_BYTES:
        raise DamagedFileError("its size is not what it says")
    if n_key % TOKEN_BYTES or n_key > BLOCK_KEY_BYTES:
        raise DamagedFileError("it has no right number of tokens")
    text, key = _exactly(file, n_header), _exactly(file, n_key)
    digest = hashlib.sha256(sizes)
    digest.update(text)
    digest.update(key)
    seal = _exactly(file, _DIGEST_BYTES)
    if seal != digest.digest():
        raise DamagedFileError("its header has changed since it was written")
    digest.update(seal)
    header = _parse(text, bytes(key))
    if header.n_bytes != n_bytes:
        raise DamagedFileError("its arrays are not as long as its header says")
    return header, digest


def _parse(text: bytearray, key: bytes) -> Header:
    try:
        about = json.loads(text)
        form = parsed(dumped(about["form"]))
        states = list(about["states"])
        for _ in arrays_of(states):
            pass  # Each array checks itself.
        return Header(str(about["owner"]), form, str(about["parent"]), key, states)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"its header can't be read: {error!r}") from error


def _exactly(file: BufferedReader, n: int) -> bytearray:
    data = bytearray(n)
    _fill(file, memoryview(data))
    return data


def _fill(file: BufferedReader, data: memoryview) -> None:
    if file.readinto(data) != len(data):
        raise DamagedFileError("it ends too early")


def _sync(directory: Path) -> None:
    """Sync the directory, so that a rename survives a power failure."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
