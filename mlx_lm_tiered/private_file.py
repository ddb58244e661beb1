"""Small files that processes of one user share: read whole, replaced whole, and nobody else's."""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path

ORPHANED = 60.0  # seconds after which a temporary file has no writer any more


def read(path: Path, limit: int, refused_mode: int = 0) -> bytes | None:
    """The first `limit` bytes of a file; None when it is no regular file, another user's, or has one of the mode bits in `refused_mode`. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & refused_mode:
            return None
        return file.read(limit)


def replace(path: Path, data: bytes) -> None:
    """Make `data` the content of a file, through a temporary one; its directory is made if need be. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _clean_up(path)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _clean_up(path: Path) -> None:
    """Remove what processes that were killed while writing left here."""
    for orphan in path.parent.glob(f"{path.name}.*.tmp"):
        if time.time() - orphan.lstat().st_mtime > ORPHANED:
            orphan.unlink(missing_ok=True)
