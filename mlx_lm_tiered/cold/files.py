"""Entry files as the scan and the commands read them: headers and tokens, and checksums of the rest. No mlx is loaded for it."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from . import format as fmt
from .checking import BadEntry
from .meta import Header, Meta
from .summary import read_summary

PIECE = 512 << 10  # bytes read at once: enough for a disk that reads ahead, few enough that hashing finds most of them in a core's own cache


class EntryFile:
    """One open entry file with its checked header. One descriptor serves every read: the path may be replaced meanwhile."""

    def __init__(self, fd: int):
        self.fd = fd
        self.status = _own_file(fd)
        length = fmt.header_length(read_at(fd, 8, 0), self.status.st_size)
        self.header: Header = fmt.parse(read_at(fd, length, 0), self.status.st_size)

    def key(self) -> bytes:
        """The file's tokens as an index key, checked by their checksum: those from the segment's start on. Raises BadEntry."""
        return key_at(self.fd, self.header.body, self.header.meta, self.header.checksums[0])

    def digest_of_first(self, number: int, tokens: int) -> str:
        """The checksum of the first `tokens` slots of tensor `number` along its grow axis. Raises BadEntry."""
        spec = self.header.meta.all_tensors[number]
        assert spec.grow_axis is not None
        rows = math.prod(spec.shape[: spec.grow_axis])
        row, wanted = spec.nbytes // max(1, rows), spec.resized(tokens).nbytes // max(1, rows)
        start = self.header.body + self.header.offsets[number]
        hasher = xxhash.xxh3_64()
        for at in range(start, start + rows * row, max(1, row)):
            for piece in range(at, at + wanted, PIECE):
                hasher.update(read_at(self.fd, min(PIECE, at + wanted - piece), piece))
        return hasher.hexdigest()

    def check(self) -> None:
        """Compare every tensor with its checksum without keeping it. Raises BadEntry."""
        for spec, offset, checksum in zip(
            self.header.meta.all_tensors, self.header.offsets, self.header.checksums, strict=True
        ):
            hasher = xxhash.xxh3_64()
            start, end = self.header.body + offset, self.header.body + offset + spec.nbytes
            for at in range(start, end, PIECE):
                hasher.update(read_at(self.fd, min(PIECE, end - at), at))
            if hasher.hexdigest() != checksum:
                raise BadEntry(f"Tensor {spec.name!r} does not match its checksum.")


@contextmanager
def open_file(path: Path) -> Iterator[EntryFile]:
    """Open an entry and check its header. Raises BadEntry (also for symbolic links and other users' files) or OSError."""
    with opened(path) as fd:
        yield EntryFile(fd)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of an entry's file. Raises BadEntry for a symbolic link, or OSError."""
    # Without O_NONBLOCK, opening a planted FIFO would wait for ever.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise BadEntry("It is a symbolic link.") from error
        raise
    try:
        yield fd
    finally:
        os.close(fd)


def _own_file(fd: int) -> os.stat_result:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadEntry("It is not a regular file.")
    if status.st_uid != os.geteuid():
        raise BadEntry("The file belongs to another user.")
    return status


def key_at(fd: int, body: int, meta: Meta, checksum: str) -> bytes:
    """The tokens of the file whose tensors begin at `body`, as a key. Raises BadEntry when they do not match their checksum."""
    data = read_at(fd, 8 * (meta.length - meta.start), body)
    if fmt.digest(data) != checksum:
        raise BadEntry("The tokens do not match their checksum.")
    return np.frombuffer(data, dtype="<i8").astype(">i8").tobytes()


def read_at(fd: int, length: int, at: int) -> bytes:
    """Bytes of a file, all of them. Raises BadEntry when it ends before."""
    data = os.pread(fd, length, at)
    while len(data) < length:
        more = os.pread(fd, length - len(data), at + len(data))
        if not more:
            raise BadEntry("The file ends too early.")
        data += more
    return data


def read_summary_and_tokens(path: Path) -> tuple[Meta, str, bytes, os.stat_result]:
    """What the index needs of a file (see `summary`): its meta without tensors, its checksum, its tokens as a key. Raises BadEntry, OSError."""
    with opened(path) as fd:
        status = _own_file(fd)
        meta, checksum, body, sums = read_summary(fd, status.st_size)
        return meta, checksum, key_at(fd, body, meta, sums), status
