"""Writing one entry: a temporary file of its final size, filled from front to back, sealed, synced, put in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from . import format as fmt
from .format import Meta


class EntryWriter:
    """Writes the tensors of `meta` in their order, each in one or more pieces, then commits. One thread at a time.

    `fd` is open on the file at `path`. `publish(path)` puts the finished, synced file
    in place. All methods raise OSError; after that, or when given up, `abort`.
    """

    def __init__(self, path: Path, fd: int, meta: Meta, key: bytes, publish: Callable[[Path], None]):
        self.meta = meta
        self._path = path
        self._fd = fd
        self._publish = publish
        self._header = fmt.layout(meta)
        self.size = len(self._header) + sum(spec.nbytes for spec in meta.all_tensors)
        self._at = len(self._header)
        self._checksums: list[str] = []
        self._left = 0
        self._hasher = xxhash.xxh3_64()
        tokens = np.frombuffer(key, dtype=">i8").astype("<i8").tobytes()
        self.write(fmt.TOKENS, memoryview(tokens))

    def write(self, name: str, data: memoryview) -> None:
        """Write the next bytes of tensor `name`. Raises ValueError when it is not this tensor's turn."""
        spec = self.meta.all_tensors[len(self._checksums)] if not self.finished else None
        if spec is None or name != spec.name:
            raise ValueError(f"It is not the turn of tensor {name!r}.")
        if self._left == 0:
            self._left = spec.nbytes
        if len(data) > self._left:
            raise ValueError(f"Tensor {name!r} is longer than announced.")
        self._hasher.update(data)
        _write_all(self._fd, data, self._at)
        self._at += len(data)
        self._left -= len(data)
        if self._left == 0:
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
        fmt.seal(self._header, self._checksums)
        _write_all(self._fd, memoryview(self._header), 0)
        full_sync(self._fd)
        self._close()
        self._publish(self._path)

    def abort(self) -> None:
        """Give the entry up; its temporary file goes. May be called at any time, also twice."""
        if self._fd >= 0:
            self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


def full_sync(fd: int) -> None:
    """Bring a file or directory to the medium. macOS's fsync stops at the drive's own cache; F_FULLFSYNC goes on."""
    if sys.platform == "darwin":
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError:
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
