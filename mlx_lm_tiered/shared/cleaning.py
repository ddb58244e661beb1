"""The end of what is old: entries that nobody used for long go, and the least recently used while all take more than they may.

An entry's last use is when its manifest or its object in ``uses/`` was written last,
whichever is later, by the store's clock. A manifest goes before its pieces, so that no
reader sees half an entry, and a piece when no manifest names it. Rungs that named what
went name another entry that begins with the same tokens, as long as there is one.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from .fetching import Cancelled
from .lookup import read_manifest, written_rung
from .manifest import Manifest
from .names import ENTRIES, FOLDERS, PIECES, RUNGS, USES, Names, Team
from .objects import Damaged, Listed, Objects, persistent

_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger("mlx_lm_tiered")

DAY = 24 * 3600.0
GRACE = DAY  # what was written this lately may be part of an upload that goes on


@dataclass(frozen=True)
class Cleaned:
    """What there was and what went: entries, and bytes of all objects."""

    entries: int = 0
    nbytes: int = 0
    gone: int = 0
    gone_bytes: int = 0


Place = tuple[str, str]  # a model's folder, and the name of an object in one of its folders


@dataclass
class _Entry:
    folder: str
    name: str
    used: float
    usable: bool = False
    pieces: frozenset[Place] = frozenset()
    rungs: tuple[str, ...] = ()  # that lead to it, if they name it

    def of(self, manifest: Manifest, team: Team) -> _Entry:
        """With what its manifest says, but for the tokens: those of all entries would take too much memory."""
        pieces = frozenset((self.folder, piece) for link in manifest.links for piece in link.pieces)
        rungs = tuple(digest for _, digest in Names(team, manifest.fingerprint).rungs(manifest.key))
        return replace(self, usable=True, pieces=pieces, rungs=rungs)


class Cleaning:
    """Deletes below a team's folder. `max_bytes` of 0 and `ttl` (seconds) of 0 stand for no limit."""

    def __init__(self, objects: Objects, team: Team, executor: Executor, max_bytes: int, ttl: float, clock: Callable[[], float] = time.time):
        self._objects = objects
        self._team = team
        self._executor = executor
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._clock = clock
        self._stop: Callable[[], bool] = lambda: False
        self.last = Cleaned()

    def daily(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Clean, unless some machine did it in the last day. Raises StoreFailed, and Cancelled soon after `stop()`."""
        last = self._objects.when(self._team.cleaned)
        if last is not None and abs(self._clock() - last) < DAY:
            return
        self._stop = stop
        self.last = self.clean(latest=self.begun())
        if self.last.gone:
            logger.info("shared cache: deleted %d of %d entries (%.2f GB)", self.last.gone, self.last.entries, self.last.gone_bytes / 1e9)

    def begun(self) -> float | None:
        """Note that old entries are deleted now, and when that is by the store's clock. Raises StoreFailed."""
        persistent(lambda: self._objects.put(self._team.cleaned, b""))
        return persistent(lambda: self._objects.when(self._team.cleaned)) or None  # 0 is what a server that does not say comes to

    def clean(self, dry_run: bool = False, latest: float | None = None) -> Cleaned:
        """Delete what is old or too much. Raises StoreFailed.

        It is not later than `latest`, by the store's clock: a machine whose clock is ahead would delete what all others use.
        """
        now = min(self._clock(), latest) if latest is not None else self._clock()
        folders = [f"{self._team.folder}/{name}" for name in self._objects.folders(self._team.folder) if _DIGEST.fullmatch(name)]
        there = {folder: {kind: self._ours(folder, kind) for kind in FOLDERS} for folder in folders}
        entries = [entry for folder in folders for entry in self._entries(folder, there[folder])]
        pieces = {(folder, piece.name): piece for folder in folders for piece in there[folder][PIECES]}
        kept, gone = self._choose(now, entries, {place: piece.size for place, piece in pieces.items()})
        if not dry_run:
            for entry in gone:
                self._drop(entry.folder, ENTRIES, entry.name)
            kept += self._later(folders, {(entry.folder, entry.name) for entry in kept})
        needed = {place for entry in kept for place in entry.pieces}
        doomed = {place for entry in gone for place in entry.pieces}
        # Those of an upload that goes on are needed by a manifest that is not there yet.
        fresh = now - GRACE
        unused = [place for place, piece in pieces.items() if place not in needed and (piece.when < fresh or place in doomed)]
        if not dry_run:
            self._delete(fresh, there, kept, gone, unused)
        total = sum(one.size for found in there.values() for kind in FOLDERS for one in found[kind])
        return Cleaned(len(entries), total, len(gone), sum(pieces[place].size for place in unused))

    def _ours(self, folder: str, kind: str) -> list[Listed]:
        """The objects of a folder that are named as ours are. What else is there, or where a link in a shared directory leads, stays."""
        named = _SHA256 if kind == PIECES else _DIGEST
        return [one for one in self._objects.files(f"{folder}/{kind}") if named.fullmatch(one.name)]

    def _later(self, folders: list[str], known: set[Place]) -> list[_Entry]:
        """The entries that were uploaded while others were chosen and deleted: they need what they found there."""
        found = {folder: [one for one in self._ours(folder, ENTRIES) if (folder, one.name) not in known] for folder in folders}
        return [entry for folder in folders for entry in self._entries(folder, {ENTRIES: found[folder], USES: []}) if entry.usable]

    def _entries(self, folder: str, found: dict[str, list[Listed]]) -> Iterator[_Entry]:
        uses = {use.name: use.when for use in found[USES]}

        def read(listed: Listed) -> _Entry:
            self._go_on()
            entry = _Entry(folder, listed.name, max(listed.when, uses.get(listed.name, 0.0)))
            try:
                manifest = persistent(lambda: read_manifest(self._objects, self._team, folder, listed.name, listed.size))
            except Damaged:
                return entry  # nobody can use it
            return entry.of(manifest, self._team) if manifest is not None else entry

        yield from self._executor.map(read, found[ENTRIES])

    def _choose(self, now: float, entries: list[_Entry], sizes: dict[Place, int]) -> tuple[list[_Entry], list[_Entry]]:
        """The entries that stay, and those that go, by their last use."""
        kept: list[_Entry] = []
        gone: list[_Entry] = []
        held: set[Place] = set()
        size = 0
        for entry in sorted(entries, key=lambda entry: -entry.used):
            more = sum(sizes.get(place, 0) for place in entry.pieces - held)
            if not entry.usable or (self._ttl and entry.used < now - self._ttl) or (self._max_bytes and size + more > self._max_bytes):
                gone.append(entry)
            else:
                kept.append(entry)
                held |= entry.pieces
                size += more
        return kept, gone

    def _delete(self, fresh: float, there: dict[str, dict[str, list[Listed]]], kept: list[_Entry], gone: list[_Entry], pieces: list[Place]) -> None:
        heirs: dict[Place, str] = {}  # rungs, and the entry used last of those that begin with their tokens
        for entry in kept:
            for digest in entry.rungs:
                heirs.setdefault((entry.folder, digest), entry.name)
        named = {(folder, one.name) for folder, found in there.items() for one in found[RUNGS]}
        orphaned = {(entry.folder, digest) for entry in gone for digest in entry.rungs}
        for place in sorted(orphaned & named):
            if place in heirs:
                folder, digest = place
                persistent(lambda: self._objects.put(f"{folder}/{RUNGS}/{digest}", written_rung(self._team, heirs[place])))  # noqa: B023
        for folder, found in there.items():
            for rung in found[RUNGS]:
                if (folder, rung.name) not in heirs and (rung.when < fresh or (folder, rung.name) in orphaned):
                    self._drop(folder, RUNGS, rung.name)
            names = {entry.name for entry in kept if entry.folder == folder}
            for use in found[USES]:
                if use.name not in names:
                    self._drop(folder, USES, use.name)
        for folder, piece in pieces:
            self._drop(folder, PIECES, piece)

    def _go_on(self) -> None:
        if self._stop():
            raise Cancelled

    def _drop(self, folder: str, kind: str, name: str) -> None:
        self._go_on()
        persistent(lambda: self._objects.delete(f"{folder}/{kind}/{name}"))

