"""What the store knows of the directory without looking: its entries, by their tokens and by their files."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..prefix.index import PrefixIndex
from .format import Meta


@dataclass(frozen=True, eq=False)
class ColdEntry:
    """A stored entry as the index knows it. `key` is its tokens (see `prefix.index`), `length` their number, `nbytes` the file's size."""

    key: bytes = field(repr=False)
    length: int
    path: Path
    fingerprint: str
    namespace: str
    nbytes: int
    cuttable: bool
    minimum_reusable: int
    role: str

    def serves(self, length: int) -> bool:
        """Whether its first `length` tokens can be used."""
        return length == self.length or (self.cuttable and 0 < length < self.length and length >= self.minimum_reusable)


class Found(NamedTuple):
    """An entry, and how many leading tokens of the query it serves."""

    entry: ColdEntry
    length: int


class Catalog:
    """Entries of all models and namespaces. Thread-safe; no method does I/O."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._indexes: dict[tuple[str, str], PrefixIndex[ColdEntry]] = {}
        self._paths: dict[Path, ColdEntry] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def find(self, fingerprint: str, namespace: str, key: bytes, limit: int) -> Found | None:
        """The entry that serves the longest prefix of `key`, of `limit` tokens at most."""

        def usable(entry: ColdEntry, common: int) -> int:
            length = min(common, limit)
            return length if entry.serves(length) else 0

        with self._lock:
            index = self._indexes.get((fingerprint, namespace))
            best = index.best(key, usable) if index is not None and limit > 0 else None
        return Found(*best) if best else None

    def closest(self, fingerprint: str, namespace: str, key: bytes) -> Found | None:
        """The entry that shares most leading tokens with `key`, usable or not, and how many."""
        with self._lock:
            index = self._indexes.get((fingerprint, namespace))
            best = index.closest(key) if index is not None else None
        return Found(*best) if best else None

    def superseded(self, meta: Meta, key: bytes) -> list[ColdEntry]:
        """Entries that an entry of `meta` and `key` makes superfluous: strict prefixes that it can serve itself."""
        with self._lock:
            index = self._indexes.get((meta.fingerprint, meta.namespace))
            if index is None or not meta.cuttable:
                return []
            return [a for a in index.ancestors(key) if a.length >= meta.minimum_reusable]

    def knows(self, path: Path) -> bool:
        return path in self._paths

    def add(self, entry: ColdEntry) -> None:
        """Add an entry; another under the same path gives way."""
        with self._lock:
            self.forget(entry.path)
            self._indexes.setdefault((entry.fingerprint, entry.namespace), PrefixIndex()).add(entry)
            self._paths[entry.path] = entry

    def add_older(self, entry: ColdEntry) -> None:
        """Add an entry read from a file, unless that was written anew meanwhile."""
        with self._lock:
            if entry.path not in self._paths:
                self.add(entry)

    def forget(self, path: Path, entry: ColdEntry | None = None) -> None:
        """Remove the entry of a file; with `entry`, only if it is still this one."""
        with self._lock:
            there = self._paths.get(path)
            if there is None or (entry is not None and there is not entry):
                return
            del self._paths[path]
            self._indexes[there.fingerprint, there.namespace].remove(there)

    def longest(self) -> int:
        """Tokens of the longest entry."""
        with self._lock:
            return max((entry.length for entry in self._paths.values()), default=0)
