"""Write-behind: entries become files while the engine is idle, and `flush` says when all of them have."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from .arrays import to_bytes
from .background import Closed, Write, WriterThread
from .directory import DirectoryFull
from .health import Bounded
from .jobs import MAX_ATTEMPTS, Job, Ledger, describe
from .pending import Pending
from .store import ColdStore, NotIdentical, Unavailable

__all__ = ["FlushResult", "Job", "SpillQueue"]


class FlushResult(NamedTuple):
    """`durable`: everything offered before the flush is on disk. The rest is the evidence, in entries; the longest prefix in tokens."""

    durable: bool
    pending: int
    dropped: int
    failed: int
    entries: int
    longest_durable_prefix: int


class _Feed(NamedTuple):
    """The job whose tensors are being turned into bytes, one a turn."""

    job: Job
    write: Write
    tensors: Iterator[tuple[str, mx.array]]


class SpillQueue:
    """Holds at most `max_bytes` of caches that wait to be written (the newest is never dropped for it).

    `offer` and `turn` are called on the generation thread, which owns the arrays;
    everything else from any thread. `busy()` says whether requests run: the writer
    pauses then. `wake()` asks for idle turns.
    """

    def __init__(
        self,
        store: ColdStore,
        busy: Callable[[], bool],
        max_bytes: int = 2 << 30,
        debounce: float = 1.0,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store = store
        self._busy = busy
        self._wake = wake
        self._clock = clock
        self.max_bytes = max_bytes
        self.debounce = debounce
        self._condition = threading.Condition(threading.RLock())
        self._pending = Pending()
        self._feed: _Feed | None = None
        self._ledger = Ledger()
        self._counts: Counter[str] = Counter()
        self._log = Bounded()
        self._offers = 0
        self._flushing = 0
        self._flushes = 0
        self._closed = False
        self._thread = WriterThread(self._should_pause, lambda: self._wake(), self._announce)

    # Generation thread

    def offer(self, job: Job) -> None:
        """Queue an entry to be written once no request comes for `debounce` seconds. Takes over its caches."""
        if self._closed:
            return
        if self._store.touch(*job.place):
            return
        job.measure()
        with self._condition:
            self._offers += 1
            job.number = job.serial = self._offers
            job.due = self._clock() + self.debounce
            self._counts["offered"] += 1
            if (same := next((other for other in self._pending.flying if other.place == job.place), None)) is not None:
                same.kept = same.kept and job.kept
                return
            if any(other.covers(job) for other in self._pending if other.key != job.key):
                self._ledger.note(job, "superseded")
                return
            for other in [other for other in self._pending.waiting if job.covers(other)]:
                self._pending.remove(other)
                self._ledger.note(other, "superseded")
                self._counts["superseded"] += 1
                job.serial = min(job.serial, other.serial)
            self._pending.add(job)
            self._ledger.note(job, "pending")
            self._enforce_cap()
            self._condition.notify_all()
        self._thread.nudge()

    def find(self, fingerprint: str, namespace: str, key: bytes, usable: Callable[[Job, int], int]) -> tuple[Job, list[Any], int] | None:
        """The job, waiting or in flight, that serves the longest prefix of `key`, its caches, and that length.

        `usable` is `PrefixIndex.best`'s. The caches are never written to: lend them.
        """
        with self._condition:
            if (best := self._pending.best(fingerprint, namespace, key, usable)) is None:
                return None
            job, length = best
            return job, job.caches, length  # the list: a job that is given up takes a new one

    def turn(self) -> bool:
        """Turn one tensor into bytes for the writer. True when more can be done right now. Never waits for the writer."""
        if self._closed or not self._thread.has_room():
            return False
        feed = self._feed
        if feed is None or feed.write.settled:
            self._feed = None
            return self._begin()
        try:
            name, array = next(feed.tensors, (None, None))
            if name is not None:
                self._thread.tensor(feed.write, name, to_bytes(array))
                return self._thread.has_room()
        except Exception as error:  # mlx could not evaluate or copy it; the request path must not notice
            self._thread.cancel(feed.write, error)
            self._feed = None
            return False
        self._thread.commit(feed.write)
        self._feed = None
        return self._next(self._clock()) is not None

    def _begin(self) -> bool:
        """Start on the next job that is due: its header now, its tensors in the turns to come."""
        with self._condition:
            if (job := self._next(self._clock())) is None:
                return False
        try:
            described, error = describe(job), None
        except Exception as failure:
            described, error = None, failure
        with self._condition:
            if job not in self._pending.waiting:  # dropped meanwhile
                return True
            job.tried_by_flush = self._flushes
            if described is None:
                self._pending.remove(job)
                self._fail(job, error, retry=False)
                return True
            meta, tensors = described
            fingerprint, namespace, key = job.place
            until, force = job.continue_until, self._flushing > 0
            write = Write(lambda: self._store.begin(fingerprint, namespace, key, meta, force=force, continue_until=until), self._settled)
            self._pending.fly(job, write)
        self._feed = _Feed(job, write, iter(tensors.items()))
        self._thread.start(write)
        return True

    # Any thread

    def flush(self, timeout: float) -> FlushResult:
        """Write everything offered so far, or as much as `timeout` seconds allow. Not on the generation thread, whose idle turns it needs.

        Jobs that failed before are tried once more.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            target = self._offers
            self._flushing += 1
            self._flushes += 1
            mine = self._flushes
        try:
            self._thread.nudge()
            while True:
                self._wake()
                with self._condition:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._closed or not self._unsettled(target, mine):
                        return self._result(target)
                    # Bounded, so that an engine that missed one call is asked again.
                    self._condition.wait(min(left, 0.25))
        finally:
            with self._condition:
                self._flushing -= 1

    def stats(self) -> dict[str, Any]:
        """Counters of the queue. What is pending waits, for its debounce too, or is being written; a snapshot's entry is still in RAM, a spill's is not."""
        with self._condition:
            spills = [job for job in self._pending if not job.kept]
            return {
                "pending": len(self._pending),
                "pending_bytes": self._pending.nbytes,
                "pending_snapshots": len(self._pending) - len(spills),
                "pending_spills": len(spills),
                "pending_spill_bytes": sum(job.nbytes for job in spills),
                "undurable": len(self._ledger),
                **{name: self._counts[name] for name in ("offered", "written", "dropped", "failed")},
                "superseded_before_writing": self._counts["superseded"],
            }

    def close(self, timeout: float = 10.0) -> bool:
        """End the writer; jobs left are dropped. False when the thread did not end in time."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        ended = self._thread.close(timeout)
        with self._condition:
            for job in list(self._pending.waiting):
                self._pending.remove(job)
                self._drop(job)
            self._feed = None
        return ended

    # Writer thread

    def _should_pause(self) -> bool:
        return self._flushing == 0 and self._busy()

    def _announce(self) -> float | None:
        """Ask for turns when a job has become due; seconds until the next one does."""
        with self._condition:
            # Times until due; a directory that rests after a failure makes everything wait.
            rest = 0.0 if self._flushing else self._store.retry_in
            waiting = {job: max(job.due - self._clock(), rest) for job in self._pending.waiting if not job.announced}
            due = [job for job, left in waiting.items() if left <= 0 or self._flushing]
            for job in due:
                job.announced = True
            later = [left for job, left in waiting.items() if not job.announced]
        if due:
            self._wake()
        return max(0.001, min(later)) if later else None

    def _settled(self, write: Write, error: BaseException | None) -> None:
        """An entry became durable, or did not."""
        with self._condition:
            job = self._pending.land(write)
            if error is None:
                self._counts["written"] += 1
                self._ledger.clear(job.place)
            elif isinstance(error, NotIdentical) and not self._closed:
                self._continue_less(job, error.since)
            elif isinstance(error, (Closed, NotIdentical)):
                self._drop(job)
            else:
                if isinstance(error, OSError) and write.opened:
                    self._store.write_failed(error)
                self._fail(job, error, retry=isinstance(error, OSError))
            self._condition.notify_all()
        self._ledger_settle()
        self._wake()

    # Inside

    def _next(self, now: float) -> Job | None:
        """The oldest job to be written now: every one while flushing, unless this flush has tried it, else those that are due."""
        with self._condition:
            if not self._flushing and self._store.retry_in > 0:
                return None
            for job in self._pending.waiting:
                if job.tried_by_flush < self._flushes if self._flushing else job.due <= now:
                    return job
        return None

    def _enforce_cap(self) -> None:
        excess = self._pending.nbytes - self.max_bytes
        while excess > 0 and len(self._pending.waiting) > 1:
            victim = self._pending.waiting[0]
            self._pending.remove(victim)
            excess -= victim.nbytes
            self._drop(victim)

    def _drop(self, job: Job) -> None:
        self._counts["dropped"] += 1
        self._ledger.note(job, "dropped")
        job.caches = []

    def _fail(self, job: Job, error: BaseException, retry: bool) -> None:
        """Note a failure; the job waits for another try, unless that is hopeless."""
        job.attempts += 0 if isinstance(error, Unavailable) else 1
        if not isinstance(error, Unavailable):
            self._counts["failed"] += 1
        self._ledger.note(job, "failed")
        if not isinstance(error, (OSError, DirectoryFull)):
            self._log.warn("failed", "SSD cache: an entry of %d tokens was not stored (%s)", job.length, error)
        if not retry or job.attempts >= MAX_ATTEMPTS or self._closed:
            job.caches = []
            return
        job.due = self._clock() + max(self._store.retry_in, self.debounce * 2**job.attempts)
        job.announced = False
        self._pending.add(job)
        self._enforce_cap()

    def _continue_less(self, job: Job, until: int) -> None:
        """Put a job back that cannot continue all that is stored: not a failure, and its turn now."""
        self._store.not_identical()
        job.continue_until, job.due, job.announced, job.tried_by_flush = until, self._clock(), False, 0
        self._pending.add(job)
        self._enforce_cap()

    def _unsettled(self, target: int, flush: int) -> bool:
        waiting = any(job.serial <= target and job.tried_by_flush < flush for job in self._pending.waiting)
        return waiting or any(job.serial <= target for job in self._pending.flying)

    def _ledger_settle(self) -> None:
        with self._condition:
            self._ledger.settle(self._store.covers)

    def _result(self, target: int) -> FlushResult:
        self._ledger.settle(self._store.covers)
        ledger = self._ledger
        stats = self._store.stats()
        return FlushResult(
            durable=ledger.count("pending", "superseded", "dropped", "failed", until=target) == 0 and ledger.forgotten == 0,
            pending=len(self._pending),
            dropped=ledger.count("dropped") + ledger.forgotten,
            failed=ledger.count("failed"),
            entries=stats["entries"],
            longest_durable_prefix=stats["longest_durable_prefix_tokens"],
        )
