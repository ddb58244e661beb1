"""The SSD tier's store: which prefixes the directory holds, and taking them in and out."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..histogram import Histogram
from .arriving import Arriving
from .catalog import Catalog, ColdEntry, Found
from .checking import BadEntry
from .directory import Directory, DirectoryFull
from .family import leaves_first
from .health import Bounded, Checking, Outage, logger
from .indexing import Indexing
from .listing import Listed, listing
from .meta import Meta
from .restore import Damaged, Lost, Restore, Restored
from .restoring import Restoring
from .segments import NotIdentical, inode
from .storing import Storing, Unavailable
from .tally import Tally
from .writer import EntryWriter

RESTORE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

__all__ = ["ColdEntry", "ColdStore", "DirectoryFull", "Found", "NotIdentical", "Unavailable"]


class ColdStore:
    """Prefix entries in `root`, never more than `max_bytes` with everything else there. Thread-safe, except `restore`.

    Nothing here raises for the directory's sake but `begin` and the writer it
    returns: a missing, full, read-only or damaged directory is a miss and a counter.
    `verify` is ``auto``, ``always`` or ``never`` (see `health.Checking`).
    """

    def __init__(self, root: Path, max_bytes: int, verify: str = "auto", *, clock: Callable[[], float] = time.monotonic):
        self.root = Path(root).expanduser().absolute()
        self.max_bytes = max_bytes
        self._directory = Directory(self.root, max_bytes)
        self._checking = Checking(verify)
        self._outage = Outage(clock)
        self._log = Bounded()
        self._catalog = Catalog()
        self._tally = Tally()
        self._lock = threading.Lock()
        self._seconds = 0.0, 0.0  # of the last restore, of all
        self.restore_times = Histogram(RESTORE_SECONDS)
        self.on_restored: Callable[[str, int, float], None] = lambda fingerprint, size, seconds: None
        self.storing = Storing(self._directory, self._catalog, self._tally, self._outage, self._log)
        self.arriving = Arriving(self._directory, self._catalog, self._tally, self.storing)
        self._indexing = Indexing(self._directory, self._catalog, self._outage, self._log, self.storing, self._tally, self.damaged, clock)

    @property
    def catalog(self) -> Catalog:
        """What is known of the directory."""
        return self._catalog

    # Finding

    def attach(self, fingerprint: str) -> None:
        """Start to index this model's entries, in a thread of its own, once per fingerprint (again later if it failed), and to look for new ones now and then. `find` does it too."""
        self._indexing.attach(fingerprint)

    def wait_scanned(self, timeout: float | None = None, fingerprint: str | None = None) -> bool:
        """Wait until the scan of one model, or all that was started so far, has ended. False when time ran out."""
        return self._indexing.wait(timeout, fingerprint)

    def find(self, fingerprint: str, namespace: str, key: bytes, limit: int) -> Found | None:
        """The entry that serves the longest prefix of `key`, of `limit` tokens at most. Looks at the index only."""
        self.attach(fingerprint)
        return self._catalog.find(fingerprint, namespace, key, limit)

    def namespaces(self, fingerprint: str) -> list[str]:
        """The namespaces in which this model has entries."""
        return self._catalog.namespaces(fingerprint)

    def closest(self, fingerprint: str, namespace: str, key: bytes) -> Found | None:
        """The entry that shares most leading tokens with `key`, usable or not, and how many: why a lookup did not find more."""
        return self._catalog.closest(fingerprint, namespace, key)

    def covers(self, fingerprint: str, namespace: str, key: bytes) -> bool:
        """Whether an entry that serves exactly these tokens is on disk. Looks whether its files still are."""
        return self._covered(fingerprint, namespace, key, lambda path: os.stat(path, follow_symlinks=False))

    def touch(self, fingerprint: str, namespace: str, key: bytes) -> bool:
        """The same, and note a use of these tokens that the store did not see (a hit in RAM)."""
        return self._covered(fingerprint, namespace, key, self._tally.used)

    def _covered(self, fingerprint: str, namespace: str, key: bytes, look: Callable[[Path], object]) -> bool:
        length = len(key) // 8
        while (found := self._serving(fingerprint, namespace, key)) and found.length == length:
            for entry in reversed(found.entry.chain):
                try:
                    look(entry.path)
                except FileNotFoundError:
                    self._catalog.forget(entry.path, entry)
                    break
                except OSError:
                    return True  # not reachable for the moment: nobody can say it is gone
            else:
                return True
        return False

    def _serving(self, fingerprint: str, namespace: str, key: bytes) -> Found | None:
        """What serves these tokens with all that is stored for them: longer entries do where there is no companion state."""
        length = len(key) // 8
        if not namespace:
            return self.find(fingerprint, namespace, key, length)
        self.attach(fingerprint)
        entry = self._catalog.exact(fingerprint, namespace, key)
        return Found(entry, length) if entry is not None else None

    # Restoring

    def restore(self, entry: ColdEntry) -> Restored | None:
        """The entry's caches, with room to grow; None when it cannot be had any more. Generation thread only.

        A damaged file is quarantined, one that has gone is forgotten, and with either
        all that continue it. Memory at its highest: the caches, and on CUDA one tensor
        more.
        """
        restoring = self.restoring(entry)
        restoring.read()
        return restoring.caches()

    def restoring(self, entry: ColdEntry) -> Restoring:
        """The same in steps, most of them on any one thread."""
        return Restoring(Restore(entry, self._checking, self._tally.used), lambda: self._forgiving(entry), lambda seconds: self._restored(entry, seconds))

    @contextmanager
    def _forgiving(self, entry: ColdEntry) -> Iterator[None]:
        """Deal with what may befall a restore; whoever enters sees only that the end was not reached."""
        try:
            yield
            return
        except Lost as error:
            self._tally.add("gone")
            self.gone(error.entry)
        except Damaged as error:
            self.damaged(error.entry.path, error.status, error)
            self._catalog.forget(error.entry.path, error.entry)
        except OSError as error:
            self._tally.add("read_errors")
            self._log.warn("read", "SSD cache: reading %s failed (%s)", entry.path.name, error, limit=1)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                return  # nothing is said of the file by that
        except (MemoryError, RuntimeError) as error:  # mlx reports an allocation that fails as a RuntimeError
            self._tally.add("read_errors")
            self._log.warn("memory", "SSD cache: restoring %d tokens failed (%s)", entry.length, error, limit=1)
            return
        self._catalog.forget(entry.path, entry)

    def _restored(self, entry: ColdEntry, seconds: float) -> None:
        size = sum(one.nbytes for one in entry.chain)
        self._tally.update(restores=1, restored_bytes=size, restored_tokens=entry.length)
        with self._lock:
            self._seconds = seconds, self._seconds[1] + seconds
        self.restore_times.observe(seconds)
        self.on_restored(entry.fingerprint, size, seconds)

    # Storing

    def begin(
        self, fingerprint: str, namespace: str, key: bytes, meta: Meta, *, force: bool = False, continue_until: int | None = None
    ) -> EntryWriter:
        """A writer for one entry (see `Storing.begin`). Raises DirectoryFull, Unavailable, OSError; the same from the writer."""
        return self.storing.begin(fingerprint, namespace, key, meta, force=force, continue_until=continue_until)

    def begin_next(self, parent: ColdEntry, key: bytes, meta: Meta) -> EntryWriter:
        """A writer for an entry that goes on from the end of `parent` (see `Storing.begin_next`). Raises BadEntry, and what `begin` raises."""
        return self.storing.begin_next(parent, key, meta)

    def newest(self, fingerprint: str, namespace: str, key: bytes, companion: str) -> ColdEntry | None:
        """The longest entry whose tokens begin with these and that has companion state of this kind."""
        found = [entry for entry in self._catalog.extending(fingerprint, namespace, key) if entry.companion == companion]
        return found[-1] if found else None

    def discard(self, fingerprint: str, namespace: str, keep: Iterable[ColdEntry] = ()) -> int:
        """Delete the entries of a namespace that those of `keep` do not need; returns how many went. Raises OSError."""
        needed = {one for entry in keep for one in entry.chain}
        doomed = [entry for entry in reversed(self._catalog.extending(fingerprint, namespace, b"")) if entry not in needed]
        if not doomed:
            return 0
        with self._directory.locked():
            for entry in doomed:
                if inode(entry.path) == entry.inode:
                    entry.path.unlink(missing_ok=True)
                self._catalog.forget(entry.path, entry)
        self.storing.measure()
        return len(doomed)

    def not_identical(self) -> None:
        """Count an entry that could not continue what is stored."""
        self._tally.add("not_identical")

    def write_failed(self, error: OSError) -> None:
        """Note that writing an entry failed: warn once, count, let the directory rest."""
        self.storing.failed(error)

    @property
    def retry_in(self) -> float:
        """Seconds until `begin` is worth calling again after a failure; else 0."""
        return self._outage.retry_in("write")

    # Looking after itself

    @property
    def restore_seconds(self) -> float:
        """What the last restore took."""
        return self._seconds[0]

    def stats(self) -> dict[str, Any]:
        """Counters and sizes. `bytes` are those of all files of the directory when it was last looked at; `scans` what became of the files, by fingerprint."""
        last, total = self._seconds
        segments, longest_chain = self._catalog.counts()
        return {
            "directory": str(self.root),
            "entries": len(self._catalog),
            "segments": segments,
            "longest_chain": longest_chain,
            "bytes": self._tally.usage,
            "max_bytes": self.max_bytes,
            **self._tally.counts(),
            "restore_seconds_last": last,
            "restore_seconds_total": total,
            "verify": self._checking.mode,
            **self._indexing.stats(),
            "longest_durable_prefix_tokens": self._catalog.longest(),
        }

    def entries(self) -> Iterator[Listed]:
        """Everything stored, of all models, read from the files."""
        return listing(self._directory)

    def delete(self, entry: ColdEntry) -> int:
        """Delete an entry's file, and those that continue it; returns how many went. Raises OSError."""
        with self._directory.locked():
            doomed = [one for one in self._catalog.continuing(entry) if inode(one.path) == one.inode]
            for one in reversed(doomed):
                one.path.unlink(missing_ok=True)
            self._catalog.forget(entry.path, entry)
            self.storing.measure()
        return len(doomed)

    def clear(self, fingerprint: str | None = None) -> int:
        """Delete all entries (of one model), and all damaged files; returns how many files went. Raises OSError."""
        count = 0
        with self._directory.locked():
            ours = [f for f in self._directory.files() if f.kind == "bad" or (f.kind == "entry" and fingerprint in (None, f.owner))]
            for file in leaves_first(ours, lambda f: f.used):
                file.path.unlink(missing_ok=True)
                self._catalog.forget(file.path)
                count += 1
            self.storing.measure()
        return count

    def close(self) -> None:
        """End the scans; files stay."""
        self._indexing.close(10.0)
        try:
            self._directory.close()
        except OSError as error:
            logger.debug("SSD cache: closing: %s", error)

    # Inside

    def gone(self, entry: ColdEntry) -> None:
        """An entry's file is gone or replaced: forget it, with all that continue it, and look at the file anew."""
        self._catalog.forget(entry.path, entry)
        self._indexing.again(entry.path)

    def damaged(self, path: Path, status: os.stat_result, error: BadEntry | Damaged) -> None:
        self._tally.add("corrupt")
        self._log.warn("damaged", "SSD cache: %s is damaged and was put away: %s", path.name, error)
        self._indexing.put_away(path, status)
