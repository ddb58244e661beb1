"""The cache directory: its places, its bytes, who may write.

    v1/FINGERPRINT/NAME.safetensors   entries; NAME is a hash of namespace and tokens
    v1/FINGERPRINT/NAME-PARENT.safetensors   those that hold only what they add to the entry named PARENT
    tmp/TOKEN-N.tmp                   entries being written by the process with TOKEN
    writers/TOKEN.lock                locked while that process lives
    quarantine/NAME.N.bad             entries found damaged
    lock                              held while files are put in place or evicted

The files are the database: recency is their modification time, the cap is enforced
by looking at them, so any number of processes may share a directory. Files that do
not fit these names count towards the cap and are never deleted.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .family import NAME_DIGITS, DiskFile, entry_name, leaves_first, parent_name, rootless
from .locks import FileLock
from .writer import sync_directory

LOCK_TIMEOUT = 10.0  # seconds; whoever holds the lock renames, stats and unlinks
BLOCK = 4096
ABANDONED = 60.0  # seconds after which a memo's successor has no writer any more; its whole writing takes milliseconds
# Kept free for what is written without asking here: the memo of file digests (and
# its successor, while it is being replaced), and directories that grow.
SIDE_ROOM = 256 << 10

_ENTRY_NAME = re.compile(r"[0-9a-f]{32}(?:-[0-9a-f]{32})?\.safetensors")
_ENTRY = re.compile(rf"v1/([0-9a-f]{{16,128}})/{_ENTRY_NAME.pattern}")
_PARTIAL = re.compile(r"tmp/([0-9a-f]{16})-\d+\.tmp")
_BAD = re.compile(r"quarantine/[0-9a-f]{32}(?:-[0-9a-f]{32})?\.\d+\.bad")
_SIDE_PARTIAL = re.compile(r"[a-z]+\.json\.[0-9a-f]{8}\.tmp")  # a memo's successor while it is written
_WRITER = re.compile(r"writers/([0-9a-f]{16})\.lock")


class DirectoryFull(Exception):
    """No room can be made under the cap; its text is one sentence."""


class Directory:
    """Everything that is done to the directory as a whole. Thread-safe; methods raise OSError."""

    def __init__(self, root: Path, max_bytes: int):
        self.root = root
        self.max_bytes = max_bytes
        self.side_room = min(SIDE_ROOM, max_bytes // 8)
        self.used = 0  # as `usage`, when all was last looked at, without what `make_room` evicted since
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._writer = FileLock(root / "writers" / f"{self._token}.lock")
        self._lock = FileLock(root / "lock")
        self._threads = threading.RLock()
        self._depth = 0

    # Places

    def entry_path(self, fingerprint: str, namespace: str, key: bytes, parent: str = "") -> Path:
        return self.root / "v1" / fingerprint / entry_name(namespace, key, parent)

    def family(self, folder: Path) -> tuple[dict[str, list[Path]], Counter[str]]:
        """The entries of one fingerprint by NAME, and how many continue each NAME. Call with the lock held to rely on it."""
        names: dict[str, list[Path]] = {}
        children: Counter[str] = Counter()
        try:
            found = [name for name in os.listdir(folder) if _ENTRY_NAME.fullmatch(name)]
        except FileNotFoundError:
            found = []
        for path in map(folder.joinpath, found):
            names.setdefault(path.name[:NAME_DIGITS], []).append(path)
            children[parent_name(path)] += 1
        return names, children

    def make(self) -> None:
        """Make what is missing of the directory, durably: an entry is no safer than the folders on the way to it."""
        new = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any([_own_directory(self.root / name) for name in ("v1", "tmp", "writers", "quarantine")]):
            sync_directory(self.root)
        for path in new:
            sync_directory(path.parent)

    def prepare(self) -> None:
        """The same, and show this process to others as a live writer."""
        self.make()
        with self.locked():
            if not self._writer.held:
                self._writer.release()
                self._writer.acquire(LOCK_TIMEOUT)

    def close(self) -> None:
        """No longer a writer here."""
        try:
            if self._writer.held:
                self._writer.path.unlink(missing_ok=True)
        finally:
            self._writer.release()

    @contextmanager
    def locked(self, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Exclude other threads and processes from evicting and putting files in place. Reentrant. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        if not self._threads.acquire(timeout=timeout):
            raise TimeoutError(errno.ETIMEDOUT, "Another thread holds the lock", str(self._lock.path))
        try:
            if self._depth == 0:
                self._lock.acquire(max(0.0, deadline - time.monotonic()))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._lock.release()
        finally:
            self._threads.release()

    # Bytes

    def files(self) -> list[DiskFile]:
        """Every file under the root. Those that vanish while we look are left out."""
        return [file for file, _ in self._walk() if file is not None]

    def look_at(self, paths: Iterable[Path]) -> list[DiskFile]:
        """The same for some of them."""
        found = []
        for path in paths:
            with suppress(FileNotFoundError):
                status = os.stat(path, follow_symlinks=False)
                found.append(_classify(path, path.relative_to(self.root).as_posix(), status, _charge(status)))
        return found

    def usage(self) -> int:
        """The bytes all files and directories under the root take."""
        self.used = used = sum(charge for _, charge in self._walk())
        return used

    def room(self) -> int:
        """Bytes that a file may have without anything being evicted for it."""
        return self.max_bytes - self.usage() - self.side_room - BLOCK

    def make_room(self, need: int, keep: frozenset[Path] = frozenset(), pinned: frozenset[Path] = frozenset()) -> list[Path]:
        """Evict until `need` more bytes fit under the cap; returns the entries that went.

        Damaged files go first, then entries that lack what they continue, then entries
        by last use, whatever model they belong to, but none before those that
        continue it; `keep` goes last, `pinned` never. Raises DirectoryFull when
        evicting everything would not do, and evicts nothing then. Call with the
        lock held.
        """
        walked = list(self._walk())
        self.used = used = sum(charge for _, charge in walked)
        need = blocks(need) + self.side_room
        if used + need <= self.max_bytes:
            return []
        files = [file for file, _ in walked if file is not None and file.kind in ("entry", "bad")]
        if used - sum(file.charge for file in files if file.path not in pinned) + need > self.max_bytes:
            raise DirectoryFull(f"{need} bytes do not fit under the cap of {self.max_bytes} beside what is not ours to evict.")
        adrift = rootless(files)
        gone = []
        for file in leaves_first(files, lambda f: (f.path in keep, f.kind != "bad", f.path not in adrift, f.used), pinned, adrift):
            file.path.unlink(missing_ok=True)
            self.used = used = used - file.charge
            if file.kind == "entry":
                gone.append(file.path)
            if used + need <= self.max_bytes:
                break
        return gone

    def _walk(self) -> Iterator[tuple[DiskFile | None, int]]:
        """(file, charge) of every file, (None, charge) of every directory below the root."""
        pending = [self.root]
        while pending:
            try:
                entries = list(os.scandir(pending.pop()))
            except FileNotFoundError:
                continue
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                charge = _charge(status)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(Path(entry.path))
                    yield None, charge
                else:
                    path = Path(entry.path)
                    yield _classify(path, path.relative_to(self.root).as_posix(), status, charge), charge

    # Files

    def create_partial(self, size: int) -> tuple[Path, int]:
        """A new temporary file, open for writing, which claims its `size` from the start: who counts the files counts what is still to be written. Call with the lock held."""
        path = self.root / "tmp" / f"{self._token}-{next(self._numbers)}.tmp"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return path, fd

    def publish(self, partial: Path, path: Path) -> None:
        """Put a finished file in place, durably. Call with the lock held."""
        created = _own_directory(path.parent)
        os.rename(partial, path)
        sync_directory(path.parent)
        if created:
            sync_directory(path.parent.parent)

    def quarantine(self, path: Path, status: os.stat_result, timeout: float = LOCK_TIMEOUT) -> bool:
        """Move a damaged entry out of the way, if it is still the file that was read. Raises TimeoutError when the lock is held for so long."""
        with self.locked(timeout):
            try:
                there = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                return False
            if (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino):
                return False
            _own_directory(self.root / "quarantine")
            os.rename(path, self.root / "quarantine" / f"{path.stem}.{time.time_ns()}.bad")
            return True

    def reap(self) -> int:
        """Remove what writers that no longer live left behind; returns the number of temporary files."""
        count = 0
        with self.locked():
            files = self.files()
            owners = {file.owner for file in files if file.kind in ("partial", "writer")} - {self._token}
            for owner in owners:
                lock = FileLock(self.root / "writers" / f"{owner}.lock")
                if not lock.try_acquire():
                    continue
                try:
                    for file in files:
                        if file.kind == "partial" and file.owner == owner:
                            file.path.unlink(missing_ok=True)
                            count += 1
                    lock.path.unlink(missing_ok=True)
                finally:
                    lock.release()
            now = time.time_ns()
            for file in files:
                # Also those from the future: the clock was set back.
                if file.kind == "memo" and abs(now - file.used) > ABANDONED * 1e9:
                    file.path.unlink(missing_ok=True)
                    count += 1
        return count


def _classify(path: Path, relative: str, status: os.stat_result, charge: int) -> DiskFile:
    kind, owner = "other", ""
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        for name, pattern in (("entry", _ENTRY), ("partial", _PARTIAL), ("bad", _BAD), ("writer", _WRITER), ("memo", _SIDE_PARTIAL)):
            if match := pattern.fullmatch(relative):
                kind, owner = name, match.group(1) if match.groups() else ""
                break
    return DiskFile(path, kind, owner, status.st_size, charge, status.st_mtime_ns)


def _own_directory(path: Path) -> bool:
    """Make sure `path` is a directory and no link to elsewhere; True when it had to be made."""
    try:
        path.mkdir(mode=0o700)
        return True
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode):
            raise OSError(errno.ENOTDIR, "Not a directory", str(path)) from None
        return False


def _charge(status: os.stat_result) -> int:
    return max(blocks(status.st_size), status.st_blocks * 512)


def blocks(size: int) -> int:
    """The bytes that a file of this size takes on disk, in whole blocks."""
    return -(-size // BLOCK) * BLOCK
