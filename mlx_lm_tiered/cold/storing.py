"""Taking entries into the directory: room for them, what they continue, and putting the finished file in place."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from ..index.keys import pack
from .catalog import Catalog, ColdEntry, Found
from .checking import BadEntry
from .directory import Directory, DirectoryFull
from .format import file_size, layout
from .health import Bounded, Outage
from .meta import Meta
from .placing import continued_file, remove_superseded
from .scan import cold_entry
from .segments import ChainFull, Continuation, NotIdentical, Stale, continuation, inode
from .tally import Tally
from .writer import EntryWriter


class Unavailable(OSError):
    """The directory failed lately and is not tried again yet."""


class Continued(Exception):
    """Others continue the file that was to be replaced."""


class Storing:
    """The writing half of the store. Thread-safe."""

    def __init__(self, directory: Directory, catalog: Catalog, tally: Tally, outage: Outage, log: Bounded):
        self._directory = directory
        self._catalog = catalog
        self._tally = tally
        self._outage = outage
        self._log = log

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
        except (Stale, FileNotFoundError) as error:
            raise BadEntry(str(error)) from error
        try:
            return self._open(meta, key, proof, partial=True)
        except BaseException:
            proof.close()
            raise

    def _continuation(self, meta: Meta, key: bytes, limit: int) -> Continuation | None:
        try:
            return continuation(self._catalog, meta, key, limit)
        except ChainFull:
            self._tally.add("compactions")
        except OSError as error:  # what cannot be read is no reason not to write
            self._tally.add("read_errors")
            self._log.warn("read", "SSD cache: what an entry continues could not be read (%s)", error, limit=1)
        return None

    def _open(self, meta: Meta, key: bytes, proof: Continuation | None, partial: bool = False) -> EntryWriter:
        temporary, fd = None, -1
        keep = {one.path for one in self._catalog.superseded(meta, key)}
        try:
            self._directory.prepare()
            header = layout(meta if proof is None else proof.meta)
            with self._directory.locked():
                if proof is not None:
                    try:
                        self.evict(file_size(proof.meta, header), frozenset(keep), frozenset(one.path for one in proof.chain))
                    except DirectoryFull:
                        if partial:
                            raise
                        proof.close()  # without the chain there may be room for the whole entry
                        proof, header = None, layout(meta)
                if proof is not None:
                    meta = proof.meta
                path = self._directory.entry_path(meta.fingerprint, meta.namespace, key, meta.parent)
                size = file_size(meta, header)
                if proof is None:
                    self.evict(size, frozenset({path, *keep}))
                temporary, fd = self._directory.create_partial(size)
            writer = EntryWriter(
                temporary, fd, meta, key,
                publish=lambda done: self._publish(done, path, writer, key, proof),
                proof=proof,
                partial=partial,
                wrote=lambda size: self._tally.add("written_bytes", size),
                header=header,
            )  # fmt: skip
            return writer
        except DirectoryFull as error:
            self._tally.add("skipped_too_large")
            self._log.warn("large", "SSD cache: %d tokens are not stored: %s", meta.length, error)
            raise
        except OSError as error:
            if temporary is not None:
                _discard(temporary, fd)
            self.failed(error)
            raise

    def rewrite(self, entry: ColdEntry, meta: Meta) -> EntryWriter:
        """A writer for an entry that is stored as a chain and shall be one file, of `meta`. Its use stays when it was.

        The chain goes when the file is in place, except what others continue. Evicts
        nothing: raises DirectoryFull when there is no room beside everything else.
        Raises Stale for an entry that was replaced or is gone, Continued for one that
        must stay as it is, also from `commit`; and OSError.
        """
        size = file_size(meta)
        path = self._directory.entry_path(meta.fingerprint, meta.namespace, entry.key)
        with self._directory.locked():
            self._replaceable(entry)
            if self._directory.room() < size:
                raise DirectoryFull(f"There is no room for {size} bytes more.")
            partial, fd = self._directory.create_partial(size)
        try:
            writer = EntryWriter(
                partial, fd, meta, entry.key,
                publish=lambda done: self._publish(done, path, writer, entry.key, None, entry),
                wrote=lambda size: self._tally.update(written_bytes=size, compacted_bytes=size),
            )  # fmt: skip
        except BaseException:
            _discard(partial, fd)
            raise
        return writer

    def _replaceable(self, entry: ColdEntry) -> None:
        """Check that an entry's file is the one that is known, and that nothing continues it, no other process's either. Call with the directory locked."""
        if inode(entry.path) != entry.inode:
            raise Stale(entry)
        _, children = self._directory.family(entry.path.parent)
        if children[entry.name]:
            raise Continued(f"{entry.path.name} is continued.")

    def _publish(
        self, partial: Path, path: Path, writer: EntryWriter, key: bytes, proof: Continuation | None, instead: ColdEntry | None = None
    ) -> None:
        """Put a file in place; `instead` is the entry that it holds anew."""
        meta, size = writer.meta, writer.size
        with self._directory.locked():
            if instead is not None:
                self._replaceable(instead)  # what was deleted meanwhile should not come back
            if proof is not None:
                proof.confirm()
            if (there := continued_file(self._directory, self._catalog, path)) is not None:
                partial.unlink(missing_ok=True)
                self._tally.use(there)
                return
            used = self._tally.now() if instead is None else os.stat(instead.path, follow_symlinks=False).st_mtime_ns
            os.utime(partial, ns=(used, used))
            self._directory.publish(partial, path)
            parent = proof.chain[-1] if proof is not None else None
            entry = cold_entry(path, meta, pack(key), size, parent, writer.checksum, inode(path) or (0, 0))
            if not self._catalog.add(entry):  # the parent left it just now: it was found to be damaged
                path.unlink(missing_ok=True)
                raise NotIdentical(f"{path.name} lost its parent.", 0)
            for _ in remove_superseded(self._directory, self._catalog, entry, meta):
                self._tally.add("superseded")
            if parent is not None:
                self._tally.use(parent)
        self.measure()
        if instead is not None:
            self._tally.add("compacted")
            return
        self._tally.update(stored=1, stored_bytes=size, new_token_bytes=meta.token_bytes, continued=int(proof is not None))
        self._outage.worked("write")

    def get_below_the_cap(self) -> None:
        """At start, and with the directory locked."""
        self._tally.go_on_from(max((file.used for file in self._directory.files() if file.kind == "entry"), default=0))
        self.evict(0)

    def evict(self, need: int, keep: frozenset[Path] = frozenset(), pinned: frozenset[Path] = frozenset()) -> None:
        """Make room, and forget what went. Call with the directory locked."""
        try:
            for path in self._directory.make_room(need, keep, pinned):
                self._catalog.forget(path)
                self._tally.add("evictions")
        finally:
            self._tally.usage = self._directory.used

    def measure(self) -> int:
        """Look at the bytes of the whole directory. Raises OSError."""
        self._tally.usage = usage = self._directory.usage()
        return usage

    def failed(self, error: OSError) -> None:
        """Note that writing failed: warn once, count, let the directory rest."""
        self._tally.add("write_errors")
        self._outage.failed("write", f"writing to {self._directory.root}", error)


def _discard(partial: Path, fd: int) -> None:
    os.close(fd)
    partial.unlink(missing_ok=True)
