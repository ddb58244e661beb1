"""The start-up scan: what is in the directory for one model. Reads headers and tokens, no tensors."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from .catalog import ColdEntry
from .directory import DiskFile, entry_name
from .format import BadEntry, ForeignEntry, Meta
from .reader import open_entry


def cold_entry(path: Path, meta: Meta, key: bytes, nbytes: int) -> ColdEntry:
    """The index's entry for a file."""
    return ColdEntry(
        key=key,
        length=meta.length,
        path=path,
        fingerprint=meta.fingerprint,
        namespace=meta.namespace,
        nbytes=nbytes,
        cuttable=meta.cuttable,
        minimum_reusable=meta.minimum_reusable,
        role=meta.role,
    )


def read_entry(path: Path) -> ColdEntry:
    """One file's entry. Raises BadEntry or OSError."""
    with open_entry(path) as reader:
        key = reader.key()
        return cold_entry(path, reader.header.meta, key, reader.status.st_size)


def scan(
    files: list[DiskFile],
    fingerprint: str,
    known: Callable[[Path], bool],
    damaged: Callable[[Path, os.stat_result, BadEntry], None],
    counts: Counter[str],
) -> Iterator[ColdEntry]:
    """Every sound entry of this fingerprint that is not `known` yet; `damaged` gets those to be put away; `counts` says what became of the files."""
    for file in files:
        if file.kind != "entry":
            continue
        if file.owner != fingerprint:
            counts["other models"] += 1
            continue
        counts["scanned"] += 1
        if known(file.path):
            counts["indexed"] += 1
            continue
        try:
            status = os.stat(file.path, follow_symlinks=False)
            entry = read_entry(file.path)
        except ForeignEntry:
            counts["other format"] += 1
        except BadEntry as error:
            counts["damaged"] += 1
            damaged(file.path, status, error)
        except FileNotFoundError:
            counts["gone"] += 1
        except OSError:
            counts["unreadable"] += 1
        else:
            if entry.fingerprint != fingerprint or file.path.name != entry_name(entry.namespace, entry.key):
                counts["misplaced"] += 1
                continue
            counts["indexed"] += 1
            yield entry


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

    def wait_for(self, name: str) -> None:
        """Wait for one thread that was started before."""
        self._threads[name].join()

    def wait(self, timeout: float | None) -> bool:
        """Wait for all threads started so far. False when time ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def close(self, timeout: float) -> None:
        """Start none any more, and wait for those that run."""
        self.closed = True
        self.wait(timeout)
