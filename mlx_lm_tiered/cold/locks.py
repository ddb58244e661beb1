"""Locks between processes, on files.

`flock` goes away with the process, however it dies, which is what tells a live
writer's files from a dead one's. Lock files are opened without following links and
never truncated, and a lock counts only while its file is still the one under its
path: someone may have deleted the directory meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path


class FileLock:
    """An exclusive lock held through `path`. Not reentrant; one thread at a time."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = -1

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Raises OSError when the file cannot be made."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "Not a regular file", str(self.path))
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        if not _same_file(fd, self.path):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def acquire(self, timeout: float) -> None:
        """Take the lock within `timeout` seconds, or raise TimeoutError (an OSError)."""
        deadline = time.monotonic() + timeout
        pause = 0.001
        while not self.try_acquire():
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "Another process holds the lock", str(self.path))
            time.sleep(pause)
            pause = min(pause * 2, 0.05)

    @property
    def held(self) -> bool:
        """Whether the lock is held and its file still in place."""
        return self._fd >= 0 and _same_file(self._fd, self.path)

    def release(self) -> None:
        """Let go; does nothing when not held."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
