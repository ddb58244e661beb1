"""Files that come from elsewhere while a server runs: written beside the others, checked as anybody's would be, then put in place and found."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .catalog import Catalog, ColdEntry
from .checking import BadEntry
from .directory import Directory
from .files import open_file
from .scan import read_segment
from .segments import inode
from .storing import Storing
from .tally import Tally
from .writer import full_sync


@dataclass
class Partial:
    """A file that is being written: `fd` is open for it, `size` bytes long from the start."""

    path: Path
    fd: int
    size: int

    def write(self, data: memoryview, at: int) -> None:
        """Write at a place. Raises OSError."""
        while data:
            count = os.pwrite(self.fd, data, at)
            data, at = data[count:], at + count

    def discard(self) -> None:
        """Close and delete it, if it is still there."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.path.unlink(missing_ok=True)


class Arriving:
    """Thread-safe. Nothing of it runs on the generation thread."""

    def __init__(self, directory: Directory, catalog: Catalog, tally: Tally, storing: Storing):
        self._directory = directory
        self._catalog = catalog
        self._tally = tally
        self._storing = storing

    @property
    def largest(self) -> int:
        """Bytes that all files together may have."""
        return self._directory.max_bytes - self._directory.side_room

    def there(self, fingerprint: str, file: str, checksum: str) -> ColdEntry | None:
        """The entry of a file, if it is here already and is this one."""
        entry = self._catalog.at(self._directory.root / "v1" / fingerprint / file)
        return entry if entry is not None and entry.checksum == checksum and inode(entry.path) == entry.inode else None

    def adopt(self, fingerprint: str, file: str, checksum: str, parent: ColdEntry | None) -> ColdEntry | None:
        """The entry of a file that another process put here; None when there is none. Raises FileExistsError when it is another one, OSError."""
        path = self._directory.root / "v1" / fingerprint / file
        if not os.path.lexists(path):
            return None
        try:
            entry = read_segment(path).entry(parent)
        except BadEntry:
            entry = None
        if entry is None or (entry.checksum, entry.fingerprint) != (checksum, fingerprint):
            raise FileExistsError(errno.EEXIST, "Another file of its name is here", str(path))
        with self._directory.locked():
            if inode(path) == entry.inode:
                self._catalog.add(entry)
        return self.there(fingerprint, file, checksum)

    def begin(self, size: int, chain: Sequence[ColdEntry]) -> Partial:
        """A new file of so many bytes, which goes on from `chain`. Makes room. Raises DirectoryFull, OSError."""
        self._directory.prepare()
        with self._directory.locked():
            self._storing.evict(size, pinned=frozenset(entry.path for entry in chain))
            path, fd = self._directory.create_partial(size)
        return Partial(path, fd, size)

    def finish(self, partial: Partial, fingerprint: str, file: str, checksum: str, parent: ColdEntry | None) -> ColdEntry:
        """Check the file and put it in place; when there is another of its name, that stays. Raises BadEntry, FileExistsError, OSError."""
        with open_file(partial.path) as reader:
            if (reader.header.checksum, reader.header.meta.fingerprint) != (checksum, fingerprint):
                raise BadEntry("It is another file than was to come.")
            reader.check()
        segment = replace(read_segment(partial.path), path=self._directory.root / "v1" / fingerprint / file)
        entry = segment.entry(parent)
        if entry is None:
            raise BadEntry("It is not what its name says, or continues something else.")
        full_sync(partial.fd)
        now = self._tally.now()
        os.utime(partial.fd, ns=(now, now))
        with self._directory.locked():
            if parent is not None and inode(parent.path) != parent.inode:
                raise FileNotFoundError(errno.ENOENT, "What it continues went meanwhile", str(parent.path))
            if (there := self._catalog.at(entry.path)) is not None and inode(there.path) == there.inode:
                return there
            if (there := self.adopt(fingerprint, file, checksum, parent)) is not None:
                return there
            self._directory.publish(partial.path, entry.path)
            if not self._catalog.add(entry):
                entry.path.unlink(missing_ok=True)
                raise BadEntry("Its chain cannot be used.")
        self._storing.measure()
        return entry
