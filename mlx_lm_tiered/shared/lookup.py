"""Finding the entry that shares most with a prompt, in few small requests and without listing anything.

Whoever uploads an entry writes its rungs: an object for each of `names.LENGTHS` up to its
length, named by the digest of so many first tokens. So of a prompt's rungs those up to
some length are there, and that length is searched for: the first one alone, because most
prompts that are not there end with that one request; then three at a time, which is one
round trip for a quarter of what is left.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from ..cold.checking import BadEntry
from .manifest import MOST, Manifest, parse
from .names import DIGITS, ENTRIES, RUNGS, Names, Team
from .objects import Damaged, Objects, StoreFailed, persistent

WAYS = 4  # a round of the search asks for one rung less
REMEMBERED = 30.0  # seconds for which a rung that was not there is not asked for again
DISTRUSTED = 600.0  # seconds for which an entry that could not be had is not asked for again
MANY = 4096
RUNG_BYTES = 64 + 1 + DIGITS  # its signature, and a NAME
_NAME = re.compile(rb"[0-9a-f]{%d}" % DIGITS)


@dataclass(frozen=True)
class Reached:
    """The longest rung of a prompt that is there: its length, and the entry that it names; (0, "") for none."""

    length: int = 0
    name: str = ""


class Lookup:
    """Asks the rungs and manifests of a store. Thread-safe; `executor` runs what may run at the same time."""

    def __init__(self, objects: Objects, executor: Executor, clock: Callable[[], float] = time.monotonic):
        self._objects = objects
        self._executor = executor
        self._clock = clock
        self._lock = threading.Lock()
        self._absent: OrderedDict[str, float] = OrderedDict()  # DIGEST -> until when it is believed
        self._broken: OrderedDict[str, float] = OrderedDict()  # where a manifest is -> until when it is not asked for

    def worth(self, names: Names, key: bytes, above: int, most: int) -> bool:
        """Whether `reach` would ask for anything."""
        rungs = names.rungs(key, above, most)
        return bool(rungs) and not self._known_absent(rungs[0][1])

    def reach(self, names: Names, key: bytes, above: int, most: int, *, fresh: bool = False, stop: Callable[[], bool] = lambda: False) -> Reached:
        """The longest rung of `key` that is there, of those longer than `above` and of `most` tokens at most. Raises StoreFailed.

        What was not there lately is not asked for again, unless `fresh`. Nobody waits any more when `stop()`.
        """
        rungs = names.rungs(key, above, most)
        if not rungs or (not fresh and self._known_absent(rungs[0][1])):
            return Reached()
        try:
            best = self.rung(names, *rungs[0], stop)
        except Damaged:
            if not fresh:
                self._remember(rungs[0][1])
                raise
            best = Reached()  # who asks writes it anew
        if not best.length:
            self._remember(rungs[0][1])
            return best

        def ask_for(at: int) -> Reached:
            try:
                return self.rung(names, *rungs[at], stop)
            except Damaged:  # those before it serve
                return Reached()

        low, high = 0, len(rungs)  # the rung at `low` is there, the one at `high` is not
        while high - low > 1:
            ask = sorted({low + (high - low) * way // WAYS for way in range(1, WAYS)} - {low})
            answers = list(self._executor.map(ask_for, ask))
            for at, found in zip(ask, answers, strict=True):
                if found.length:
                    low, best = at, found
                else:
                    high = at
                    break
        return best

    def rung(self, names: Names, length: int, digest: str, stop: Callable[[], bool] = lambda: False) -> Reached:
        """One rung. Raises StoreFailed, also for one that no attempt gives as it was written."""

        def ask() -> Reached:
            data = self._objects.get(names.place(RUNGS, digest), RUNG_BYTES)
            if data is None:
                return Reached()
            name = names.team.opened(data)
            if name is None or not _NAME.fullmatch(name):
                raise Damaged("a rung is not signed with the team's key")
            return Reached(length, name.decode())

        return persistent(ask, stop)

    def found(self, names: Names, key: bytes) -> bool:
        """Whether the longest rung of `key` is there, which is written last. Raises StoreFailed."""
        try:
            return self.rung(names, *names.rungs(key)[-1]).length > 0
        except Damaged:
            return False

    def manifest(self, names: Names, name: str, stop: Callable[[], bool] = lambda: False) -> Manifest | None:
        """One entry's manifest; None when it is gone. Raises StoreFailed, also for one that no attempt gives as it was written."""
        return persistent(lambda: read_manifest(self._objects, names.team, names.folder, name), stop)

    def forget_absent(self) -> None:
        """Ask again for what was not there: something was uploaded."""
        with self._lock:
            self._absent.clear()

    def distrust(self, names: Names, name: str) -> None:
        """Note an entry that could not be had as its manifest says: it is left alone for a while, and the next upload that meets it writes anew."""
        with self._lock:
            _put(self._broken, names.place(ENTRIES, name), self._clock() + DISTRUSTED)

    def trust(self, names: Names, name: str) -> None:
        """Note that an entry was written anew."""
        with self._lock:
            self._broken.pop(names.place(ENTRIES, name), None)

    def broken(self, names: Names, name: str) -> bool:
        """Whether an entry is to be written anew."""
        with self._lock:
            return names.place(ENTRIES, name) in self._broken

    def distrusted(self, names: Names, name: str) -> bool:
        """Whether an entry is not to be asked for."""
        with self._lock:
            return self._broken.get(names.place(ENTRIES, name), 0.0) > self._clock()

    def _known_absent(self, digest: str) -> bool:
        with self._lock:
            return self._absent.get(digest, 0.0) > self._clock()

    def _remember(self, digest: str) -> None:
        with self._lock:
            _put(self._absent, digest, self._clock() + REMEMBERED)


def _put(remembered: OrderedDict[str, float], what: str, until: float) -> None:
    remembered[what] = until
    remembered.move_to_end(what)
    while len(remembered) > MANY:
        remembered.popitem(last=False)


def read_manifest(objects: Objects, team: Team, folder: str, name: str, size: int | None = None) -> Manifest | None:
    """The manifest of an entry in a model's folder, of `size` bytes where that is known; None when there is none.

    Raises StoreFailed, but Damaged only for the object itself, not when something else was answered in its place.
    """
    data = objects.get(f"{folder}/{ENTRIES}/{name}", MOST)
    try:
        return parse(data, team, folder, name) if data is not None else None
    except BadEntry as error:
        if data is not None and size is not None and len(data) != size:
            raise StoreFailed("an object that is read is not the one that is listed") from None
        raise Damaged(f"a manifest is not used: {error}") from None


def written_rung(team: Team, name: str) -> bytes:
    """The bytes of a rung that names an entry."""
    return team.signed(name.encode())
