"""The SSD tier's store: which prefixes the directory holds, and taking them in and out."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..prefix.compact import pack
from .catalog import Catalog, ColdEntry, Found
from .directory import Directory, DirectoryFull
from .family import leaves_first
from .format import BadEntry, Meta, file_size
from .health import Bounded, Checking, Outage, logger
from .listing import Listed, listing
from .placing import continued_file, remove_superseded
from .indexing import Indexing
from .restore import Damaged, Lost, Restore, Restored
from .restoring import Restoring
from .scan import cold_entry
from .segments import ChainFull, Continuation, NotIdentical, Stale, continuation, inode
from .writer import EntryWriter

__all__ = ["ColdEntry", "ColdStore", "DirectoryFull", "Found", "NotIdentical", "Unavailable"]

# Nanoseconds; time stamps beyond (the year 2116) are nonsense that nobody should go on from.
MAX_TIME = 1 << 62

# What `stats` counts: bytes and tokens where the name says so, else events.
COUNTERS = (
    "restores", "restored_bytes", "restored_tokens", "stored", "stored_bytes", "superseded", "evictions", "quarantined",
    "corrupt", "gone", "read_errors", "write_errors", "skipped_too_large", "written_bytes", "new_token_bytes", "continued",
    "not_identical", "compactions", "aged_out", "found_later",
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
        self.on_restored: Callable[[str, int, float], None] = lambda fingerprint, size, seconds: None
        self._indexing = Indexing(
            self._directory, self._catalog, self._outage, self._log, self._get_below_the_cap, self._measure, self._damaged, self._add, clock
        )

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
        return self._covered(fingerprint, namespace, key, self._used)

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
                    self._count("untouched")  # not reachable for the moment: nobody can say it is gone
                    return True
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
        return Restoring(Restore(entry, self._checking, self._used), lambda: self._forgiving(entry), lambda seconds: self._restored(entry, seconds))

    @contextmanager
    def _forgiving(self, entry: ColdEntry) -> Iterator[None]:
        """Deal with what may befall a restore; whoever enters sees only that the end was not reached."""
        try:
            yield
            return
        except Lost as error:
            self._count("gone")
            self._catalog.forget(error.entry.path, error.entry)
            self._indexing.again(error.entry.path)
        except Damaged as error:
            self._damaged(error.entry.path, error.status, error)
            self._catalog.forget(error.entry.path, error.entry)
        except OSError as error:
            self._count("read_errors")
            self._log.warn("read", "SSD cache: reading %s failed (%s)", entry.path.name, error, limit=1)
        except (MemoryError, RuntimeError) as error:  # mlx reports an allocation that fails as a RuntimeError
            self._count("read_errors")
            self._log.warn("memory", "SSD cache: restoring %d tokens failed (%s)", entry.length, error, limit=1)
            return
        self._catalog.forget(entry.path, entry)

    def _restored(self, entry: ColdEntry, seconds: float) -> None:
        with self._lock:
            size = sum(one.nbytes for one in entry.chain)
            self._counts.update(restores=1, restored_bytes=size, restored_tokens=entry.length)
            self._seconds = {"last": seconds, "total": self._seconds["total"] + seconds}
        self.on_restored(entry.fingerprint, size, seconds)

    # Storing

    def begin(
        self,
        fingerprint: str,
        namespace: str,
        key: bytes,
        meta: Meta,
        *,
        force: bool = False,
        continue_until: int | None = None,
    ) -> EntryWriter:
        """A writer for one entry: write its tensors in order, then commit, which makes it durable and findable.

        `meta` as from `spill.describe`; fingerprint, namespace, length and time are
        set here. The tensors are to be written whole; what goes into the file is only
        what the longest stored beginning of the entry does not hold, of which no more
        than `continue_until` tokens are used. When that beginning turns out to hold
        other numbers, the writer raises NotIdentical, and its `since` is what
        `continue_until` should be in the next try. Makes room first. Raises
        DirectoryFull when the entry cannot fit, Unavailable while the directory rests
        after a failure (unless `force`), and OSError; the same from the writer.
        """
        if self._outage.retry_in("write") > 0 and not force:
            raise Unavailable("The cache directory failed lately.")
        meta = replace(meta, fingerprint=fingerprint, namespace=namespace, length=len(key) // 8, created=time.time_ns())
        proof = self._continuation(meta, key, meta.length if continue_until is None else continue_until)
        try:
            return self._open(meta, key, proof)
        except BaseException:
            if proof is not None:
                proof.close()
            raise

    def begin_next(self, parent: ColdEntry, key: bytes, meta: Meta) -> EntryWriter:
        """The same for an entry that goes on from the end of `parent`, of whose tensors only the slots of the new tokens are written.

        `meta` is still that of the whole entry. The caller vouches that its numbers for
        the tokens before are the parent's. Raises BadEntry for a parent that is
        gone or that the entry's tensors do not continue, and what `begin` raises.
        """
        if self._outage.retry_in("write") > 0:
            raise Unavailable("The cache directory failed lately.")
        meta = replace(meta, fingerprint=parent.fingerprint, length=len(key) // 8, created=time.time_ns())
        try:
            proof = Continuation(Found(parent, parent.length), meta)
        except Stale as error:
            raise BadEntry(str(error)) from error
        try:
            return self._open(meta, key, proof, partial=True)
        except BaseException:
            proof.close()
            raise

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
        self._measure()
        return len(doomed)

    def _continuation(self, meta: Meta, key: bytes, limit: int) -> Continuation | None:
        try:
            return continuation(self._catalog, meta, key, limit)
        except ChainFull:
            self._count("compactions")
        except OSError as error:  # what cannot be read is no reason not to write
            self._count("read_errors")
            self._log.warn("read", "SSD cache: what an entry continues could not be read (%s)", error, limit=1)
        return None

    def _open(self, meta: Meta, key: bytes, proof: Continuation | None, partial: bool = False) -> EntryWriter:
        temporary, fd = None, -1
        keep = {one.path for one in self._catalog.superseded(meta, key)}
        try:
            self._directory.prepare()
            with self._directory.locked():
                if proof is not None:
                    try:
                        self._evict(file_size(proof.meta), frozenset(keep), frozenset(one.path for one in proof.chain))
                    except DirectoryFull:
                        if partial:
                            raise
                        proof.close()  # without the chain there may be room for the whole entry
                        proof = None
                if proof is not None:
                    meta = proof.meta
                path = self._directory.entry_path(meta.fingerprint, meta.namespace, key, meta.parent)
                size = file_size(meta)
                if proof is None:
                    self._evict(size, frozenset({path, *keep}))
                temporary, fd = self._directory.create_partial(size)
            writer = EntryWriter(
                temporary, fd, meta, key,
                publish=lambda done: self._publish(done, path, writer, key, proof),
                proof=proof,
                partial=partial,
                wrote=lambda size: self._add("written_bytes", size),
            )  # fmt: skip
            return writer
        except DirectoryFull as error:
            self._count("skipped_too_large")
            self._log.warn("large", "SSD cache: %d tokens are not stored: %s", meta.length, error)
            raise
        except OSError as error:
            if temporary is not None:
                _discard(temporary, fd)
            self.write_failed(error)
            raise

    def not_identical(self) -> None:
        """Count an entry that could not continue what is stored."""
        self._count("not_identical")

    def write_failed(self, error: OSError) -> None:
        """Note that writing an entry failed: warn once, count, let the directory rest."""
        self._count("write_errors")
        self._outage.failed("write", f"writing to {self.root}", error)

    @property
    def retry_in(self) -> float:
        """Seconds until `begin` is worth calling again after a failure; else 0."""
        return self._outage.retry_in("write")

    def _publish(self, partial: Path, path: Path, writer: EntryWriter, key: bytes, proof: Continuation | None) -> None:
        meta, size = writer.meta, writer.size
        with self._directory.locked():
            if proof is not None:
                proof.confirm()
            if (there := continued_file(self._directory, self._catalog, path)) is not None:
                partial.unlink(missing_ok=True)
                self._use(there)
                return
            now = self._now()
            os.utime(partial, ns=(now, now))
            self._directory.publish(partial, path)
            parent = proof.chain[-1] if proof is not None else None
            entry = cold_entry(path, meta, pack(key), size, parent, writer.checksum, inode(path) or (0, 0))
            if not self._catalog.add(entry):  # the parent left it just now: it was found to be damaged
                path.unlink(missing_ok=True)
                raise NotIdentical(f"{path.name} lost its parent.", 0)
            for _ in remove_superseded(self._directory, self._catalog, entry, meta):
                self._count("superseded")
            if parent is not None:
                self._use(parent)
        self._measure()
        tokens = sum(spec.nbytes for spec, part in zip(meta.tensors, meta.by_token, strict=True) if part)
        with self._lock:
            self._counts.update(stored=1, stored_bytes=size, new_token_bytes=tokens, continued=int(proof is not None))
        self._outage.worked("write")

    def _evict(self, need: int, keep: frozenset[Path] = frozenset(), pinned: frozenset[Path] = frozenset()) -> None:
        """Make room, and forget what went. Call with the directory locked."""
        try:
            for path in self._directory.make_room(need, keep, pinned):
                self._catalog.forget(path)
                self._count("evictions")
        finally:
            self._measure()

    def _measure(self) -> int:
        usage = self._directory.usage()
        with self._lock:
            self._usage = usage
        return usage

    # Looking after itself

    def stats(self) -> dict[str, Any]:
        """Counters and sizes. `bytes` are those of all files of the directory when it was last looked at; `scans` what became of the files, by fingerprint."""
        with self._lock:
            counts, seconds = Counter(self._counts), dict(self._seconds)
            usage = self._usage
        segments, longest_chain = self._catalog.counts()
        return {
            "directory": str(self.root),
            "entries": len(self._catalog),
            "segments": segments,
            "longest_chain": longest_chain,
            "bytes": usage,
            "max_bytes": self.max_bytes,
            **{name: counts[name] for name in COUNTERS},
            "restore_seconds_last": seconds["last"],
            "restore_seconds_total": seconds["total"],
            "verify": self._checking.mode,
            **self._indexing.stats(),
            "longest_durable_prefix_tokens": self._catalog.longest(),
        }

    def entries(self) -> Iterator[Listed]:
        """Everything stored, of all models, read from the files."""
        return listing(self._directory)

    def clear(self, fingerprint: str | None = None) -> int:
        """Delete all entries (of one model), and all damaged files; returns how many files went. Raises OSError."""
        count = 0
        with self._directory.locked():
            ours = [f for f in self._directory.files() if f.kind == "bad" or (f.kind == "entry" and fingerprint in (None, f.owner))]
            for file in leaves_first(ours, lambda f: f.used):
                file.path.unlink(missing_ok=True)
                self._catalog.forget(file.path)
                count += 1
            self._measure()
        return count

    def close(self) -> None:
        """End the scans; files stay."""
        self._indexing.close(10.0)
        try:
            self._directory.close()
        except OSError as error:
            logger.debug("SSD cache: closing: %s", error)

    # Inside

    def _damaged(self, path: Path, status: os.stat_result, error: BadEntry | Damaged) -> None:
        self._count("corrupt")
        self._log.warn("damaged", "SSD cache: %s is damaged and was put away: %s", path.name, error)
        self._indexing.put_away(path, status)

    def _use(self, entry: ColdEntry) -> None:
        """Note the use of an entry, in all its files."""
        with suppress(OSError):  # recency is not worth what was just done
            for one in reversed(entry.chain):
                self._used(one.path)

    def _used(self, file: Path | int) -> None:
        """Note the use of a file, in the file. Raises OSError."""
        now = self._now()
        os.utime(file, ns=(now, now))

    def _get_below_the_cap(self) -> None:
        """At start, and with the directory locked."""
        self._go_on_from(max((file.used for file in self._directory.files() if file.kind == "entry"), default=0))
        self._evict(0)

    def _go_on_from(self, last: int) -> None:
        """Let uses from now on be later than any in the files: the clock may have been set back since."""
        if last < MAX_TIME:
            with self._lock:
                self._last_use = max(self._last_use, last)

    def _now(self) -> int:
        """Nanoseconds since 1970, never the same twice, so that the order of uses is their order in the files."""
        with self._lock:
            self._last_use = max(self._last_use + 1, time.time_ns())
            return self._last_use

    def _count(self, name: str) -> None:
        self._add(name, 1)

    def _add(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number


def _discard(partial: Path, fd: int) -> None:
    os.close(fd)
    partial.unlink(missing_ok=True)
