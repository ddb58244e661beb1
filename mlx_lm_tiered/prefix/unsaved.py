"""Entries whose model has no fingerprint yet: hashing large weights takes minutes, and nothing can be written before.

They wait here, out of RAM's tier or also in it, and requests find them like those in RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ..index.prefixes import PrefixIndex
from .ram import Entry

LOST_BYTES = 64 << 20  # of the keys of what was given up


class Unsaved:
    """Holds at most `max_bytes` of entries, oldest first; the newest is never given up for it. Generation thread only, but for `lost`."""

    def __init__(self, max_bytes: int, kept: Callable[[Entry], bool]):
        """`kept(entry)` says whether the RAM tier has it too, so that a flush can still save it."""
        self.max_bytes = max_bytes
        self._kept = kept
        self._entries: dict[Entry, None] = {}
        self._indexes: dict[Hashable, PrefixIndex[Entry]] = {}
        self._lost: dict[tuple[Hashable, bytes], Any] = {}  # namespace and tokens -> their model
        self._lost_bytes = 0
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """All entries, oldest first; they may change meanwhile."""
        return iter(list(self._entries))

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    @property
    def lost(self) -> int:
        """Entries that could neither be kept nor saved, and are not on disk by another way. Any thread."""
        return len(self._lost) + self._forgotten

    def add(self, entry: Entry) -> None:
        """Have an entry wait, in place of those that it serves itself."""
        index = self._indexes.setdefault(entry.namespace, PrefixIndex())
        for other in [*index.ancestors(entry.key), index.exact(entry.key)]:
            if other is not None and entry.serves(other.length) and (other.companion is None or entry.companion is not None and entry.key == other.key):
                self.remove(other)
        self._entries[entry] = None
        self._indexes.setdefault(entry.namespace, index).add(entry)
        held = sum(other.nbytes for other in self._entries)
        for oldest in list(self._entries)[:-1]:
            if held <= self.max_bytes:
                break
            held -= oldest.nbytes
            self.remove(oldest)
            if not self._kept(oldest):
                self._lose(oldest)

    def remove(self, entry: Entry) -> None:
        """Let go of an entry that waits."""
        del self._entries[entry]
        index = self._indexes[entry.namespace]
        index.remove(entry)
        if not len(index):
            del self._indexes[entry.namespace]

    def give_up(self, entry: Entry) -> None:
        """Let go of an entry whose memory is needed."""
        self.remove(entry)
        self._lose(entry)

    def offer_one(self, offer: Callable[[Entry], bool]) -> bool:
        """Hand over the oldest entry that `offer` takes. Whether there was one."""
        for entry in self:
            if offer(entry):
                self.remove(entry)
                return True
        return False

    def find(self, namespace: Hashable, key: bytes, usable: Callable[[Entry, int], int]) -> tuple[Entry, int] | None:
        """The entry that serves the longest prefix of `key`, and that length (see `PrefixIndex.best`)."""
        index = self._indexes.get(namespace)
        return index.best(key, usable) if index is not None else None

    def settle(self, covered: Callable[[Any, bytes], bool]) -> None:
        """Forget of what was given up that which `covered(source, key)` says is on disk after all."""
        for (namespace, key), source in list(self._lost.items()):
            if covered(source, key):
                del self._lost[namespace, key]
                self._lost_bytes -= len(key)

    def _lose(self, entry: Entry) -> None:
        if self._lost_bytes + len(entry.key) > LOST_BYTES or entry.companion is not None:
            self._forgotten += 1
        elif (entry.namespace, entry.key) not in self._lost:
            self._lost[entry.namespace, entry.key] = entry.source
            self._lost_bytes += len(entry.key)
