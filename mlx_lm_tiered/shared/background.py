"""The thread that writes to the store: new entries, the uses of those that are there, and once a day the end of what is old."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

from ..checkpoints.pace import lower_priority
from ..cold.catalog import Catalog, ColdEntry
from ..cold.checking import BadEntry
from ..cold.health import Bounded
from .breaker import Breaker
from .cleaning import DAY, Cleaning
from .fetching import Cancelled
from .lookup import Lookup
from .names import USES, Names, Team
from .objects import Objects, StoreFailed
from .pushing import LEAST_TOKENS, Pushing

logger = logging.getLogger("mlx_lm_tiered")

EVERY = 0.5  # seconds between two looks for something to do
CLEAN_FIRST = 60.0  # seconds from the start to the first look whether the day's cleaning is due, and between two looks
CLEAN_EVERY = 3600.0
LOOK_EVERY = 3600.0  # seconds between two looks for what was used on this machine
MANY = 10_000  # uses that are remembered


class Background:
    """`busy()` says that requests run; with `always` it goes on then. Bytes a second are at most `bandwidth` (0: no limit) over time; one piece goes at once."""

    def __init__(
        self,
        objects: Objects,
        lookup: Lookup,
        catalog: Catalog,
        team: Team,
        breaker: Breaker,
        busy: Callable[[], bool],
        *,
        always: bool,
        bandwidth: int,
        cleaning: Cleaning,
    ):
        self._objects = objects
        self._catalog = catalog
        self._team = team
        self._breaker = breaker
        self._busy = busy
        self._always = always
        self._bandwidth = bandwidth
        self._cleaning = cleaning
        self._pushing = Pushing(objects, lookup, self._go)
        self._free_at = 0.0  # when the bandwidth allows the next bytes
        self._settled: WeakKeyDictionary[ColdEntry, str] = WeakKeyDictionary()  # those that need not be uploaded (any more): NAME in the store that stands for them
        self._uses: deque[tuple[Names, str]] = deque(maxlen=MANY)
        self._used: dict[str, float] = {}  # uses that were noted today, by place
        self._clean_at = time.monotonic() + CLEAN_FIRST
        self._look_at = time.monotonic() + LOOK_EVERY
        self._log = Bounded()
        self._seen = -1
        self.counts = {"uploads": 0, "uploads_there": 0, "uploads_failed": 0, "uses": 0}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlx-lm-tiered-upload", daemon=True)
        self._thread.start()

    def came(self, entry: ColdEntry, names: Names, name: str) -> None:
        """Note an entry that was fetched: it need not be uploaded, and was used."""
        self._settled[entry] = name
        self.use(names, name)

    def use(self, names: Names, name: str) -> None:
        """Have an entry's use noted in the store, once a day."""
        self._uses.append((names, name))

    def waiting(self) -> list[ColdEntry]:
        """The entries that are to be uploaded yet. Any thread."""
        return [entry for entry in self._catalog.tips(LEAST_TOKENS) if entry not in self._settled]

    def close(self, timeout: float = 2.0) -> None:
        """End soon. What is half uploaded is not found by anybody, and goes on at the next start."""
        self._closing.set()
        self._thread.join(timeout)

    # The thread

    def _run(self) -> None:
        lower_priority()
        while not self._closing.wait(EVERY):
            if self._breaker.open or (self._busy() and not self._always):
                continue
            try:
                if self._work():
                    self._breaker.worked()
            except StoreFailed as error:
                self._breaker.failed(error, error.denied)
            except Cancelled:
                pass
            except Exception as error:  # whatever it is, requests are served without it
                logger.warning("shared cache: uploading failed (%s: %s)", type(error).__name__, error)
                self._breaker.failed(error, denied=True)

    def _work(self) -> bool:
        """Do what there is to do. Whether the store was needed for it. Raises StoreFailed."""
        asked = self._objects.counts()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY
            self._look_for_uses()
        while self._uses:
            self._note_use(*self._uses[0])
            self._uses.popleft()
        if self._catalog.added != self._seen:
            self._upload()
        if time.monotonic() >= self._clean_at:
            self._clean_at = time.monotonic() + CLEAN_EVERY
            try:
                self._cleaning.daily(self._closing.is_set)
            except StoreFailed as error:  # a store that cannot list takes uploads all the same
                self._log.warn("clean", "shared cache: old entries cannot be deleted (%s)", error, limit=1)
        return self._objects.counts() != asked

    def _upload(self) -> None:
        seen = self._catalog.added
        for entry in sorted(self.waiting(), key=lambda entry: -entry.length):
            names = Names(self._team, entry.fingerprint)
            try:
                pushed = self._pushing.push(names, entry)
                self.counts["uploads" if pushed.outcome == "uploaded" else "uploads_there"] += 1
            except (BadEntry, OSError) as error:  # the file is gone or damaged: it is not the store's fault
                logger.debug("shared cache: %s is not uploaded: %s", entry.path.name, error)
                self.counts["uploads_failed"] += 1
                self._settled[entry] = ""
            else:
                self._settled[entry] = names.entry(entry.key)
        self._seen = seen  # when the store failed there is something left

    def _look_for_uses(self) -> None:
        """What is in the store and was used here lately is used, though nobody asked the store for it."""
        for ref in self._settled.keyrefs():  # a copy, which fetches do not change meanwhile
            entry = ref()
            name = self._settled.get(entry) if entry is not None else None
            with suppress(OSError):
                if entry is not None and name and time.time() - os.stat(entry.path).st_mtime < LOOK_EVERY:
                    self.use(Names(self._team, entry.fingerprint), name)

    def _note_use(self, names: Names, name: str) -> None:
        place = names.place(USES, name)
        now = time.monotonic()
        if now - self._used.get(place, -DAY) < DAY:
            return
        last = self._objects.when(place)
        # Also one from the future: a clock was set back.
        if last is None or abs(time.time() - last) > DAY:
            self._objects.put(place, b"")
            self.counts["uses"] += 1
        if len(self._used) >= MANY:
            self._used.clear()
        self._used[place] = now

    def _go(self, size: int) -> bool:
        """Wait until so many bytes may be sent. False at the end."""
        while (self._busy() and not self._always) or time.monotonic() < self._free_at:
            if self._closing.wait(0.05):
                return False
        if self._bandwidth:
            self._free_at = max(time.monotonic(), self._free_at) + size / self._bandwidth
        return not self._closing.is_set()
