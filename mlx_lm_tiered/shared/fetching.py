"""Bringing a chain of files from the store into the SSD tier's directory.

Nothing is believed: sizes are the manifest's and bounded before anything is written,
every piece is compared with the digest that names it, and the finished file passes the
checks of any file before it is put in place. From there on it is an entry like others.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from ..cold.arriving import Arriving, Partial
from ..cold.catalog import ColdEntry
from .manifest import PIECE, Link, Manifest
from .names import PIECES, Names
from .objects import Damaged, Objects, persistent


class Cancelled(Exception):
    """Nobody waits for it any more."""


class Gone(Exception):
    """A piece is no longer there, or never was: the entry cannot be had."""


@dataclass
class Progress:
    """What a fetch has read; `stop` tells it to give up, `rest` is called after each chunk, with the processor seconds that it took."""

    stop: Callable[[], bool] = lambda: False
    rest: Callable[[float], None] = lambda spent: None
    nbytes: int = 0


class Fetching:
    """Thread-safe. `executor` reads the pieces of a file at the same time."""

    def __init__(self, objects: Objects, arriving: Arriving, executor: Executor):
        self._objects = objects
        self._arriving = arriving
        self._executor = executor
        self._lock = threading.Lock()
        self._coming: dict[tuple[str, str], Future[ColdEntry]] = {}  # files by fingerprint and name

    def missing(self, manifest: Manifest, count: int) -> int:
        """The bytes of the first `count` files that are not here."""
        return sum(link.nbytes for link in manifest.links[:count] if self._here(manifest, link) is None)

    def fits(self, manifest: Manifest, count: int) -> bool:
        """Whether the directory may take so many files of it."""
        return sum(link.nbytes for link in manifest.links[:count]) <= self._arriving.largest

    def fetch(self, names: Names, manifest: Manifest, count: int, progress: Progress) -> list[ColdEntry]:
        """The entries of the first `count` files, here now. Raises Gone, Cancelled, BadEntry, StoreFailed, DirectoryFull, OSError."""
        chain: list[ColdEntry] = []
        for link in manifest.links[:count]:
            here = self._here(manifest, link) or self._arriving.adopt(names.fingerprint, link.file, link.checksum, chain[-1] if chain else None)
            chain.append(here or self._once(names, link, chain, progress))
        return chain

    def _here(self, manifest: Manifest, link: Link) -> ColdEntry | None:
        return self._arriving.there(manifest.fingerprint, link.file, link.checksum)

    def _once(self, names: Names, link: Link, chain: Sequence[ColdEntry], progress: Progress) -> ColdEntry:
        """One file, by whoever comes first; others that want it wait for that one."""
        place = names.fingerprint, link.file
        while True:
            with self._lock:
                coming = self._coming.get(place)
                if coming is None:
                    ours = self._coming[place] = Future()
                    break
            while not wait([coming], 0.05).done:
                if progress.stop():
                    raise Cancelled
            try:
                return coming.result()
            except Cancelled:  # who fetched it does not wait any more, but we do
                if progress.stop():
                    raise
        try:
            entry = self._file(names, link, chain, progress)
        except BaseException as error:
            self._came(place)
            ours.set_exception(error if isinstance(error, Exception) else Cancelled())
            raise
        self._came(place)
        ours.set_result(entry)
        return entry

    def _came(self, place: tuple[str, str]) -> None:
        """Before those that wait know: whoever fetches it again is not to meet it."""
        with self._lock:
            del self._coming[place]

    def _file(self, names: Names, link: Link, chain: Sequence[ColdEntry], progress: Progress) -> ColdEntry:
        partial = self._arriving.begin(link.nbytes, chain)
        try:
            # The first failure stops the others: nothing may write to a file that is given up.
            failed = threading.Event()

            def read(number: int) -> None:
                try:
                    self._piece(names, link, number, partial, progress, failed)
                except BaseException:
                    failed.set()
                    raise

            reading = [self._executor.submit(read, number) for number in range(len(link.pieces))]
            errors = [error for one in reading if (error := one.exception()) is not None]
            if errors:
                raise next((error for error in errors if not isinstance(error, Cancelled)), errors[0])
            return self._arriving.finish(partial, names.fingerprint, link.file, link.checksum, chain[-1] if chain else None)
        finally:
            partial.discard()

    def _piece(self, names: Names, link: Link, number: int, partial: Partial, progress: Progress, failed: threading.Event) -> None:
        digest, size = link.pieces[number], link.sizes()[number]
        at = number * PIECE

        def ask() -> None:
            hasher, read = hashlib.sha256(), 0

            def take(chunk: memoryview) -> None:
                nonlocal read
                if failed.is_set() or progress.stop():
                    raise Cancelled
                began = time.thread_time()
                hasher.update(chunk)
                partial.write(chunk, at + read)
                read += len(chunk)
                progress.nbytes += len(chunk)
                progress.rest(time.thread_time() - began)

            if failed.is_set() or progress.stop():
                raise Cancelled
            if not self._objects.read(names.place(PIECES, digest), size, take):
                raise Gone("a piece of it is not there")
            if (read, hasher.hexdigest()) != (size, digest):
                raise Damaged("a piece is not what its name says")

        persistent(ask, lambda: failed.is_set() or progress.stop())
