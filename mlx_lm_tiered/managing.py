"""What the tiers hold, entry by entry, and doing something to one: for the people who run a server. Any thread but the generation thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .cold.catalog import ColdEntry
from .cold.checking import BadEntry
from .cold.files import open_file
from .identity import model_name
from .prefix.orders import Orders
from .prefix.ram import Entry
from .prefix.tiers import TieredPrefixCache
from .storage import Storage

PATIENCE = 10.0  # seconds for the generation thread to have a turn: a long chunk of a prefill takes some
REMEMBERED = 10_000  # headers


class NoSuchEntry(Exception):
    """It has gone, or never was."""


@dataclass(frozen=True)
class Row:
    """One entry of a tier. `name` tells it from the others, `age` and `used` are seconds ago; None: not known. `continued` entries need it."""

    tier: str
    name: str
    model: str
    namespace: str
    tokens: int
    nbytes: int
    age: float | None
    used: float
    durable: bool
    role: str
    continued: int = 0


class Manager:
    """Looks into the tiers of one run, and changes them. What it does on the generation thread is done between two steps of those that decode."""

    def __init__(self, caches: Callable[[], list[TieredPrefixCache]], storage: Callable[[], Storage | None], orders: Orders):
        self._caches = caches
        self._storage = storage
        self._orders = orders
        self._headers: dict[tuple[Path, tuple[int, int]], tuple[str, float | None]] = {}

    def in_ram(self, limit: int) -> tuple[list[Row], int]:
        """The entries used last, and how many there are."""
        entries = sorted((entry for cache in self._caches() for entry in cache.ram), key=lambda entry: -entry.last_used)
        return [self._ram_row(entry, time.monotonic()) for entry in entries[:limit]], len(entries)

    def on_disk(self, limit: int) -> tuple[list[Row], int]:
        """The same for the disk, of the models served so far. Looks at every file."""
        storage = self._storage()
        if storage is None:
            return [], 0
        used = []
        for entry in storage.store.catalog.all():
            with suppress(OSError):
                used.append((entry.path.stat().st_mtime, entry))
        used.sort(key=lambda one: -one[0])
        return [self._disk_row(storage, entry, when, time.time()) for when, entry in used[:limit]], len(used)

    def find_on_disk(self, name: str) -> ColdEntry:
        """The entry that a row named. Raises NoSuchEntry."""
        storage = self._storage()
        found = [entry for entry in storage.store.catalog.all() if _name(entry) == name] if storage is not None else []
        if not found:
            raise NoSuchEntry
        return found[0]

    def continuing(self, name: str) -> int:
        """How many entries on disk need this one. Raises NoSuchEntry."""
        entry = self.find_on_disk(name)
        storage = self._storage()
        assert storage is not None
        return len(storage.store.catalog.continuing(entry)) - 1

    def demote(self, name: str) -> bool:
        """Have an entry leave RAM for the disk. Whether it has left at once. Raises NoSuchEntry, Busy, ValueError without an SSD tier."""
        return self._orders.do(lambda: self._demote(name), PATIENCE)

    def delete_in_ram(self, name: str) -> int:
        """Let go of an entry in RAM, and of its place in the spill queue. Raises NoSuchEntry, Busy."""
        return self._orders.do(lambda: self._delete(name), PATIENCE)

    def delete_on_disk(self, name: str) -> int:
        """Delete an entry's file and those that continue it; how many. Raises NoSuchEntry, OSError."""
        entry, storage = self.find_on_disk(name), self._storage()
        assert storage is not None
        return storage.store.delete(entry)

    def clear(self) -> tuple[int, int]:
        """Let go of everything in RAM and in the queue, and delete everything on disk: (entries, files). Raises Busy, OSError."""
        entries = self._orders.do(self._clear, PATIENCE)
        storage = self._storage()
        return entries, storage.store.clear() if storage is not None else 0

    # On the generation thread

    def _in_ram(self, name: str) -> tuple[TieredPrefixCache, Entry]:
        for cache in self._caches():
            for entry in cache.ram:
                if str(entry.number) == name:
                    return cache, entry
        raise NoSuchEntry

    def _demote(self, name: str) -> bool:
        cache, entry = self._in_ram(name)
        if cache.demotion is None:
            raise ValueError("there is no SSD tier to demote to (--ssd-cache)")
        return cache.demotion.demote(entry)

    def _delete(self, name: str) -> int:
        cache, entry = self._in_ram(name)
        cache.forget(entry)
        if (storage := self._storage()) is not None:
            storage.queue.forget(entry.key)
        return 1

    def _clear(self) -> int:
        count = 0
        for cache in self._caches():
            for entry in cache.entries():
                cache.forget(entry)
                count += 1
        if (storage := self._storage()) is not None:
            count += storage.queue.forget()
        return count

    # Rows

    def _ram_row(self, entry: Entry, now: float) -> Row:
        storage = self._storage()
        beside = entry.companion
        return Row(
            "ram", str(entry.number), _model(entry), f"{beside.schema}/{beside.version}" if beside is not None else "", entry.length, entry.nbytes,
            now - entry.created, now - entry.last_used, storage is not None and storage.tier.holds(entry), entry.role,
        )  # fmt: skip

    def _disk_row(self, storage: Storage, entry: ColdEntry, used: float, now: float) -> Row:
        model, created = self._header(entry)
        return Row(
            "ssd", _name(entry), model, entry.namespace, entry.length, entry.nbytes, max(0.0, now - created) if created is not None else None,
            max(0.0, now - used), True, entry.role, len(storage.store.catalog.continuing(entry)) - 1,
        )  # fmt: skip

    def _header(self, entry: ColdEntry) -> tuple[str, float | None]:
        """The model's name and when the entry was written, in seconds since 1970, as its file says; files do not change."""
        known = entry.path, entry.inode
        if known not in self._headers:
            if len(self._headers) >= REMEMBERED:
                self._headers.clear()
            try:
                with open_file(entry.path) as reader:
                    meta = reader.header.meta
                self._headers[known] = str(meta.provenance.get("model", "")), meta.created / 1e9
            except (BadEntry, OSError):
                return "", None
        return self._headers[known]


def _name(entry: ColdEntry) -> str:
    return f"{entry.fingerprint}/{entry.path.stem}"


def _model(entry: Entry) -> str:
    return model_name(entry.source.path) or str(entry.source.key)
