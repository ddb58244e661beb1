"""From a stored entry back to caches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from mlx_lm_hooks import Companion

from .. import caches as kinds
from .arrays import shared_memory
from .catalog import ColdEntry
from .checking import BadEntry, ForeignEntry
from .format import COMPANION
from .health import Checking
from .meta import Meta
from .reader import Assembly, EntryReader, open_entry, shared


class Restored(list[Any]):
    """An entry's caches, one per layer, and the companion state that goes with all of its tokens."""

    companion: Companion | None = None


class Lost(Exception):
    """The file of `entry`, the one asked for or one that it needs, is gone or holds something else."""

    def __init__(self, entry: ColdEntry):
        super().__init__(f"{entry.path.name} is gone or was replaced.")
        self.entry = entry


class Damaged(Exception):
    """The file of `entry`, the one asked for or one that it needs, is not sound; `status` says which file that was, `str()` why."""

    def __init__(self, reason: str, entry: ColdEntry, status: os.stat_result):
        super().__init__(reason)
        self.entry = entry
        self.status = status


class Restore:
    """Reading one entry's caches from the files of its chain: `steps` to the end, then `caches`.

    `used` gets the open descriptors when all is read. Memory: the caches, and on CUDA one tensor more.
    """

    def __init__(self, entry: ColdEntry, checking: Checking, used: Callable[[int], None]):
        self._entry = entry
        self._checking = checking
        self._used = used
        self.allocated = False  # whether all memory is made
        self._assembly: Assembly | None = None
        self._meta: Meta | None = None
        self._status: os.stat_result | None = None
        shared_memory()  # found out on the generation thread: the reader's may have no stream of a GPU

    def read(self) -> None:
        """Read everything at once, as fast as it goes. Generation thread only. Raises like `steps`."""
        for _ in self._run(False, False):
            pass

    def steps(self, filled: bool = True) -> Iterator[int]:
        """Read everything, piece by piece; gives the bytes of each piece, 0 for memory that was made. Closing the iterator gives up.

        On any one thread; but unless memory is to be `filled`, on the generation thread
        until `allocated` is true. Raises Damaged, Lost, OSError, and what mlx raises when memory is short.
        """
        return self._run(True, filled)

    def _run(self, pieces: bool, filled: bool) -> Iterator[int]:
        checking = self._checking
        with open_chain(self._entry) as links:
            readers = [reader for _, reader, _ in links]
            files_read = [(reader.status.st_dev, reader.status.st_ino, reader.header.checksum) for reader in readers]
            verify = checking.wanted(files_read)
            meta, status = readers[-1].header.meta, readers[-1].status
            with _blaming(self._entry, status):
                for reader in readers[:-1]:
                    shared(meta, reader.header.meta)  # before anything is allocated: so all its bytes are in the files
                assembly = Assembly(meta, pieces, filled)
                for made in assembly.allocation():
                    self.allocated = assembly.allocated
                    yield made
            for one, reader, until in links:
                with _blaming(one, reader.status):
                    if pieces:
                        yield from assembly.filling(reader, until, verify)
                    else:
                        assembly.fill(reader, until, verify)
            if verify:
                checking.found_sound(files_read)
            checking.measured(
                sum(reader.status.st_size for reader in readers),
                sum(reader.read_seconds for reader in readers),
                sum(reader.hash_seconds for reader in readers) if verify else None,
            )
            with suppress(OSError):  # a read-only directory: recency is not worth a restored entry
                for reader in reversed(readers):
                    self._used(reader.fd)
        self._assembly, self._meta, self._status = assembly, meta, status

    def caches(self) -> Restored:
        """What was read. Generation thread only, once, after `steps` came to their end. Raises Damaged."""
        assembly, self._assembly = self._assembly, None
        assert assembly is not None and self._meta is not None and self._status is not None
        with _blaming(self._entry, self._status):
            return _load(self._meta, assembly.finish())


@contextmanager
def open_chain(entry: ColdEntry) -> Iterator[list[tuple[ColdEntry, EntryReader, int]]]:
    """The files of an entry's chain, the whole one first, each with the token up to which the entry takes from it. Raises Damaged, Lost, OSError."""
    with ExitStack() as files:
        readers = [_open(files, one) for one in entry.chain]
        starts = _check_chain(entry, readers)
        yield list(zip(entry.chain, readers, [*starts[1:], entry.length], strict=True))


def _open(files: ExitStack, entry: ColdEntry) -> EntryReader:
    try:
        with _blaming(entry, os.stat(entry.path, follow_symlinks=False)):
            return files.enter_context(open_entry(entry.path))
    except FileNotFoundError as error:
        raise Lost(entry) from error


def _check_chain(entry: ColdEntry, readers: list[EntryReader]) -> list[int]:
    """Where each file starts, once it is clear that together they hold the tokens of `entry` and belong to each other. Raises Lost, Damaged."""
    key, before = b"", ""
    starts: list[int] = []
    for one, reader in zip(entry.chain, readers, strict=True):
        meta = reader.header.meta
        with _blaming(one, reader.status):
            own = reader.key()
        sound = (meta.fingerprint, meta.namespace, meta.parent_checksum) == (one.fingerprint, one.namespace, before)
        if not sound or not (starts[-1] if starts else -1) < meta.start <= len(key) // 8:
            raise Lost(one)
        key = key[: meta.start * 8] + own
        before = reader.header.checksum
        starts.append(meta.start)
    if key != entry.key:
        raise Lost(entry)
    return starts


@contextmanager
def _blaming(entry: ColdEntry, status: os.stat_result) -> Iterator[None]:
    """Say of a fault which file has it."""
    try:
        yield
    except ForeignEntry as error:
        raise Lost(entry) from error
    except BadEntry as error:
        raise Damaged(str(error), entry, status) from error


def _load(meta: Meta, arrays: dict[str, Any]) -> Restored:
    """Caches from checked parts. Raises BadEntry when they do not fit together, whatever the caches made of them."""
    beside = meta.companion
    tensors = {name: arrays.pop(COMPANION + name) for name in beside.tensors} if beside is not None else {}
    try:
        caches = Restored(kinds.load(meta.descriptors, arrays))
        length = kinds.length(caches)
    except Exception as error:
        raise BadEntry(f"The caches cannot be put together ({error}).") from error
    if length is not None and length != meta.length:
        raise BadEntry(f"The caches hold {length} tokens, the header says {meta.length}.")
    if beside is not None:
        caches.companion = Companion(beside.schema, beside.version, beside.scalars, tensors)
    return caches
