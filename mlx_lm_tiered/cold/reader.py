"""Reading whole entries for a restore."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import xxhash

from .arrays import Landing, capacities, piece_beside
from .checking import BadEntry
from .files import EntryFile, opened
from .fresh import ask_for_huge_pages
from .meta import Meta
from .parallel import run_all

# Below this many bytes one thread reads a file: starting others costs more than they save.
ALONE = 8 << 20
# Where a piece of memory and its place in the file differ by so few bytes modulo a page,
# some processors copy at a quarter of their speed (x86's ``rep movsb`` takes the
# addresses for overlapping). Then a read goes through a buffer that stays in their cache.
OVERLAPPING = 32
BUFFER = 256 << 10


class EntryReader(EntryFile):
    """An entry's file whose tensors are read into arrays."""

    def __init__(self, fd: int):
        super().__init__(fd)
        self.read_seconds = 0.0  # of all threads together
        self.hash_seconds = 0.0
        self._lock = threading.Lock()

    def fill(self, landing: Landing, number: int, verify: bool, start: int = 0, stop: int | None = None, beyond: int = 0) -> None:
        """Read tensor `number` into its place (see `Landing.runs`); several may be read at once. Raises BadEntry, with `verify` also for a wrong checksum."""
        for _ in self.pieces(landing, number, verify, start, stop, beyond):
            pass

    def pieces(
        self, landing: Landing, number: int, verify: bool, start: int = 0, stop: int | None = None, beyond: int = 0
    ) -> Iterator[int]:
        """The same, piece by piece; gives the bytes of each."""
        at = self.header.body + self.header.offsets[number]
        hasher = xxhash.xxh3_64()
        reading = hashing = 0.0
        for batch in landing.runs(start, stop, beyond):
            started = time.perf_counter()
            read_into(self.fd, batch, at)
            read = time.perf_counter()
            reading += read - started
            if verify:
                for piece in batch:
                    hasher.update(piece)
                hashing += time.perf_counter() - read
            size = sum(map(len, batch))
            at += size
            yield size
        with self._lock:
            self.read_seconds += reading
            self.hash_seconds += hashing
        if verify and hasher.hexdigest() != self.header.checksums[number]:
            raise BadEntry(f"Tensor {self.header.meta.all_tensors[number].name!r} does not match its checksum.")


class Assembly:
    """The arrays of an entry: allocated, filled from the files of its chain in any order, then finished.

    `fill` reads with several threads; `allocation` and `filling` do their work piece
    by piece, `beside` decoding: the first on the generation thread, or with `filled` memory on
    any one, the second on any one. Memory: the arrays, and on CUDA one tensor more.
    """

    def __init__(self, meta: Meta, beside: bool = False, filled: bool = False):
        self._meta = meta
        self._beside = beside
        self._filled = filled
        self._specs = meta.whole
        self._landings: list[Landing] = []
        self._settled = False

    def allocation(self) -> Iterator[int]:
        """Make the arrays, one a piece; gives 0 for each."""
        piece = piece_beside(sum(spec.nbytes for spec in self._specs)) if self._beside else None
        for spec, shape in zip(self._specs, capacities(self._specs), strict=True):
            self._landings.append(Landing(spec, shape, piece, self._filled))
            yield 0

    @property
    def allocated(self) -> bool:
        """Whether all arrays are made."""
        return len(self._landings) == len(self._specs)

    def fill(self, reader: EntryReader, until: int, verify: bool) -> None:
        """Take what the entry needs from one file: its tokens before `until`. Raises BadEntry, first for tensors that are not those of the entry."""
        tasks = [partial(reader.fill, landing, number, verify, *span) for landing, number, span in self._parts(reader, until)]
        run_all(tasks, alone=reader.status.st_size < ALONE)

    def filling(self, reader: EntryReader, until: int, verify: bool) -> Iterator[int]:
        """The same, piece by piece; gives the bytes of each."""
        for landing, number, span in self._parts(reader, until):
            yield from reader.pieces(landing, number, verify, *span)

    def _parts(self, reader: EntryReader, until: int) -> list[tuple[Landing, int, tuple[int, int | None, int]]]:
        """What the entry needs from one file: the place and number of each tensor, and its tokens as for `Landing.runs`."""
        if not self._settled:
            self._settled = True
            # Beside decoding the system may not stop for it: to make and to replace huge pages
            # takes milliseconds in which no thread of the process gets new memory.
            if not self._beside:
                ask_for_huge_pages([landing.memory for landing in self._landings])
        meta = reader.header.meta
        if until == self._meta.length:
            parts = enumerate(zip(self._landings, meta.by_token, strict=True), 1)
            return [(landing, number, (meta.start if part else 0, None, 0)) for number, (landing, part) in parts]
        numbered = zip(self._landings, shared(self._meta, meta), strict=True)
        return [(landing, number, (meta.start, until, meta.length - until)) for landing, number in numbered if number]

    def finish(self) -> dict[str, mx.array]:
        """The filled arrays by name; the assembly gives them up. Generation thread only."""
        landings, self._landings = self._landings[::-1], []
        return {spec.name: landings.pop().finish() for spec in self._specs}


def shared(meta: Meta, ancestor: Meta) -> list[int]:
    """For each tensor of `meta`, the number of the same in an ancestor's file, 0 for those that no ancestor has a part of. Raises BadEntry when the ancestor lacks one."""
    numbers = {spec.name: number for number, spec in enumerate(ancestor.tensors, 1)}
    found = []
    for spec, part in zip(meta.tensors, meta.by_token, strict=True):
        number = numbers.get(spec.name, 0) if part else 0
        if part:
            like = spec.resized(ancestor.length - ancestor.start)
            if not number or not ancestor.by_token[number - 1] or ancestor.tensors[number - 1] != like:
                raise BadEntry(f"Tensor {spec.name[:80]!r} does not continue what its parent holds.")
        found.append(number)
    return found


@contextmanager
def open_entry(path: Path) -> Iterator[EntryReader]:
    """Open an entry and check its header. Raises BadEntry (also for symbolic links and other users' files) or OSError."""
    with opened(path) as fd:
        yield EntryReader(fd)


def read_into(fd: int, batch: list[memoryview], at: int) -> None:
    """Fill all the pieces of memory from the file at `at`; a read may stop anywhere. Raises BadEntry, OSError."""
    if len(batch) == 1 and len(batch[0]) >= BUFFER and _overlapping(batch[0], at):
        place = np.frombuffer(batch[0], np.uint8)
        buffer = np.empty(BUFFER, np.uint8)
        for start in range(0, len(place), BUFFER):
            count = min(BUFFER, len(place) - start)
            _read_straight(fd, [memoryview(buffer)[:count]], at + start)
            place[start : start + count] = buffer[:count]
        return
    _read_straight(fd, batch, at)


def _overlapping(piece: memoryview, at: int) -> bool:
    return 0 < (ctypes.addressof(ctypes.c_char.from_buffer(piece)) - at) % mmap.PAGESIZE < OVERLAPPING


def _read_straight(fd: int, batch: list[memoryview], at: int) -> None:
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
