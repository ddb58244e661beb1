"""What the store knows of the directory without looking: its entries, by their tokens and by their files."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..index.compact import CompactIndex
from ..index.keys import unpack
from .family import NAME_DIGITS
from .meta import Meta

MAX_CHAIN = 64  # files of one chain. Each restore opens them all; the next entry is written whole.


@dataclass(frozen=True, eq=False)
class ColdEntry:
    """A stored entry as the index knows it. `packed` is its tokens (see `index.keys`), `length` their number, `nbytes` the file's size.

    The file holds the tokens from `start` on, those before are `parent`'s, which may
    hold more than that. `checksum` and `inode` tell this file from another at its path.
    `companion` is the kind of companion state that goes with all its tokens, if any.
    """

    packed: bytes = field(repr=False)
    length: int
    path: Path
    fingerprint: str
    namespace: str
    nbytes: int
    cuttable: bool
    minimum_reusable: int
    role: str
    start: int = 0
    parent: ColdEntry | None = field(default=None, repr=False)
    checksum: str = ""
    inode: tuple[int, int] = (0, 0)
    companion: str = ""

    @property
    def key(self) -> bytes:
        """Its tokens as a key (see `index.keys`), made anew each time."""
        return unpack(self.packed, self.length)

    @property
    def name(self) -> str:
        """What a segment that continues this one calls it."""
        return self.path.name[:NAME_DIGITS]

    @property
    def chain(self) -> list[ColdEntry]:
        """The entries that must be read for this one, from the whole entry at the root to this one."""
        links = [self]
        while (parent := links[-1].parent) is not None:
            links.append(parent)
        return links[::-1]

    def serves(self, length: int) -> bool:
        """Whether its first `length` tokens can be used."""
        return length == self.length or (self.cuttable and 0 < length < self.length and length >= self.minimum_reusable)


class Found(NamedTuple):
    """An entry, and how many leading tokens of the query it serves."""

    entry: ColdEntry
    length: int


class Catalog:
    """Entries of all models and namespaces, each with all it needs: no entry is here without its parent. Thread-safe; no method does I/O."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._indexes: dict[tuple[str, str], CompactIndex[ColdEntry]] = {}
        self._paths: dict[Path, ColdEntry] = {}
        self._children: dict[ColdEntry, set[ColdEntry]] = {}
        # Entries of the same tokens in two files, which a crash may leave; one of them is in the index.
        self._names: dict[tuple[str, str], list[ColdEntry]] = {}
        self.added = 0  # entries so far: who looks for new ones sees whether there are any

    def __len__(self) -> int:
        return len(self._paths)

    def find(self, fingerprint: str, namespace: str, key: bytes, limit: int) -> Found | None:
        """The entry that serves the longest prefix of `key`, of `limit` tokens at most; among a chain the one that needs least read."""

        def usable(entry: ColdEntry, common: int) -> int:
            length = min(common, limit)
            return length if entry.serves(length) else 0

        with self._lock:
            index = self._indexes.get((fingerprint, namespace))
            best = index.best(key, usable) if index is not None and limit > 0 else None
            if index is None or best is None:
                return None
            entry, length = best
            entry = index.exact(key[: length * 8]) or entry  # only it has companion state for these tokens
        while entry.parent is not None and length <= entry.start and entry.parent.serves(length):
            entry = entry.parent
        return Found(entry, length)

    def exact(self, fingerprint: str, namespace: str, key: bytes) -> ColdEntry | None:
        """The entry of exactly these tokens."""
        with self._lock:
            index = self._indexes.get((fingerprint, namespace))
            return index.exact(key) if index is not None else None

    def closest(self, fingerprint: str, namespace: str, key: bytes) -> Found | None:
        """The entry that shares most leading tokens with `key`, usable or not, and how many."""
        with self._lock:
            index = self._indexes.get((fingerprint, namespace))
            best = index.closest(key) if index is not None else None
        return Found(*best) if best else None

    def continued(self, fingerprint: str, namespace: str, key: bytes, limit: int) -> Found | None:
        """The entry that an entry of `key` might continue, and from which token on, `limit` at most.

        That of the longest shared prefix, or one that it continues itself: what it
        holds behind that prefix must be no more than what need not be written, because
        it will be kept as long as the new entry. Entries with a namespace may continue
        those without: the numbers for the same tokens are the same.
        """
        length = len(key) // 8
        best = None
        with self._lock:
            for place in dict.fromkeys((namespace, "")):
                index = self._indexes.get((fingerprint, place))
                found = index.best(key, lambda entry, common: min(common, limit) if common < length else 0) if index is not None else None
                if found is not None and (best is None or found[1] > best[1]):
                    best = found
        if best is None:
            return None
        entry, start = best
        # An entry of the same tokens gives way to the new one, so it cannot be its parent.
        while start <= entry.start or entry.length - start > start or entry.key == key:
            if entry.parent is None:
                return None
            start = min(start, entry.start)
            entry = entry.parent
        return Found(entry, start)

    def superseded(self, meta: Meta, key: bytes) -> list[ColdEntry]:
        """Entries that an entry of `meta` and `key` makes superfluous: strict prefixes that it can serve itself, which it never can with their companion state."""
        with self._lock:
            index = self._indexes.get((meta.fingerprint, meta.namespace))
            if index is None or not meta.cuttable:
                return []
            return [a for a in index.ancestors(key) if a.length >= meta.minimum_reusable and not a.companion]

    def namespaces(self, fingerprint: str) -> list[str]:
        """The namespaces in which there are entries."""
        with self._lock:
            return [namespace for owner, namespace in self._indexes if owner == fingerprint]

    def extending(self, fingerprint: str, namespace: str, key: bytes) -> list[ColdEntry]:
        """The entries whose tokens begin with these, shortest first."""
        with self._lock:
            index = self._indexes.get((fingerprint, namespace))
            return sorted(index.descendants(key), key=lambda entry: entry.length) if index is not None else []

    def knows(self, path: Path) -> bool:
        return path in self._paths

    def at(self, path: Path) -> ColdEntry | None:
        """The entry of a file."""
        return self._paths.get(path)

    def parent_for(self, fingerprint: str, name: str, checksum: str) -> ColdEntry | None:
        """The entry of this name and content."""
        with self._lock:
            return next((e for e in self._names.get((fingerprint, name), ()) if e.checksum == checksum), None)

    def add(self, entry: ColdEntry) -> bool:
        """Add an entry; another under the same path gives way. False when its parent is not here (any more), or its chain is too long."""
        with self._lock:
            self.forget(entry.path)
            parent = entry.parent
            if parent is not None:
                if self._paths.get(parent.path) is not parent or len(entry.chain) > MAX_CHAIN:
                    return False
                self._children.setdefault(parent, set()).add(entry)
            self._names.setdefault((entry.fingerprint, entry.name), []).append(entry)
            self._indexes.setdefault((entry.fingerprint, entry.namespace), CompactIndex()).add(entry)
            self._paths[entry.path] = entry
            self.added += 1
            return True

    def add_older(self, entry: ColdEntry) -> bool:
        """Add an entry read from a file, unless that was written anew meanwhile."""
        with self._lock:
            return entry.path in self._paths or self.add(entry)

    def forget(self, path: Path, entry: ColdEntry | None = None) -> None:
        """Remove the entry of a file, and all that continue it; with `entry`, only if it is still this one."""
        with self._lock:
            there = self._paths.get(path)
            if there is None or (entry is not None and there is not entry):
                return
            doomed = [there]
            for one in doomed:
                doomed.extend(self._children.pop(one, ()))
            for one in doomed:
                self._remove(one)

    def _remove(self, entry: ColdEntry) -> None:
        del self._paths[entry.path]
        if entry.parent is not None and entry.parent in self._children:
            self._children[entry.parent].discard(entry)
        index = self._indexes[entry.fingerprint, entry.namespace]
        index.remove(entry)
        twins = self._names[entry.fingerprint, entry.name]
        twins.remove(entry)
        if not twins:
            del self._names[entry.fingerprint, entry.name]
        elif index.exact(entry.key) is None:
            index.add(twins[-1])
        if not len(index):
            del self._indexes[entry.fingerprint, entry.namespace]

    def all(self) -> list[ColdEntry]:
        """Every entry."""
        with self._lock:
            return list(self._paths.values())

    def continuing(self, entry: ColdEntry) -> list[ColdEntry]:
        """The entry and all that cannot be without it, it first."""
        with self._lock:
            found = [entry]
            for one in found:
                found.extend(self._children.get(one, ()))
            return found

    def ends(self, files: int) -> list[ColdEntry]:
        """The entries that nothing continues and whose chains have at least so many files; not those of a namespace, which are more than prefixes."""
        with self._lock:
            ends = [e for e in self._paths.values() if e.parent is not None and not e.namespace and not self._children.get(e)]
            return [e for e in ends if len(e.chain) >= files]

    def tips(self, least: int) -> list[ColdEntry]:
        """The prefixes of at least so many tokens that nothing continues."""
        with self._lock:
            return [e for e in self._paths.values() if e.length >= least and not e.namespace and not self._children.get(e)]

    def counts(self) -> tuple[int, int]:
        """Entries that continue another, and the files of the longest chain."""
        with self._lock:
            level, depth = [e for e in self._paths.values() if e.parent is None], 0
            segments = len(self._paths) - len(level)
            while level:
                depth += 1
                level = [child for e in level for child in self._children.get(e, ())]
            return segments, depth

    def longest(self) -> int:
        """Tokens of the longest entry."""
        with self._lock:
            return max((entry.length for entry in self._paths.values()), default=0)
