"""SHA-256 of files, remembered while a file stays what it was."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import private_file

logger = logging.getLogger("mlx_lm_tiered")

MEMO_BYTES = 64 << 10
PIECE = 8 << 20
TRIES = 3
# A change right after a change may leave times as they are, at the clock's
# resolution in the file system; digests of files that fresh are not kept.
FRESH_NS = 50_000_000


def stat_key(path: Path) -> tuple[Any, ...]:
    """What a file is known by: real path, device, inode, size, times in ns. Raises OSError."""
    real = os.path.realpath(path)
    status = os.stat(real)
    return real, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def file_digest(path: Path, memo: DigestMemo, stopped: Callable[[], bool] = lambda: False) -> str:
    """The hex SHA-256 of a file. Raises OSError, also when it keeps changing; InterruptedError when `stopped()`."""
    for _ in range(TRIES):
        key = stat_key(path)
        known = memo.get(key)
        if known is not None:
            return known
        digest = _hash(Path(key[0]), stopped)
        if stat_key(path) == key:
            if time.time_ns() - max(key[4], key[5]) > FRESH_NS:
                memo.put(key, digest)
            return digest
    raise OSError(f"{path.name} changed while it was read")


class DigestMemo:
    """Digests by `stat_key`, kept in a file of at most `max_bytes`. Thread-safe; never raises for the file's sake."""

    def __init__(self, path: Path | None, max_bytes: int = MEMO_BYTES):
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._digests: dict[tuple[Any, ...], str] = self._read()
        self._changed = False

    def get(self, key: tuple[Any, ...]) -> str | None:
        with self._lock:
            digest = self._digests.pop(key, None)
            if digest is not None:
                self._digests[key] = digest  # used last, forgotten last
            return digest

    def put(self, key: tuple[Any, ...], digest: str) -> None:
        with self._lock:
            # A file has one digest: what it was before need not be known.
            for old in [k for k in self._digests if k[0] == key[0]]:
                del self._digests[old]
            self._digests[key] = digest
            self._changed = True

    def holds(self, digests: Iterable[str]) -> bool:
        """Whether each of these is the digest of a file that is still what it was then."""
        with self._lock:
            wanted = set(digests)
            known = [(key, digest) for key, digest in self._digests.items() if digest in wanted]
        return bool(wanted) and wanted == {digest for key, digest in known if _unchanged(key)}

    def save(self) -> None:
        """Write the file anew, through a temporary one."""
        with self._lock:
            if self._path is None or not self._changed:
                return
            data = self._encode()
            self._changed = False
        try:
            private_file.replace(self._path, data)
        except OSError as error:
            logger.debug("SSD cache: digests are not remembered: %s", error)

    def _encode(self) -> bytes:
        kept: list[list[Any]] = []
        size = 16
        for key, digest in reversed(self._digests.items()):
            size += len(json.dumps([*key, digest])) + 2
            if size > self._max_bytes:
                break
            kept.append([*key, digest])
        return json.dumps({"version": 1, "digests": kept[::-1]}).encode()

    def _read(self) -> dict[tuple[Any, ...], str]:
        if self._path is None:
            return {}
        try:
            # A digest someone else could have written would let his weights pass for ours.
            data = private_file.read(self._path, 4 * MEMO_BYTES, refused_mode=0o022)
            if data is None:
                return {}
            found = json.loads(data)
            return {tuple(key): digest for *key, digest in found["digests"] if _sound(key, digest)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.debug("SSD cache: the remembered digests are unreadable and made anew: %s", error)
            return {}


def _unchanged(key: tuple[Any, ...]) -> bool:
    try:
        return stat_key(Path(key[0])) == key
    except OSError:
        return False


def _sound(key: list[Any], digest: Any) -> bool:
    return (
        len(key) == 6
        and isinstance(key[0], str)
        and all(type(n) is int for n in key[1:])
        and isinstance(digest, str)
        and len(digest) == 64
        and not set(digest) - set("0123456789abcdef")
    )


def _hash(path: Path, stopped: Callable[[], bool]) -> str:
    hasher = hashlib.sha256()
    buffer = bytearray(PIECE)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if stopped():
                raise InterruptedError("stopped")
            hasher.update(memoryview(buffer)[:count])
    return hasher.hexdigest()
