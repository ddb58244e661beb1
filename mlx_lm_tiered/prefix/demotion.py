"""Demotion: entries that nobody used for a while leave RAM once they are on disk. Their prefixes stay reachable."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from ..statistics import Statistics
from .ram import Entry, RamTier

if TYPE_CHECKING:
    from .ssd import SsdTier

# An entry that could not be written when its turn came is offered again after this time.
OFFER_AGAIN = 30.0


class Demotion:
    """Demotes from one RAM tier to the SSD tier: after `idle` seconds without use (0: only when told to).

    Nothing leaves RAM before the directory holds it: demotion with nowhere to
    demote to would be data loss. Generation thread only, but for `due_now`.
    """

    def __init__(self, ram: RamTier, ssd: SsdTier, statistics: Statistics, idle: float, clock: Callable[[], float] = time.monotonic):
        self._ram = ram
        self._ssd = ssd
        self._statistics = statistics
        self._idle = idle
        self._clock = clock
        self._due: dict[Hashable | None, float] = {}  # namespace (None: all) -> uses before this time count as long ago
        # What left RAM by itself must not be held by being remembered here.
        self._offered: WeakKeyDictionary[Entry, float] = WeakKeyDictionary()
        self._told: WeakSet[Entry] = WeakSet()

    def due_now(self, namespace: Hashable | None = None) -> float:
        """Make everything used before now due, of one namespace or of all. Returns the time. Any thread."""
        self._due[namespace] = now = self._clock()
        return now

    def demote(self, entry: Entry) -> bool:
        """Demote this entry, now if the directory holds it, else once it does. Whether it has left RAM."""
        if not self._ssd.holds(entry):
            self._told.add(entry)
            return False
        self._leave(entry)
        return True

    def turn(self) -> bool:
        """Demote one entry, or have one written that must be before. Whether there was something to do."""
        now = self._clock()
        for entry in self._ram:
            if not self._is_due(entry, now):
                continue
            if self._ssd.holds(entry):
                self._leave(entry)
                return True
            if now - self._offered.get(entry, -OFFER_AGAIN) >= OFFER_AGAIN:
                self._offered[entry] = now
                if self._ssd.offer(entry, kept=True):
                    return True
        return False

    def left(self, before: float) -> int:
        """Entries in RAM that were last used before this time. Any thread."""
        return sum(entry.last_used <= before for entry in self._ram)

    def _leave(self, entry: Entry) -> None:
        self._ram.remove(entry)
        self._offered.pop(entry, None)
        self._statistics.count("demotions")

    def _is_due(self, entry: Entry, now: float) -> bool:
        if (self._idle and now - entry.last_used >= self._idle) or entry in self._told:
            return True
        return entry.last_used <= max(self._due.get(None, -1.0), self._due.get(entry.namespace, -1.0))
