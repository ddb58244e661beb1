"""The threads that look at the directory: housekeeping at start, one scan per model, and later looks for what other processes did there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .aging import age_out
from .catalog import Catalog
from .checking import BadEntry
from .directory import LOCK_TIMEOUT, Directory, DirectoryFull
from .health import Bounded, Outage
from .scan import Scans, scan
from .storing import Storing
from .tally import Tally

logger = logging.getLogger("mlx_lm_tiered")

LOOK_EVERY = 3.0  # seconds from one look at a model's folder to the next, and only while requests come
UNSETTLED = 1.0  # a folder changed this lately may change again without its time stamp telling
# A scan begins this many seconds after it was asked for, unless somebody waits for it: a server that starts should not share the interpreter with it.
GRACE = 1.5
AT_ONCE = 0.25  # seconds that a request may wait for the directory's lock, when it came upon a damaged file
AGE_EVERY = 24 * 3600.0


class Indexing:
    """Keeps `catalog` to what is in `directory`. Thread-safe; nothing here waits but `wait` and `close`.

    `damaged` gets files to be put away.
    """

    def __init__(
        self,
        directory: Directory,
        catalog: Catalog,
        outage: Outage,
        log: Bounded,
        storing: Storing,
        tally: Tally,
        damaged: Callable[[Path, os.stat_result, BadEntry], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._directory = directory
        self._catalog = catalog
        self._outage = outage
        self._log = log
        self._storing = storing
        self._tally = tally
        self._damaged = damaged
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, dict[str, int]] = {}  # by fingerprint, what became of the files
        self._seen: dict[str, _Seen] = {}
        self._age_at = clock() + AGE_EVERY
        self._made = threading.Event()
        self._waited_for = threading.Event()
        self._scans = Scans()
        self._looks = Scans()
        self._scans.start("", self._housekeep)

    def attach(self, fingerprint: str) -> None:
        """Start to index a model's entries, once (again if that failed), and later to look for changes, every few seconds."""
        if self._outage.retry_in("read") > 0:
            return
        self._scans.start(fingerprint, lambda: self._scan(fingerprint))
        with self._lock:
            seen = self._seen.get(fingerprint)
            if seen is None or self._clock() < seen.look_at:
                return
            seen.look_at = self._clock() + LOOK_EVERY
        self._looks.start(fingerprint, lambda: self._look(fingerprint, seen))

    def again(self, path: Path) -> None:
        """Have the file at `path` read anew at the next look: it is not what was indexed."""
        with self._lock:
            if (seen := self._seen.get(path.parent.name)) is not None:
                seen.names.discard(path.name)
                seen.changed = -1

    def wait(self, timeout: float | None = None, fingerprint: str | None = None) -> bool:
        """Wait until the scan of one model has ended, or all of them and the housekeeping; looks do not count. False when time ran out."""
        self._waited_for.set()
        return self._scans.wait(timeout, fingerprint)

    def put_away(self, path: Path, status: os.stat_result) -> None:
        """Quarantine a damaged file. Whoever holds the directory's lock is not waited for here."""
        try:
            self._put_away(path, status, AT_ONCE)
        except TimeoutError:
            self._looks.start(path.name, lambda: self._put_away_later(path, status))

    def _put_away(self, path: Path, status: os.stat_result, timeout: float) -> None:
        try:
            if self._directory.quarantine(path, status, timeout):
                self._tally.add("quarantined", 1)
        except TimeoutError:
            raise
        except OSError as failure:
            logger.debug("SSD cache: quarantine: %s", failure)

    def wait_looked(self, timeout: float | None = None) -> bool:
        """Wait until the looks started so far have ended. False when time ran out."""
        return self._looks.wait(timeout)

    def stats(self) -> dict[str, Any]:
        """What became of the files, by fingerprint, and whether a scan runs."""
        with self._lock:
            return {"scans": dict(self._found), "scanning": self._scans.running}

    def close(self, timeout: float) -> None:
        """End the threads."""
        self._waited_for.set()
        self._scans.close(timeout)
        self._looks.close(timeout)

    # The threads

    def _put_away_later(self, path: Path, status: os.stat_result) -> None:
        try:
            self._put_away(path, status, LOCK_TIMEOUT)
        except TimeoutError as failure:  # the next scan finds it
            logger.debug("SSD cache: quarantine: %s", failure)
        finally:
            self._looks.forget(path.name)

    def _housekeep(self) -> None:
        """At start: make the directory, remove what dead writers left and what nobody can use, get below the cap."""
        try:
            try:
                self._directory.make()
            finally:
                self._made.set()
            self._directory.prepare()
            reaped = self._directory.reap()
            self._age()
            with self._directory.locked():
                self._storing.get_below_the_cap()
            if reaped:
                logger.info("SSD cache: removed %d unfinished files of processes that ended", reaped)
        except OSError as error:
            self._outage.failed("write", f"preparing {self._directory.root}", error)
        except DirectoryFull as error:
            self._log.warn("large", "SSD cache: %s", error)

    def _age(self) -> None:
        gone = age_out(self._directory, frozenset(self._seen))
        if gone:
            self._tally.add("aged_out", len(gone))
            size = sum(file.charge for file in gone)
            logger.info("SSD cache: removed %d files (%.2f GB) that nothing installed here can use and nothing used lately", len(gone), size / 1e9)

    def _scan(self, fingerprint: str) -> None:
        counts: Counter[str] = Counter()
        self._made.wait()  # not for the rest of the housekeeping, which may have to wait for another process
        self._waited_for.wait(GRACE)
        root = self._directory.root
        try:
            seen = _Seen(self._changed(fingerprint), self._clock() + LOOK_EVERY)
            files = self._directory.files()
            for _ in scan(files, fingerprint, self._catalog, self._damaged, counts):
                if self._scans.closed:
                    return
            used = self._storing.measure()
            free = os.statvfs(root)
        except OSError as error:
            self._outage.failed("read", f"scanning {root}", error)
            self._scans.forget(fingerprint)  # so that it is tried again
            return
        self._outage.worked("read")
        seen.names = {file.path.name for file in files if file.owner == fingerprint}
        seen.retry_orphans(counts, self._folder(fingerprint), self._catalog)
        with self._lock:
            self._found[fingerprint] = dict(counts)
            self._seen[fingerprint] = seen
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(counts.items()) if n and why not in ("scanned", "indexed"))
        logger.info(
            "SSD cache %s: scanned %d, indexed %d, skipped: %s; %.2f of %.2f GB used, %.1f GB free on the disk",
            root, counts["scanned"], counts["indexed"], skipped or "none", used / 1e9, self._directory.max_bytes / 1e9,
            free.f_bavail * free.f_frsize / 1e9,
        )  # fmt: skip

    def _look(self, fingerprint: str, seen: _Seen) -> None:
        """Take in what came to a model's folder since the last look, and forget what went."""
        try:
            if self._clock() >= self._age_at:
                self._age_at = self._clock() + AGE_EVERY
                self._age()
            self._take_in(fingerprint, seen)
        except OSError as error:  # the request path meets the same and says so
            logger.debug("SSD cache: looking at %s: %s", fingerprint, error)
        finally:
            self._looks.forget(fingerprint)

    def _take_in(self, fingerprint: str, seen: _Seen) -> None:
        changed = self._changed(fingerprint)
        if changed == seen.changed:
            return
        folder = self._folder(fingerprint)
        try:
            names = set(os.listdir(folder))
        except FileNotFoundError:
            names = set()
        with self._lock:
            gone, new = seen.names - names, names - seen.names
            seen.names, seen.changed = names, _settled(changed)
        for name in gone:
            if not (folder / name).exists():  # it may have come back
                self._catalog.forget(folder / name)
        unknown = [folder / name for name in new if not self._catalog.knows(folder / name)]
        files = self._directory.look_at(unknown)
        counts: Counter[str] = Counter()
        for _ in scan(files, fingerprint, self._catalog, self._damaged, counts):
            if self._looks.closed:
                return
        self._tally.add("found_later", counts["indexed"])
        with self._lock:
            seen.retry_orphans(counts, folder, self._catalog)

    def _folder(self, fingerprint: str) -> Path:
        return self._directory.root / "v1" / fingerprint

    def _changed(self, fingerprint: str) -> int:
        """When entries last came or went, in nanoseconds since 1970; 0 for no folder."""
        try:
            return os.stat(self._folder(fingerprint), follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return 0


def _settled(changed: int) -> int:
    """A folder's time stamp; -1, which none equals, for one so fresh that it may hide a change that comes at once."""
    return changed if time.time_ns() - changed > UNSETTLED * 1e9 else -1


class _Seen:
    """What the last look at a model's folder saw: its names, and when it had `changed`."""

    def __init__(self, changed: int, look_at: float):
        self.names: set[str] = set()
        self.changed = _settled(changed)
        self.look_at = look_at

    def retry_orphans(self, counts: Counter[str], folder: Path, catalog: Catalog) -> None:
        """Entries whose parent was not there are read again when the folder has changed: it may come yet."""
        if counts["without parent"]:
            self.names = {name for name in self.names if catalog.knows(folder / name)}

