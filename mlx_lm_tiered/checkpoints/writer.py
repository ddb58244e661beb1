"""The thread that makes checkpoints durable while rows decode, and removes those of requests that were answered."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from ..cold.checking import BadEntry
from ..cold.directory import DirectoryFull
from ..cold.health import Bounded, logger
from ..cold.store import ColdEntry, ColdStore, NotIdentical, Unavailable
from ..cold.writer import EntryWriter
from .pace import Pace, lower_priority
from .snapshot import KIND, Attempt, Snapshot

PIECE = 256 << 10  # bytes between two rests


class CheckpointWriter:
    """Holds at most `max_bytes` of snapshots that wait (the newest is never dropped for it), one for each request.

    A newer snapshot takes the place of a waiting one of its request, in the queue too:
    behind the others' it would wait for ever, where they come faster than they are
    written. The file on disk stays valid until the newer one is in place. `busy()` says whether rows decode.
    """

    def __init__(self, store: ColdStore, busy: Callable[[], bool], max_bytes: int):
        self.max_bytes = max_bytes
        self._store = store
        self._condition = threading.Condition()
        self._work: deque[Snapshot | Attempt] = deque()  # an attempt: its checkpoints are void
        self._current: Snapshot | Attempt | None = None
        self._void: Counter[tuple[str, str]] = Counter()  # places whose files wait to be removed
        self._lost: set[tuple[str, str]] = set()  # places whose newest snapshot is not on disk and will not be
        self._counts: Counter[str] = Counter()
        self._log = Bounded()
        self._flushing = 0
        self._closing = False
        self._pace = Pace(busy, lambda: self._flushing > 0 or self._closing, self._rest)
        self._thread = threading.Thread(target=self._run, name="mlx-lm-tiered-checkpoints", daemon=True)
        self._thread.start()

    # Any thread

    def basis(self, attempt: Attempt) -> None:
        """A snapshot is about to be taken: what it may go on from stays on disk until it is offered."""
        with self._condition:
            attempt.basis = attempt.durable

    def offer(self, snapshot: Snapshot) -> None:
        """Have a snapshot written soon."""
        with self._condition:
            snapshot.attempt.basis = None
            if self._closing or snapshot.attempt.completed:
                return
            self._lost.discard(snapshot.attempt.place)
            if waiting := self._waiting(snapshot.attempt):
                self._work[self._work.index(waiting[0])] = snapshot
                self._counts["superseded"] += 1
            else:
                self._work.append(snapshot)
            self._enforce_cap(snapshot)
            self._condition.notify_all()

    def void(self, attempt: Attempt) -> None:
        """A request was answered: what is kept of it counts no more, from now on, and its files go."""
        with self._condition:
            attempt.completed = True
            for other in self._waiting(attempt):
                self._work.remove(other)
            self._lost.discard(attempt.place)
            self._void[attempt.place] += 1
            self._work.append(attempt)
            self._condition.notify_all()

    def is_void(self, fingerprint: str, namespace: str) -> bool:
        """Whether the files of this place only wait to be removed."""
        with self._condition:
            return self._void[fingerprint, namespace] > 0

    def flush(self, timeout: float) -> tuple[int, int]:
        """Write and remove everything that waits, or as much as `timeout` seconds allow: (what is left, requests whose newest checkpoint could not be kept)."""
        deadline = time.monotonic() + timeout
        with self._condition:
            self._flushing += 1
            self._condition.notify_all()
            try:
                while (self._work or self._current is not None) and not self._closing and (left := deadline - time.monotonic()) > 0:
                    self._condition.wait(min(left, 0.25))
            finally:
                self._flushing -= 1
            return len(self._work) + (self._current is not None), len(self._lost)

    def stats(self) -> dict[str, Any]:
        """Counters; `pending` and `pending_bytes` of snapshots that wait or are being written."""
        with self._condition:
            waiting = [w for w in (*self._work, self._current) if isinstance(w, Snapshot)]
            return {
                **{name: self._counts[name] for name in ("written", "written_bytes", "removed", "dropped", "failed", "superseded")},
                "pending": len(waiting),
                "pending_bytes": sum(snapshot.nbytes for snapshot in waiting),
            }

    def close(self, timeout: float = 10.0) -> bool:
        """End the thread; what waits is given up. False when it did not end in time."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._condition:
                while not self._work and not self._closing:
                    self._condition.wait()
                if self._closing:
                    return
                self._current = self._work.popleft()
            try:
                if isinstance(self._current, Snapshot):
                    self._write(self._current)
                else:
                    self._remove(self._current)
            except Exception as error:  # whatever happens to one checkpoint, the next is written
                self._failed(self._current, error)
            with self._condition:
                self._current = None
                self._condition.notify_all()

    def _write(self, snapshot: Snapshot) -> None:
        attempt = snapshot.attempt
        self._pace.start()
        until = None
        while True:
            writer = None
            try:
                writer = self._open(snapshot, until)
                for name, data in snapshot.tensors:
                    for start in range(0, max(1, len(data)), PIECE):
                        writer.write(name, data[start : start + PIECE])
                        self._pace.step()
                        if attempt.completed or self._closing:
                            writer.abort()
                            return
                writer.commit()
                break
            except NotIdentical as error:
                assert writer is not None
                writer.abort()
                if snapshot.parent is not None:
                    raise
                self._store.not_identical()
                until = error.since
            except BaseException:
                if writer is not None:
                    writer.abort()
                raise
        self._keep(snapshot)

    def _open(self, snapshot: Snapshot, until: int | None) -> EntryWriter:
        if snapshot.parent is not None:
            return self._store.begin_next(snapshot.parent, snapshot.key, snapshot.meta)
        attempt = snapshot.attempt
        return self._store.begin(attempt.identity.fingerprint, attempt.namespace, snapshot.key, snapshot.meta, continue_until=until)

    def _keep(self, snapshot: Snapshot) -> None:
        """A checkpoint is on disk: the ones before it go, unless it goes on from them."""
        attempt = snapshot.attempt
        entry: ColdEntry | None = self._store.newest(*attempt.place, snapshot.key, KIND)
        with self._condition:
            attempt.durable, attempt.signatures = entry, snapshot.meta.signatures
            waiting = [w.parent for w in self._waiting(attempt)]
            keep = [one for one in (entry, attempt.basis, *waiting) if one is not None]
            self._counts["written"] += 1
            self._counts["written_bytes"] += entry.nbytes if entry is not None else 0
        if entry is not None:
            self._store.discard(*attempt.place, keep)

    def _remove(self, attempt: Attempt) -> None:
        try:
            gone = self._store.discard(*attempt.place)
        finally:
            with self._condition:
                self._void[attempt.place] -= 1
                self._void += Counter()  # without those at 0
        if gone:
            with self._condition:
                self._counts["removed"] += 1

    def _failed(self, work: Snapshot | Attempt, error: Exception) -> None:
        attempt = work.attempt if isinstance(work, Snapshot) else work
        attempt.durable = None  # the next one is written whole
        if isinstance(error, OSError) and not isinstance(error, Unavailable):
            self._store.write_failed(error)
        elif not isinstance(error, (OSError, DirectoryFull, BadEntry, NotIdentical)):
            self._log.warn("failed", "SSD cache: a checkpoint was not stored (%s)", error)
        logger.debug("SSD cache: a checkpoint was not stored", exc_info=error)
        with self._condition:
            self._counts["failed"] += 1
            if isinstance(work, Snapshot) and not self._waiting(attempt):
                self._lost.add(attempt.place)

    def _waiting(self, attempt: Attempt) -> list[Snapshot]:
        return [w for w in self._work if isinstance(w, Snapshot) and w.attempt is attempt]

    def _rest(self, seconds: float) -> None:
        with self._condition:
            if not self._closing and not self._flushing:
                self._condition.wait(seconds)

    def _enforce_cap(self, newest: Snapshot) -> None:
        waiting = [w for w in self._work if isinstance(w, Snapshot)]
        total = sum(snapshot.nbytes for snapshot in waiting)
        for victim in waiting:
            if total <= self.max_bytes:
                break
            if victim is newest:
                continue
            self._work.remove(victim)
            total -= victim.nbytes
            self._counts["dropped"] += 1
            self._lost.add(victim.attempt.place)
