"""The SSD tier's store: which prefixes the directory holds, and taking them in and out."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .catalog import Catalog, ColdEntry, Found
from .directory import Directory, DirectoryFull
from .format import BadEntry, Meta, file_size
from .health import Bounded, Checking, Outage, logger
from .listing import Listed, listing
from .restore import Damaged, Replaced, read_caches
from .scan import Scans, cold_entry, scan
from .writer import EntryWriter

__all__ = ["ColdEntry", "ColdStore", "DirectoryFull", "Found", "Unavailable"]

# What `stats` counts: bytes and tokens where the name says so, else events.
COUNTERS = (
    "restores", "restored_bytes", "restored_tokens", "stored", "stored_bytes", "superseded", "evictions", "quarantined",
    "corrupt", "gone", "read_errors", "write_errors", "skipped_too_large",
)  # fmt: skip


class Unavailable(OSError):
    """The directory failed lately and is not tried again yet."""


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
        self._lock = threading.RLock()  # over what follows; never held during I/O
        self._counts: Counter[str] = Counter()
        self._usage = 0
        self._seconds = {"last": 0.0, "total": 0.0}
        self._last_use = 0
        self._scanned: dict[str, dict[str, int]] = {}
        self._scans = Scans()
        self._scans.start("", self._housekeep)

    # Finding

    def attach(self, fingerprint: str) -> None:
        """Start to index this model's entries, in a thread of its own, once per fingerprint (again later if it failed). `find` does it too."""
        if self._outage.retry_in("read") == 0:
            self._scans.start(fingerprint, lambda: self._scan(fingerprint))

    def wait_scanned(self, timeout: float | None = None) -> bool:
        """Wait until all scans started so far have ended. False when time ran out."""
        return self._scans.wait(timeout)

    def find(self, fingerprint: str, namespace: str, key: bytes, limit: int) -> Found | None:
        """The entry that serves the longest prefix of `key`, of `limit` tokens at most. Looks at the index only."""
        self.attach(fingerprint)
        return self._catalog.find(fingerprint, namespace, key, limit)

    def closest(self, fingerprint: str, namespace: str, key: bytes) -> Found | None:
        """The entry that shares most leading tokens with `key`, usable or not, and how many: why a lookup did not find more."""
        return self._catalog.closest(fingerprint, namespace, key)

    def covers(self, fingerprint: str, namespace: str, key: bytes) -> bool:
        """Whether an entry that serves exactly these tokens is on disk. Looks whether its file still is."""
        return self._covered(fingerprint, namespace, key, lambda path: os.stat(path, follow_symlinks=False))

    def touch(self, fingerprint: str, namespace: str, key: bytes) -> bool:
        """The same, and note a use of these tokens that the store did not see (a hit in RAM)."""
        return self._covered(fingerprint, namespace, key, self._used)

    def _covered(self, fingerprint: str, namespace: str, key: bytes, look: Callable[[Path], object]) -> bool:
        length = len(key) // 8
        while (found := self.find(fingerprint, namespace, key, length)) and found.length == length:
            try:
                look(found.entry.path)
            except FileNotFoundError:
                self._catalog.forget(found.entry.path, found.entry)
            except OSError:
                self._count("untouched")  # not reachable for the moment: nobody can say it is gone
                return True
            else:
                return True
        return False

    # Restoring

    def restore(self, entry: ColdEntry) -> list[Any] | None:
        """The entry's caches, with room to grow; None when it cannot be had any more. Generation thread only.

        A damaged file is quarantined, one that has gone is forgotten. Memory at its
        highest: the caches, and on CUDA one tensor more.
        """
        started = time.perf_counter()
        try:
            caches = read_caches(entry, self._checking, self._used)
        except (FileNotFoundError, Replaced):
            self._count("gone")
        except Damaged as error:
            self._damaged(entry.path, error.status, error)
        except OSError as error:
            self._count("read_errors")
            self._log.warn("read", "SSD cache: reading %s failed (%s)", entry.path.name, error)
        except (MemoryError, RuntimeError) as error:  # mlx reports an allocation that fails as a RuntimeError
            self._count("read_errors")
            self._log.warn("memory", "SSD cache: restoring %d tokens failed (%s)", entry.length, error)
            return None
        else:
            seconds = time.perf_counter() - started
            with self._lock:
                self._counts.update(restores=1, restored_bytes=entry.nbytes, restored_tokens=entry.length)
                self._seconds = {"last": seconds, "total": self._seconds["total"] + seconds}
            return caches
        self._catalog.forget(entry.path, entry)
        return None

    # Storing

    def begin(
        self,
        fingerprint: str,
        namespace: str,
        key: bytes,
        meta: Meta,
        *,
        force: bool = False,
    ) -> EntryWriter:
        """A writer for one entry: write its tensors in order, then commit, which makes it durable and findable.

        `meta` as from `spill.describe`; fingerprint, namespace, length and time are
        set here. Makes room first. Raises DirectoryFull when the entry cannot fit,
        Unavailable while the directory rests after a failure (unless `force`), and
        OSError; the same from the writer.
        """
        if self._outage.retry_in("write") > 0 and not force:
            raise Unavailable("The cache directory failed lately.")
        meta = replace(meta, fingerprint=fingerprint, namespace=namespace, length=len(key) // 8, created=time.time_ns())
        size = file_size(meta)
        path = self._directory.entry_path(fingerprint, namespace, key)
        keep = frozenset({path, *(a.path for a in self._catalog.superseded(meta, key))})
        partial, fd = None, -1
        try:
            self._directory.prepare()
            with self._directory.locked():
                self._evict(size, keep)
                partial, fd = self._directory.create_partial(size)
            return EntryWriter(partial, fd, meta, key, lambda done: self._publish(done, path, meta, key, size))
        except DirectoryFull as error:
            self._count("skipped_too_large")
            self._log.warn("large", "SSD cache: %d tokens are not stored: %s", meta.length, error)
            raise
        except OSError as error:
            if partial is not None:
                _discard(partial, fd)
            self.write_failed(error)
            raise

    def write_failed(self, error: OSError) -> None:
        """Note that writing an entry failed: warn once, count, let the directory rest."""
        self._count("write_errors")
        self._outage.failed("write", f"writing to {self.root}", error)

    @property
    def retry_in(self) -> float:
        """Seconds until `begin` is worth calling again after a failure; else 0."""
        return self._outage.retry_in("write")

    def _publish(self, partial: Path, path: Path, meta: Meta, key: bytes, size: int) -> None:
        entry = cold_entry(path, meta, key, size)
        with self._directory.locked():
            os.utime(partial, ns=(self._now(), self._now()))
            self._directory.publish(partial, path)
            self._catalog.add(entry)
            for ancestor in self._catalog.superseded(meta, key):
                ancestor.path.unlink(missing_ok=True)
                self._catalog.forget(ancestor.path, ancestor)
                self._count("superseded")
        self._measure()
        with self._lock:
            self._counts.update(stored=1, stored_bytes=size)
        self._outage.worked("write")

    def _evict(self, need: int, keep: frozenset[Path] = frozenset()) -> None:
        """Make room, and forget what went. Call with the directory locked."""
        try:
            for path in self._directory.make_room(need, keep):
                self._catalog.forget(path)
                self._count("evictions")
        finally:
            self._measure()

    def _measure(self) -> None:
        usage = self._directory.usage()
        with self._lock:
            self._usage = usage

    # Looking after itself

    def stats(self) -> dict[str, Any]:
        """Counters and sizes. `bytes` are those of all files of the directory when it was last looked at; `scans` what became of the files, by fingerprint."""
        with self._lock:
            counts, seconds = Counter(self._counts), dict(self._seconds)
            usage, scans = self._usage, dict(self._scanned)
        return {
            "directory": str(self.root),
            "entries": len(self._catalog),
            "bytes": usage,
            "max_bytes": self.max_bytes,
            **{name: counts[name] for name in COUNTERS},
            "restore_seconds_last": seconds["last"],
            "restore_seconds_total": seconds["total"],
            "verify": self._checking.mode,
            "scans": scans,
            "scanning": self._scans.running,
            "longest_durable_prefix_tokens": self._catalog.longest(),
        }

    def entries(self) -> Iterator[Listed]:
        """Everything stored, of all models, read from the files."""
        return listing(self._directory)

    def clear(self, fingerprint: str | None = None) -> int:
        """Delete all entries (of one model), and all damaged files; returns how many files went. Raises OSError."""
        count = 0
        with self._directory.locked():
            for file in self._directory.files():
                if file.kind == "bad" or (file.kind == "entry" and fingerprint in (None, file.owner)):
                    file.path.unlink(missing_ok=True)
                    self._catalog.forget(file.path)
                    count += 1
            self._measure()
        return count

    def close(self) -> None:
        """End the scans; files stay."""
        self._scans.close(10.0)
        try:
            self._directory.close()
        except OSError as error:
            logger.debug("SSD cache: closing: %s", error)

    # Inside

    def _housekeep(self) -> None:
        """At start: make the directory, remove what dead writers left, get below the cap."""
        try:
            self._directory.prepare()
            reaped = self._directory.reap()
            with self._directory.locked():
                self._evict(0)
            if reaped:
                logger.info("SSD cache: removed %d unfinished files of processes that ended", reaped)
        except OSError as error:
            self._outage.failed("write", f"preparing {self.root}", error)
        except DirectoryFull as error:
            self._log.warn("large", "SSD cache: %s", error)

    def _scan(self, fingerprint: str) -> None:
        counts: Counter[str] = Counter()
        self._scans.wait_for("")  # which makes the directory
        try:
            files = self._directory.files()
            for entry in scan(files, fingerprint, self._catalog.knows, self._damaged, counts):
                self._catalog.add_older(entry)
                if self._scans.closed:
                    return
            self._measure()
            free = os.statvfs(self.root)
        except OSError as error:
            self._outage.failed("read", f"scanning {self.root}", error)
            self._scans.forget(fingerprint)  # so that it is tried again
            return
        self._outage.worked("read")
        with self._lock:
            self._scanned[fingerprint] = dict(counts)
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(counts.items()) if why not in ("scanned", "indexed"))
        logger.info(
            "SSD cache %s: scanned %d, indexed %d, skipped: %s; %.2f of %.2f GB used, %.1f GB free on the disk",
            self.root, counts["scanned"], counts["indexed"], skipped or "none", self._usage / 1e9, self.max_bytes / 1e9,
            free.f_bavail * free.f_frsize / 1e9,
        )  # fmt: skip

    def _damaged(self, path: Path, status: os.stat_result, error: BadEntry | Damaged) -> None:
        self._count("corrupt")
        self._log.warn("damaged", "SSD cache: %s is damaged and was put away: %s", path.name, error)
        try:
            if self._directory.quarantine(path, status):
                self._count("quarantined")
        except OSError as failure:
            logger.debug("SSD cache: quarantine: %s", failure)

    def _used(self, file: Path | int) -> None:
        """Note the use of a file, in the file. Raises OSError."""
        now = self._now()
        os.utime(file, ns=(now, now))

    def _now(self) -> int:
        """Nanoseconds since 1970, never the same twice, so that the order of uses is their order in the files."""
        with self._lock:
            self._last_use = max(self._last_use + 1, time.time_ns())
            return self._last_use

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _discard(partial: Path, fd: int) -> None:
    os.close(fd)
    partial.unlink(missing_ok=True)
