"""One prompt's KV cache as a file: its tokens, the layout of the cache, and the bytes of its arrays.

    magic and sizes | header, JSON | tokens | SHA-256 of what came | arrays | SHA-256 of all that came

The first digest covers the header and the tokens, so the server can index files without reading arrays. Numbers are
little-endian. Tokens are big-endian, so that they sort as bytes. Knows no MLX: state.py defines the header's layout.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

TOKEN_BYTES = 4
# The last digit is the format's version. Files of other versions count as damaged: version 1 could store a cache under
# another prompt's tokens.
_MAGIC = b"MLXKV\0\0\2"
_SIZES = struct.Struct("<8sIIQ")
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_HEADER_BYTES = 4 * 2**20
# Cache files are never links. Whoever can write in the directory could place a link to files that this process must
# not read or write.
_OURS = os.O_NOFOLLOW | os.O_CLOEXEC
# Files are written in pieces of this size, so that the writer can stop soon.
_PIECE_BYTES = 8 * 2**20


class DamagedFileError(Exception):
    """The file is not a cache file, or not a complete one. The text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header. ``key``: its tokens; ``n_bytes``: the bytes of its arrays."""

    identity: str
    key: bytes
    trimmable: bool
    layout: list[Any]
    n_bytes: int


def to_key(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes with the same order and prefixes. Raises OverflowError below 0 and above 32 bits."""
    ids = array("I", tokens)
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes()


def from_key(key: bytes) -> NDArray[np.int64]:
    """The token ids of a key."""
    return np.frombuffer(key, dtype=">u4").astype(np.int64)


def head(header: Header) -> bytes:
    """The part of a file before its arrays. Raises ValueError when the header is not JSON or is too long."""
    about = {"identity": header.identity, "trimmable": header.trimmable, "layout": header.layout}
    text = json.dumps(about, separators=(",", ":")).encode()
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


def read_header(path: Path) -> tuple[Header, int]:
    """The header, and the file's size in bytes. Raises DamagedFileError and OSError."""
    with _open(path) as file:
        header, _ = _read_head(file)
        return header, os.fstat(file.fileno()).st_size


def read(path: Path, decode: Callable[[Header, Callable[[int], bytearray]], T]) -> T:
    """The result of ``decode``, which gets the header and takes the arrays' bytes piece by piece.

    The result is returned only if the digest of the whole file is right. Raises DamagedFileError and OSError.
    """
    with _open(path) as file:
        header, digest = _read_head(file)
        left = header.n_bytes

        def take(n: int) -> bytearray:
            nonlocal left
            if n > left:
                raise DamagedFileError("its arrays are longer than it says")
            left -= n
            piece = _exactly(file, n)
            digest.update(piece)
            return piece

        value = decode(header, take)
        if left:
            raise DamagedFileError("its arrays are shorter than it says")
        if _exactly(file, _DIGEST_BYTES) != digest.digest():
            raise DamagedFileError("its arrays have changed since it was written")
        return value


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
    if size != os.fstat(file.fileno()).st_size or n_header > _MAX_HEADER_BYTES or n_key % TOKEN_BYTES:
        raise DamagedFileError("its size is not what it says")
    text, key = _exactly(file, n_header), _exactly(file, n_key)
    digest = hashlib.sha256(sizes)
    digest.update(text)
    digest.update(key)
    seal = _exactly(file, _DIGEST_BYTES)
    if seal != digest.digest():
        raise DamagedFileError("its header has changed since it was written")
    digest.update(seal)
    return _parse(text, bytes(key), n_bytes), digest


def _parse(text: bytearray, key: bytes, n_bytes: int) -> Header:
    try:
        about = json.loads(text)
        return Header(str(about["identity"]), key, bool(about["trimmable"]), list(about["layout"]), n_bytes)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"its header can't be read: {error!r}") from error


def _exactly(file: BufferedReader, n: int) -> bytearray:
    data = bytearray(n)
    if file.readinto(data) != n:
        raise DamagedFileError("it ends too early")
    return data


def _sync(directory: Path) -> None:
    """Sync the directory, so that a rename survives a power failure."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
