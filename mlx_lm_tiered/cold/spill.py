"""Write-behind: entries become files while the engine is idle, and `flush` says when all of them have."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from .background import Closed, Write, WriterThread
from .directory import DirectoryFull
from .duty import Pace
from .feeding import Feed, Feeder
from .health import Bounded
from .jobs import MAX_ATTEMPTS, Job, describe
from .ledger import FlushResult, Ledger
from .meta import Meta
from .pending import Pending
from .store import ColdStore, NotIdentical, Unavailable

__all__ = ["FlushResult", "Job", "SpillQueue"]


# A server that always has requests would never write. What waits longer than this many seconds
# is written all the same, and so is everything while more than half the cap is taken (see `Pace`).
OVERDUE = 60.0


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
        self._wake = wake
        self._clock = clock
        self.max_bytes = max_bytes
        self.debounce = debounce
        self._condition = threading.Condition(threading.RLock())
        self._pending = Pending()
        self._ledger = Ledger()
        self._counts: Counter[str] = Counter()
        self._log = Bounded()
        self._offers = 0
        self._flushing = 0
        self._flushes = 0
        self._closed = False
        self._pace = Pace(busy, self._pressing)
        self._thread = WriterThread(self._should_pause, self._pace.worked, lambda: self._wake(), self._announce)
        self._feeder = Feeder(self._thread, self._begin)

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

    def jobs(self) -> list[Job]:
        """What waits to be written or is being written."""
        with self._condition:
            return list(self._pending)

    def namespaces(self, fingerprint: str) -> list[str]:
        """The namespaces in which this model has jobs."""
        with self._condition:
            return list({job.namespace for job in self._pending if job.identity.fingerprint == fingerprint})

    def turn(self) -> bool:
        """Turn one tensor into bytes for the writer. True when more can be done right now. Never waits for the writer."""
        return not self._closed and self._feeder.turn()

    def busy_turn(self) -> None:
        """The same between two steps of running requests, when something must not wait any longer and little time was taken lately."""
        if not self._closed:
            self._pace.turns(self._feeder.turn)

    def _begin(self) -> Feed | None:
        """Start on the next job that is due: its header now, its tensors in the turns to come."""
        while (job := self._next(self._clock())) is not None:
            try:
                described, error = describe(job), None
            except Exception as failure:
                described, error = None, failure
            with self._condition:
                if job not in self._pending.waiting:  # dropped meanwhile
                    continue
                job.tried_by_flush = self._flushes
                if described is None:
                    self._pending.remove(job)
                    assert error is not None
                    self._fail(job, error, retry=False)
                    continue
                write = self._write(job, described[0])
                self._pending.fly(job, write)
            return Feed(write, iter(described[1].items()))
        return None

    def _write(self, job: Job, meta: Meta) -> Write:
        fingerprint, namespace, key = job.place
        until, force = job.continue_until, self._flushing > 0
        return Write(lambda: self._store.begin(fingerprint, namespace, key, meta, force=force, continue_until=until), self._settled)

    def write_now(self, done: Callable[[], bool], deadline: float) -> bool:
        """Write what waits, oldest first, though the engine is busy, until `done()`. False when time is up or nothing is left to try."""
        with self._condition:
            self._flushing += 1
            self._flushes += 1
        try:
            self._thread.nudge()
            while not done():
                if time.monotonic() > deadline or self._closed:
                    return False
                if not self.turn():
                    with self._condition:
                        if not self._pending.flying and self._next(self._clock()) is None:
                            return done()
                        self._condition.wait(0.002)
            with self._condition:
                # The writer lets go of an entry's arrays a moment after the entry is on disk.
                while self._ending() and time.monotonic() < deadline:
                    self._condition.wait(0.002)
            return True
        finally:
            with self._condition:
                self._flushing -= 1

    def _ending(self) -> bool:
        """Whether an entry is being written of which all tensors are handed over."""
        return len(self._pending.flying) > self._feeder.feeding

    def shed(self, key: bytes | None = None, but: bytes | None = None) -> bool:
        """Drop the waiting job of these tokens, or the oldest one of any but those, to free its memory. False when there is none."""
        with self._condition:
            job = next((job for job in self._pending.waiting if job.key == key or (key is None and job.key != but)), None)
            if job is None:
                return False
            self._pending.remove(job)
            self._drop(job)
            return True

    def forget(self, key: bytes | None = None) -> int:
        """Have the waiting jobs of these tokens, or all, never be written, because nobody wants them any more. How many went; what is being written stays."""
        with self._condition:
            doomed = [job for job in self._pending.waiting if key is None or job.key == key]
            for job in doomed:
                self._pending.remove(job)
                self._ledger.clear(job.place)
                job.caches = []
            self._condition.notify_all()
            return len(doomed)

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

    @property
    def pending(self) -> int:
        """Entries that wait to be written or are being written."""
        with self._condition:
            return len(self._pending)

    def stats(self) -> dict[str, Any]:
        """Counters of the queue, and what is in it (see `Pending.stats`)."""
        with self._condition:
            return {
                **self._pending.stats(),
                "max_pending_bytes": self.max_bytes,
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
        self._feeder.close()
        return ended

    # Writer thread

    def _should_pause(self) -> bool:
        return self._flushing == 0 and self._pace.must_wait()

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
                job.caches = []  # now, whoever still holds the job
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
        """The job to be written now, urgent ones first, then the oldest. It may be any while flushing, unless this flush has tried it, else one that is due."""
        with self._condition:
            if not self._flushing and self._store.retry_in > 0:
                return None
            if self._flushing:
                return self._pending.next(lambda job: job.tried_by_flush < self._flushes)
            return self._pending.next(lambda job: job.due <= now)

    def _pressing(self) -> bool:
        """Whether something must be written although requests run."""
        with self._condition:
            if not len(self._pending) or self._store.retry_in > 0:
                return False
            late = self._clock() - OVERDUE
            return self._pending.nbytes > self.max_bytes / 2 or any(job.urgent or job.due <= late for job in self._pending)

    def _enforce_cap(self) -> None:
        for victim in self._pending.shrink(self.max_bytes):
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
        catalog = self._store.catalog
        return self._ledger.result(target, len(self._pending), len(catalog), catalog.longest())
