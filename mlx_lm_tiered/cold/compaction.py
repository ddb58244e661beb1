"""A chain of many files becomes one, while nothing else is to be done: the bytes go from file to file, no mlx and no request takes part.

A chain that is never made one is restored a little slower with every turn, and its
last turns' entries pay for a whole one when it is full (`catalog.MAX_CHAIN`). Writing
it anew costs as many bytes as all its turns together wrote, though. So it is done
seldom: for chains that are long or hold much that is of no use, and only when the
conversation rests. Afterwards nothing needs the parents, so they may be evicted.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from weakref import WeakKeyDictionary

import xxhash

from .catalog import MAX_CHAIN, Catalog, ColdEntry
from .checking import BadEntry
from .directory import DirectoryFull
from .health import logger
from .meta import DTYPES, Meta
from .reader import EntryReader, shared
from .restore import Damaged, Lost, open_chain
from .segments import Stale
from .store import ColdStore
from .storing import Continued
from .writer import EntryWriter

LONG = MAX_CHAIN // 2  # files
RESTING = 600.0  # seconds since the last use
EVERY = 60.0  # seconds between two looks for something to do
PIECE = 1 << 20  # bytes
AGAIN = 600.0  # seconds until a chain is tried again that could not be made one file
POLL = 0.05  # seconds between two looks while a request runs


class Compactor:
    """A thread that compacts one chain at a time, while not `busy()`."""

    def __init__(self, store: ColdStore, busy: Callable[[], bool], every: float = EVERY, resting: float = RESTING, long: int = LONG):
        self._store = store
        self._busy = busy
        self._every = every
        self._resting = resting
        self._long = long
        self._later: WeakKeyDictionary[ColdEntry, float] = WeakKeyDictionary()  # not to be tried again before a time
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlx-lm-tiered-compactor", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 10.0) -> bool:
        """End soon; what is half done is given up. False when the thread did not end in time."""
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.wait(self._every):
            try:
                while not self._busy() and not self._closing.is_set() and self._store.retry_in == 0:
                    now = time.monotonic()
                    later = {entry for entry, until in list(self._later.items()) if until > now}
                    if (entry := choose(self._store.catalog, self._long, self._resting, later)) is None:
                        break
                    self._later[entry] = now + AGAIN  # it is no reason to leave the others alone
                    self._compact(entry)
            except Exception as error:  # whatever it is, requests are served without it
                logger.warning("SSD cache: compaction failed (%s: %s)", type(error).__name__, error)

    def _compact(self, entry: ColdEntry) -> None:
        try:
            compact(self._store, entry, self._make_way)
        except DirectoryFull as error:
            logger.debug("SSD cache: %s stays a chain: %s", entry.path.name, error)
        except OSError as error:
            self._store.write_failed(error)

    def _make_way(self) -> bool:
        """Wait until no request runs. False when there is no more time at all."""
        while self._busy():
            if self._closing.wait(POLL):
                return False
        return not self._closing.is_set()


def choose(catalog: Catalog, long: int, resting: float, but: Collection[ColdEntry] = ()) -> ColdEntry | None:
    """A chain that is worth it, continued by nothing and not used for `resting` seconds; the longest, and none of `but`.

    That is one of `long` files or more, or one whose files hold as many tokens behind
    those that the next one continues as it has itself: a restore reads them too.
    """
    before = time.time_ns() - int(resting * 1e9)
    worth = [end for end in catalog.ends(2) if end not in but and (len(end.chain) >= long or _unused(end) >= end.length)]
    for entry in sorted(worth, key=lambda end: -len(end.chain)):
        try:
            if os.stat(entry.path, follow_symlinks=False).st_mtime_ns < before:
                return entry
        except OSError:
            continue
    return None


def _unused(entry: ColdEntry) -> int:
    """The tokens that a restore reads for nothing."""
    return sum(parent.length - child.start for parent, child in pairwise(entry.chain))


def compact(store: ColdStore, entry: ColdEntry, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Make one file of an entry's chain. Whether that was done; `go_on()` is asked between pieces. Raises DirectoryFull, OSError.

    Every byte is compared with its old checksum before it gets a new one: damage is
    found and put away, never copied. A crash leaves the chain or the one file.
    """
    writer: EntryWriter | None = None
    try:
        with open_chain(entry) as links:
            meta = links[-1][1].header.meta
            whole = replace(meta, start=0, parent="", parent_checksum="", parts=(), tensors=meta.whole)
            if whole.by_token != meta.by_token:
                return False  # a tensor that happens to have as many slots as there are tokens
            writer = store.storing.rewrite(entry, whole)
            for name, piece in _pieces(meta, links):
                if not go_on():
                    writer.abort()
                    return False
                writer.write(name, piece)
            writer.commit()
            return True
    except (Lost, Damaged, Stale, Continued) as error:
        if writer is not None:
            writer.abort()
        if isinstance(error, Damaged):
            store.damaged(error.entry.path, error.status, error)
            store.catalog.forget(error.entry.path, error.entry)
        elif not isinstance(error, Continued):
            store.gone(error.entry)
        return False
    except BaseException:
        if writer is not None:
            writer.abort()
        raise


def _pieces(meta: Meta, links: list[tuple[ColdEntry, EntryReader, int]]) -> Iterator[tuple[str, memoryview]]:
    """The bytes of every tensor of the whole entry, in file order. Raises Damaged."""
    try:
        numbers = [shared(meta, reader.header.meta) for _, reader, _ in links]
    except BadEntry as error:
        raise Damaged(str(error), links[-1][0], links[-1][1].status) from error
    for at, (spec, part) in enumerate(zip(meta.whole, meta.by_token, strict=True)):
        sources = [_Source(*link, links_numbers[at]) for link, links_numbers in zip(links, numbers, strict=True)] if part else []
        if not part:
            sources = [_Source(*links[-1], at + 1, whole=True)]
        rows = math.prod(spec.shape[: spec.grow_axis]) if part and spec.grow_axis is not None else 1
        gathered = bytearray()
        if spec.nbytes == 0:
            yield spec.name, memoryview(b"")
        for _ in range(rows if spec.nbytes else 0):
            for source in sources:
                for piece in source.row(rows):
                    gathered += piece
                    if len(gathered) >= PIECE:
                        yield spec.name, memoryview(bytes(gathered))
                        gathered.clear()
        if gathered:
            yield spec.name, memoryview(bytes(gathered))
        for source in sources:
            source.check()


class _Source:
    """One tensor in one file of the chain, read from front to back: of each row the tokens that the entry takes, and the rest for the checksum only."""

    def __init__(self, entry: ColdEntry, reader: EntryReader, until: int, number: int, whole: bool = False):
        header = reader.header
        self._entry = entry
        self._reader = reader
        self._spec = header.meta.all_tensors[number]
        self._checksum = header.checksums[number]
        self._at = header.body + header.offsets[number]
        self._hasher = xxhash.xxh3_64()
        axis = self._spec.grow_axis
        slot = 0 if whole or axis is None else math.prod(self._spec.shape[axis + 1 :]) * DTYPES[self._spec.dtype]
        self._taken = self._spec.nbytes if whole else (until - header.meta.start) * slot

    def row(self, rows: int) -> Iterator[memoryview]:
        """The next of so many rows."""
        left, taken = self._spec.nbytes // rows, self._taken
        while left:
            data = os.pread(self._reader.fd, min(left, PIECE), self._at)
            if not data:
                raise Damaged("The file ends too soon.", self._entry, self._reader.status)
            self._hasher.update(data)
            self._at += len(data)
            left -= len(data)
            if taken > 0:
                yield memoryview(data)[:taken]
                taken -= len(data)

    def check(self) -> None:
        if self._hasher.hexdigest() != self._checksum:
            raise Damaged(f"Tensor {self._spec.name!r} does not match its checksum.", self._entry, self._reader.status)
