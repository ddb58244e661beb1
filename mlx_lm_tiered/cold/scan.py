"""The start-up scan: what is in the directory for one model. Reads headers and tokens, no tensors."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..index.keys import pack
from .catalog import Catalog, ColdEntry
from .checking import BadEntry, ForeignEntry
from .family import DiskFile, entry_name
from .files import read_summary_and_tokens
from .meta import Meta

READERS = 2  # threads that read and hash; between them the interpreter's lock leaves room for no more
TOGETHER = 16  # files that one task reads: handing over each by itself costs as much as parsing it
AHEAD = 4  # tasks that may have been done and not yet been taken in


@dataclass(frozen=True)
class Segment:
    """What a file says of itself. `meta` may be without its tensors; `own` are the tokens it holds, as a key; `name` is what a whole entry's file should be called, and `packed` its tokens as the index has them."""

    path: Path
    meta: Meta
    own: bytes
    checksum: str
    size: int
    inode: tuple[int, int]
    name: str = ""
    packed: bytes = b""

    def entry(self, parent: ColdEntry | None) -> ColdEntry | None:
        """The index's entry, if `parent` is the one that this file continues and the file is what its name says."""
        meta = self.meta
        if (parent is None) != (meta.start == 0):
            return None
        if parent is not None and not (
            (parent.checksum, parent.name) == (meta.parent_checksum, meta.parent)
            and parent.fingerprint == meta.fingerprint
            and parent.namespace in ("", meta.namespace)
            and parent.start < meta.start <= parent.length
        ):
            return None
        key = parent.key[: meta.start * 8] + self.own if parent is not None else self.own
        if self.path.name != (self.name or entry_name(meta.namespace, key, meta.parent)):
            return None
        return cold_entry(self.path, meta, self.packed or pack(key), self.size, parent, self.checksum, self.inode)


def cold_entry(
    path: Path, meta: Meta, packed: bytes, nbytes: int, parent: ColdEntry | None, checksum: str, inode: tuple[int, int]
) -> ColdEntry:
    """The index's entry for a file."""
    return ColdEntry(
        packed=packed,
        length=meta.length,
        path=path,
        fingerprint=meta.fingerprint,
        namespace=meta.namespace,
        nbytes=nbytes,
        cuttable=meta.cuttable,
        minimum_reusable=meta.minimum_reusable,
        role=meta.role,
        start=meta.start,
        parent=parent,
        checksum=checksum,
        inode=inode,
        companion=meta.companion.kind if meta.companion is not None else "",
    )


def read_segment(path: Path) -> Segment:
    """Header and tokens of one file. Raises BadEntry or OSError."""
    meta, checksum, own, status = read_summary_and_tokens(path)
    inode = (status.st_dev, status.st_ino)
    if meta.start:
        return Segment(path, meta, own, checksum, status.st_size, inode)
    return Segment(path, meta, own, checksum, status.st_size, inode, entry_name(meta.namespace, own), pack(own))


def scan(
    files: list[DiskFile],
    fingerprint: str,
    catalog: Catalog,
    damaged: Callable[[Path, os.stat_result, BadEntry], None],
    counts: Counter[str],
) -> Iterator[None]:
    """Add every sound entry of this fingerprint to the catalog, in any order of files; a step per file.

    `damaged` gets those to be put away; `counts` says what became of the files. An
    entry whose parent is not there stays where it is until room is needed.
    """
    waiting: dict[str, list[Segment]] = {}  # by the checksum of their parent
    ours = [file for file in files if file.kind == "entry" and file.owner == fingerprint]
    if others := sum(file.kind == "entry" for file in files) - len(ours):
        counts["other models"] += others
    for file, looked in _ahead(ours, catalog):
        yield
        counts["scanned"] += 1
        if (known := catalog.at(file.path)) is not None:
            counts["indexed"] += 1
            _add_waiting(known, waiting, catalog, counts)
            continue
        try:
            if isinstance(looked, OSError):
                raise looked
            status, segment = looked if looked is not None else _look(file.path)
        except FileNotFoundError:
            counts["gone"] += 1
        except OSError:
            counts["unreadable"] += 1
        else:
            if isinstance(segment, ForeignEntry):
                counts["other format"] += 1
                continue
            if isinstance(segment, BadEntry):
                counts["damaged"] += 1
                damaged(file.path, status, segment)
                continue
            meta = segment.meta
            parent = catalog.parent_for(fingerprint, meta.parent, meta.parent_checksum) if meta.start else None
            if meta.fingerprint != fingerprint or meta.parent != file.parent:
                counts["misplaced"] += 1
            elif meta.start and parent is None:
                waiting.setdefault(meta.parent_checksum, []).append(segment)
            else:
                _add(segment, parent, waiting, catalog, counts)
    counts["without parent"] += sum(map(len, waiting.values()))


def catalog_of(files: list[DiskFile], fingerprints: Iterable[str]) -> Catalog:
    """A catalog of what files of a directory hold of these models; what is damaged stays where it is."""
    catalog = Catalog()
    for fingerprint in fingerprints:
        for _ in scan(files, fingerprint, catalog, lambda path, status, error: None, Counter()):
            pass
    return catalog


Looked = tuple[os.stat_result, "Segment | BadEntry"]  # which file it was, and what is in it


def _ahead(files: list[DiskFile], catalog: Catalog) -> Iterator[tuple[DiskFile, Looked | OSError | None]]:
    """The files in order, with what other threads found in each; None for those that the catalog has."""
    pending: deque[tuple[list[DiskFile], Future[list[Looked | OSError | None]]]] = deque()
    with ThreadPoolExecutor(READERS, "mlx-lm-tiered-scan-read") as pool:
        for start in range(0, len(files), TOGETHER):
            some = files[start : start + TOGETHER]
            pending.append((some, pool.submit(_look_at, some, catalog)))
            if len(pending) > AHEAD:
                yield from _taken(*pending.popleft())
        while pending:
            yield from _taken(*pending.popleft())


def _taken(files: list[DiskFile], reading: Future[list[Looked | OSError | None]]) -> Iterator[tuple[DiskFile, Looked | OSError | None]]:
    return zip(files, reading.result(), strict=True)


def _look_at(files: list[DiskFile], catalog: Catalog) -> list[Looked | OSError | None]:
    found: list[Looked | OSError | None] = []
    for file in files:
        try:
            found.append(None if catalog.knows(file.path) else _look(file.path))
        except OSError as error:
            found.append(error)
    return found


def _look(path: Path) -> Looked:
    """Read one file. Raises OSError."""
    status = os.stat(path, follow_symlinks=False)
    try:
        return status, read_segment(path)
    except BadEntry as error:
        return status, error


def _add(
    segment: Segment, parent: ColdEntry | None, waiting: dict[str, list[Segment]], catalog: Catalog, counts: Counter[str]
) -> None:
    entry = segment.entry(parent)
    if entry is None:
        counts["misplaced"] += 1
    elif not catalog.add_older(entry):
        counts["without parent"] += 1
    else:
        counts["indexed"] += 1
        # Not `entry` when the file was written anew meanwhile.
        _add_waiting(catalog.at(segment.path) or entry, waiting, catalog, counts)


def _add_waiting(entry: ColdEntry, waiting: dict[str, list[Segment]], catalog: Catalog, counts: Counter[str]) -> None:
    """Add what waited for this entry. As deep as chains in the catalog may be, which is bounded."""
    for segment in waiting.pop(entry.checksum, ()):
        _add(segment, entry, waiting, catalog, counts)


class Scans:
    """The threads that look at the directory, by name, each started once."""

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self.closed = False

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run `work`, unless a thread of this name was started before."""
        with self._lock:
            if name in self._threads or self.closed:
                return
            thread = threading.Thread(target=work, name=f"mlx-lm-tiered-scan-{name[:8]}", daemon=True)
            self._threads[name] = thread
            thread.start()

    def forget(self, name: str) -> None:
        """Let this name be started again."""
        with self._lock:
            self._threads.pop(name, None)

    @property
    def running(self) -> bool:
        with self._lock:
            return any(thread.is_alive() for thread in self._threads.values())

    def wait(self, timeout: float | None, name: str | None = None) -> bool:
        """Wait for all threads started so far, or for one. False when time ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            threads = [thread for known, thread in self._threads.items() if name in (None, known)]
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def close(self, timeout: float) -> None:
        """Start none any more, and wait for those that run."""
        self.closed = True
        self.wait(timeout)
