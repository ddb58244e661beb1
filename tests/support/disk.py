"""This process's changes to a directory, one by one: made to fail, or photographed as a kill in the middle of one would leave them.

    with Disk(root) as disk:
        disk.fail(3, errno.EIO)          # the third change from now on fails
        disk.photograph(5, other)        # before the fifth, half done if it is a write, the files are copied to `other`

What a killed process leaves is what its system calls had done by then: the page cache
is the system's, not the process's. A copy of the files, made between two calls while no
other can happen, is that state, locks included: they are on the originals.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

CHANGES = ("pwrite", "ftruncate", "rename", "replace", "unlink", "mkdir", "utime", "fsync", "open")


class Disk:
    """Stands between this process and `os`. Counts changes under `root` only, those by descriptor wherever it points."""

    def __init__(self, root: Path):
        self.root = root
        self.changes = 0
        self.failed = 0
        self.photographed = False
        self._lock = threading.RLock()
        self._aside = threading.local()
        self._real: dict[str, Callable[..., Any]] = {}
        self._fail_at, self._errno = 0, 0
        self._photograph_at = 0
        self._to: Path | None = None
        self._on_photograph: Callable[[], None] = lambda: None

    def fail(self, after: int, errno: int) -> None:
        """Have one change fail, the `after`-th from now."""
        self._fail_at, self._errno = self.changes + after, errno

    def heal(self) -> None:
        """Have none fail."""
        self._fail_at = 0

    def photograph(self, after: int, to: Path, then: Callable[[], None] = lambda: None) -> None:
        """Copy the files before the `after`-th change from now is done, and call `then` in that moment."""
        self._photograph_at, self._to, self._on_photograph = self.changes + after, to, then
        self.photographed = False

    def photograph_now(self) -> None:
        """Do not wait any longer for the change."""
        with self._lock:
            if not self.photographed and self._to is not None:
                self._copy()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What this thread does in the block is the test's own."""
        self._aside.now = True
        try:
            yield
        finally:
            self._aside.now = False

    def __enter__(self) -> Disk:
        for name in CHANGES:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._watched(name, self._real[name]))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._aside, "now", False) or name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT) or not self._ours(args[0]):
                return real(*args, **kwargs)
            with self._lock:
                self.changes += 1
                if self._photograph_at and self.changes >= self._photograph_at and not self.photographed:
                    if name == "pwrite" and len(args[1]) > 1:
                        half = len(args[1]) // 2
                        real(args[0], args[1][:half], args[2])
                    self._copy()
                if self._fail_at and self.changes >= self._fail_at:
                    self._fail_at = 0
                    self.failed += 1
                    raise OSError(self._errno, os.strerror(self._errno), str(args[0]))
                return real(*args, **kwargs)

        return call

    def _ours(self, where: Any) -> bool:
        if isinstance(where, int):
            where = os.readlink(f"/proc/self/fd/{where}") if os.path.exists("/proc/self/fd") else str(self.root)
        return str(where).startswith(str(self.root))

    def _copy(self) -> None:
        assert self._to is not None
        self.photographed, self._photograph_at = True, 0
        # With the real calls: a copy is no change of what is copied.
        patched = {name: getattr(os, name) for name in CHANGES}
        for name, real in self._real.items():
            setattr(os, name, real)
        try:
            if self.root.exists():
                shutil.copytree(self.root, self._to)
        finally:
            for name, call in patched.items():
                setattr(os, name, call)
        self._on_photograph()
