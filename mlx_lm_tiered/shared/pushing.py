"""Uploading an entry: its pieces, then its manifest, then the rungs by which it is found. What is there already is not sent again."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

from ..cold.catalog import ColdEntry
from ..cold.checking import BadEntry
from ..cold.files import open_file, read_at
from ..index.keys import WIDTH
from .fetching import Cancelled
from .lookup import Lookup, written_rung
from .manifest import PIECE, Link, Manifest
from .names import ENTRIES, LENGTHS, PIECES, RUNGS, Names
from .objects import Objects, persistent

LEAST_TOKENS = LENGTHS[0]  # of an entry, to be findable
MANY = 1 << 16  # pieces that are known to be there
BELIEVED = 3600.0  # seconds for which they are: what nothing names any more is deleted


class Pushed(NamedTuple):
    """What became of an entry, and the bytes of its pieces that were sent (or would be)."""

    outcome: Literal["uploaded", "there"]
    nbytes: int = 0


class Pushing:
    """Thread-safe. `go(size)` is asked before so many bytes are sent, and may wait; False gives up."""

    def __init__(self, objects: Objects, lookup: Lookup, go: Callable[[int], bool] = lambda size: True, clock: Callable[[], float] = time.monotonic):
        self._objects = objects
        self._lookup = lookup
        self._go = go
        self._lock = threading.Lock()
        self._clock = clock
        self._there: OrderedDict[str, float] = OrderedDict()  # pieces that were seen in the store -> until when that is believed

    def push(self, names: Names, entry: ColdEntry, *, anew: bool = False, dry_run: bool = False) -> Pushed:
        """Upload an entry with what it continues; `anew`, or when what there is of these tokens cannot be had, all of it again. Raises StoreFailed, Cancelled, BadEntry, OSError."""
        key = entry.key
        name = names.entry(key)
        anew = anew or self._lookup.broken(names, name)
        if not anew and persistent(lambda: self._objects.when(names.place(ENTRIES, name))) is not None:
            if not dry_run and not self._lookup.found(names, key):
                self._rungs(names, key, name)  # an upload ended before it wrote them
            return Pushed("there")
        links, sent = [], 0
        for one in entry.chain:
            link, size = self._link(names, one, anew, dry_run)
            links.append(link)
            sent += size
        if not dry_run:
            manifest = Manifest(entry.fingerprint, key, tuple(links)).encode(names.team)
            self._send(names.place(ENTRIES, name), manifest)
            self._lookup.trust(names, name)
            self._rungs(names, key, name)
            self._lookup.forget_absent()
        return Pushed("uploaded", sent)

    def _link(self, names: Names, one: ColdEntry, anew: bool, dry_run: bool) -> tuple[Link, int]:
        """A file of the chain, its pieces there; and how many bytes were sent for it."""
        pieces, sent = [], 0
        with open_file(one.path) as reader:
            if reader.header.checksum != one.checksum:
                raise BadEntry("It was replaced meanwhile.")
            reader.check()  # damage here is not to become everybody's
            for at in range(0, one.nbytes, PIECE):
                data = read_at(reader.fd, min(PIECE, one.nbytes - at), at)
                pieces.append(digest := hashlib.sha256(data).hexdigest())
                place = names.place(PIECES, digest)
                if self._known(place, anew):
                    continue
                sent += len(data)
                if not dry_run:
                    self._send(place, data)
                    self._saw(place)
        return Link(one.path.name, one.checksum, one.start, one.length, one.nbytes, one.cuttable, one.minimum_reusable, tuple(pieces)), sent

    def _rungs(self, names: Names, key: bytes, name: str) -> None:
        """Write the rungs that are not there; all of them when they lead to an entry that is gone, or cannot be had."""
        reached = self._lookup.reach(names, key, 0, len(key) // WIDTH, fresh=True)
        lost = reached.length and (
            self._lookup.broken(names, reached.name) or persistent(lambda: self._objects.when(names.place(ENTRIES, reached.name))) is None
        )
        for _, digest in names.rungs(key, 0 if lost else reached.length):
            self._send(names.place(RUNGS, digest), written_rung(names.team, name))

    def _known(self, place: str, anew: bool) -> bool:
        if anew:
            return False  # what is there may be damaged
        with self._lock:
            if self._there.get(place, 0.0) > self._clock():
                return True
        if persistent(lambda: self._objects.when(place)) is None:
            return False
        self._saw(place)
        return True

    def _saw(self, place: str) -> None:
        with self._lock:
            self._there[place] = self._clock() + BELIEVED
            self._there.move_to_end(place)
            if len(self._there) > MANY:
                self._there.popitem(last=False)

    def _send(self, place: str, data: bytes) -> None:
        if not self._go(len(data)):
            raise Cancelled
        persistent(lambda: self._objects.put(place, data))
