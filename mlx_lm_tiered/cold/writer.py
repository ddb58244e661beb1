"""Writing one entry: a temporary file of its final size, filled from front to back, sealed, synced, put in place."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from . import format as fmt
from .meta import TOKENS, Meta, TensorSpec


class Proof(Protocol):
    """What stands between a segment's writer and what its parents hold; see `segments.Continuation`."""

    def start(self, spec: TensorSpec) -> None:
        """A whole tensor is about to come."""

    def take(self, data: memoryview) -> memoryview:
        """Its next bytes; returns those of them that no parent holds."""

    def check(self, number: int) -> None:
        """It has come, it was number `number` of the entry's. Raises NotIdentical."""

    def close(self) -> None:
        """No more of it."""


class EntryWriter:
    """Writes the tensors of `meta` in their order, each in one or more pieces, then commits. One thread at a time.

    Tensors come whole (`meta.whole`), also for a segment: `proof` takes what the
    parents hold and raises NotIdentical when they hold something else. With `partial`
    they come as they are in the file, without what parents hold. `fd` is open on
    the file at `path`. `publish(path)` puts the finished, synced file in place.
    `wrote` is told every write's bytes. `header` is what `format.layout` made of
    `meta`, for this writer alone, which fills it in. All methods raise OSError; after that, or when
    given up, `abort`.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        meta: Meta,
        key: bytes,
        publish: Callable[[Path], None],
        proof: Proof | None = None,
        partial: bool = False,
        wrote: Callable[[int], None] = lambda size: None,
        header: bytearray | None = None,
    ):
        self.meta = meta
        self.checksum = ""  # of the finished header
        self._path = path
        self._fd = fd
        self._publish = publish
        self._proof = proof
        self._wrote = wrote
        self._header = fmt.layout(meta) if header is None else header
        self._proves = proof is not None and not partial
        self._specs = (meta.all_tensors[0], *(meta.tensors if partial else meta.whole))
        self.size = fmt.file_size(meta, self._header)
        self._at = len(self._header)
        self._checksums: list[str] = []
        self._left = 0
        self._hasher = xxhash.xxh3_64()
        tokens = np.frombuffer(key, dtype=">i8")[meta.start :].astype("<i8").tobytes()
        self.write(TOKENS, memoryview(tokens))

    def write(self, name: str, data: memoryview) -> None:
        """Write the next bytes of tensor `name`. Raises ValueError when it is not this tensor's turn."""
        number = len(self._checksums)
        spec = self._specs[number] if not self.finished else None
        if spec is None or name != spec.name:
            raise ValueError(f"It is not the turn of tensor {name!r}.")
        proven = self._proves and number > 0 and self.meta.by_token[number - 1]
        if self._left == 0:
            self._left = spec.nbytes
            if self._proof is not None and proven:
                self._proof.start(spec)
        if len(data) > self._left:
            raise ValueError(f"Tensor {name!r} is longer than announced.")
        self._left -= len(data)
        if self._proof is not None and proven:
            data = self._proof.take(data)
        self._hasher.update(data)
        self._put(data, self._at)
        self._at += len(data)
        if self._left == 0:
            if self._proof is not None and proven:
                self._proof.check(number - 1)
            self._checksums.append(self._hasher.hexdigest())
            self._hasher = xxhash.xxh3_64()

    @property
    def finished(self) -> bool:
        """Whether all tensors are written."""
        return len(self._checksums) == len(self.meta.tensors) + 1

    def commit(self) -> None:
        """Seal the header, bring the file to the disk, put it in place. Afterwards the entry survives a crash."""
        if not self.finished:
            raise ValueError("Not all tensors are written.")
        self.checksum = fmt.seal(self._header, self._checksums)
        self._put(memoryview(self._header), 0)
        full_sync(self._fd)
        self._close()
        self._publish(self._path)

    def abort(self) -> None:
        """Give the entry up; its temporary file goes. May be called at any time, also twice."""
        if self._fd >= 0:
            self._close()
        self._path.unlink(missing_ok=True)

    def _put(self, data: memoryview, at: int) -> None:
        _write_all(self._fd, data, at)
        self._wrote(len(data))

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
        if self._proof is not None:
            self._proof.close()


# What a file system says that has no F_FULLFSYNC; any other error means that the bytes are not safe.
NO_FULLFSYNC = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL)


def full_sync(fd: int) -> None:
    """Bring a file or directory to the medium. macOS's fsync stops at the drive's own cache; F_FULLFSYNC goes on."""
    if sys.platform == "darwin":
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in NO_FULLFSYNC:
                raise
            os.fsync(fd)  # network volumes and some others only know this
    else:
        os.fsync(fd)


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        full_sync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: Any, at: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, at)
        at += count
        data = data[count:]
