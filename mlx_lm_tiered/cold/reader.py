"""Reading entries: headers for the scan, whole entries for a restore."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import xxhash

from . import format as fmt
from .arrays import PIECE, Landing, capacities
from .format import BadEntry, Header


class EntryReader:
    """One open entry file with its checked header. One descriptor serves every read: the path may be replaced meanwhile."""

    def __init__(self, fd: int):
        self.fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadEntry("It is not a regular file.")
        if status.st_uid != os.geteuid():
            raise BadEntry("The file belongs to another user.")
        self.status = status
        length = fmt.header_length(_read(fd, 8, 0), status.st_size)
        self.header: Header = fmt.parse(_read(fd, length, 0), status.st_size)
        self.read_seconds = 0.0
        self.hash_seconds = 0.0

    def key(self) -> bytes:
        """The tokens as an index key, checked by their checksum. Raises BadEntry."""
        spec = self.header.meta.all_tensors[0]
        data = _read(self.fd, spec.nbytes, self.header.body)
        if fmt.digest(data) != self.header.checksums[0]:
            raise BadEntry("The tokens do not match their checksum.")
        return np.frombuffer(data, dtype="<i8").astype(">i8").tobytes()

    def arrays(self, verify: bool) -> dict[str, mx.array]:
        """Every tensor but the tokens, read straight into its final array, one after the other.

        With `verify`, a tensor that does not match its checksum raises BadEntry.
        Memory: the arrays, and on CUDA one tensor more. Generation thread only.
        """
        header = self.header
        specs = header.meta.tensors
        arrays = {}
        for spec, shape, offset, checksum in zip(
            specs, capacities(specs), header.offsets[1:], header.checksums[1:], strict=True
        ):
            landing = Landing(spec, shape)
            found = self._fill(landing, header.body + offset, verify)
            if verify and found != checksum:
                raise BadEntry(f"Tensor {spec.name!r} does not match its checksum.")
            arrays[spec.name] = landing.finish()
        return arrays

    def check(self) -> None:
        """Compare every tensor with its checksum without keeping it. Raises BadEntry."""
        for spec, offset, checksum in zip(
            self.header.meta.all_tensors, self.header.offsets, self.header.checksums, strict=True
        ):
            hasher = xxhash.xxh3_64()
            start, end = self.header.body + offset, self.header.body + offset + spec.nbytes
            for at in range(start, end, PIECE):
                hasher.update(_read(self.fd, min(PIECE, end - at), at))
            if hasher.hexdigest() != checksum:
                raise BadEntry(f"Tensor {spec.name!r} does not match its checksum.")

    def _fill(self, landing: Landing, at: int, verify: bool) -> str:
        hasher = xxhash.xxh3_64()
        for batch in landing.runs():
            started = time.perf_counter()
            _read_into(self.fd, batch, at)
            read = time.perf_counter()
            self.read_seconds += read - started
            if verify:
                for piece in batch:
                    hasher.update(piece)
                self.hash_seconds += time.perf_counter() - read
            at += sum(map(len, batch))
        return hasher.hexdigest()


@contextmanager
def open_entry(path: Path) -> Iterator[EntryReader]:
    """Open an entry and check its header. Raises BadEntry (also for symbolic links and other users' files) or OSError."""
    # Without O_NONBLOCK, opening a planted FIFO would wait for ever.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise BadEntry("It is a symbolic link.") from error
        raise
    try:
        yield EntryReader(fd)
    finally:
        os.close(fd)


def _read(fd: int, length: int, at: int) -> bytes:
    data = os.pread(fd, length, at)
    while len(data) < length:
        more = os.pread(fd, length - len(data), at + len(data))
        if not more:
            raise BadEntry("The file ends too early.")
        data += more
    return data


def _read_into(fd: int, batch: list[memoryview], at: int) -> None:
    """Fill all the pieces from the file at `at`; a read may stop anywhere."""
    while batch:
        count = _PREADV(fd, batch, at)
        if count == 0:
            raise BadEntry("The file ends too early.")
        at += count
        while batch and count >= len(batch[0]):
            count -= len(batch[0])
            batch = batch[1:]
        if count:
            batch = [batch[0][count:], *batch[1:]]


def _pread_one(fd: int, batch: list[memoryview], at: int) -> int:
    """`preadv` for systems without it (macOS before 11): fills the first piece only."""
    data = os.pread(fd, len(batch[0]), at)
    batch[0][: len(data)] = data
    return len(data)


_PREADV = getattr(os, "preadv", _pread_one)
