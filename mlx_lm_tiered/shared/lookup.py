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
from .objects import Damaged, Objects, persistent

WAYS = 4  # a round of the search asks for one rung less
REMEMBERED = 30.0  # seconds for which a rung that was not there is not asked for again
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
        best = self.rung(names, *rungs[0], stop)
        if not best.length:
            self._remember(rungs[0][1])
            return best
        low, high = 0, len(rungs)  # the rung at `low` is there, the one at `high` is not
        while high - low > 1:
            ask = sorted({low + (high - low) * way // WAYS for way in range(1, WAYS)} - {low})
            answers = list(self._executor.map(lambda at: self.rung(names, *rungs[at], stop), ask))
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

    def manifest(self, names: Names, name: str, stop: Callable[[], bool] = lambda: False) -> Manifest | None:
        """One entry's manifest; None when it is gone. Raises StoreFailed, also for one that no attempt gives as it was written."""
        return persistent(lambda: read_manifest(self._objects, names.team, names.folder, name), stop)

    def forget_absent(self) -> None:
        """Ask again for what was not there: something was uploaded."""
        with self._lock:
            self._absent.clear()

    def _known_absent(self, digest: str) -> bool:
        with self._lock:
            return self._absent.get(digest, 0.0) > self._clock()

    def _remember(self, digest: str) -> None:
        with self._lock:
            self._absent[digest] = self._clock() + REMEMBERED
            self._absent.move_to_end(digest)
            while len(self._absent) > MANY:
                self._absent.popitem(last=False)


def read_manifest(objects: Objects, team: Team, folder: str, name: str) -> Manifest | None:
    """The manifest of an entry in a model's folder; None when there is none. Raises StoreFailed."""
    data = objects.get(f"{folder}/{ENTRIES}/{name}", MOST)
    try:
        return parse(data, team, folder, name) if data is not None else None
    except BadEntry as error:
        raise Damaged(f"a manifest is not used: {error}") from None


def written_rung(team: Team, name: str) -> bytes:
    """The bytes of a rung that names an entry."""
    return team.signed(name.encode())
