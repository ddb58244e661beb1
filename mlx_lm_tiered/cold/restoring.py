"""Restores in the background: one thread reads them in turns, out of the way of decoding."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

from .catalog import ColdEntry
from .restore import Restore, Restored

logger = logging.getLogger("mlx_lm_tiered")

# While rows decode, the share of one core that reading and hashing may take. All of it goes
# through the memory that decoding is bound by; the time that a disk takes is free. Where there
# are few cores mlx computes on all of them, and what a restore takes is taken from decoding.
SHARE = 0.25
SHARE_OF_EACH = 0.02
# Files that an entry may have for the generation thread to open them and make its memory, which takes milliseconds.
FEW_FILES = 8
LEAST = 0.001  # seconds: shorter pauses are saved up, as each is a turn of the interpreter that decoding needs
# Files that restores hold open together, but for one with more of its own: connections need descriptors, too, and macOS gives a process 256.
MAX_FILES = 96
PAUSE = 0.05  # seconds, the longest: after it, look whether rows still decode


class Restoring:
    """One restore in steps: `steps` on one thread, then `caches` on the generation thread. Faults are dealt with inside; what is left of them is `failed`.

    `forgiving()` makes a context that swallows them, `done(seconds)` is told of a
    restore that was completed, and how long it took without the time between steps.
    """

    def __init__(self, read: Restore, forgiving: Callable[[], AbstractContextManager[None]], done: Callable[[float], None]):
        self._read = read
        self._forgiving = forgiving
        self._done = done
        self._seconds = 0.0
        self.failed = True  # until it is known better

    def read(self) -> None:
        """Read at once, as fast as it goes. Generation thread only."""
        with self._forgiving():
            started = time.perf_counter()
            self._read.read()
            self._seconds += time.perf_counter() - started
            self.failed = False

    @property
    def allocated(self) -> bool:
        """Whether all memory is made."""
        return self._read.allocated

    def steps(self, filled: bool = True) -> Generator[int, None, None]:
        """Read piece by piece, on the threads of `Restore.steps`; gives the bytes of each (0: made a buffer)."""
        with self._forgiving():
            started = time.perf_counter()
            for size in self._read.steps(filled):
                self._seconds += time.perf_counter() - started
                yield size
                started = time.perf_counter()
            self._seconds += time.perf_counter() - started
            self.failed = False

    def caches(self) -> Restored | None:
        """What was read, None when that failed. Generation thread only, once."""
        if self.failed:
            return None
        started = time.perf_counter()
        with self._forgiving():
            caches = self._read.caches()
            self._done(self._seconds + time.perf_counter() - started)
            return caches
        return None


class Ticket:
    """One restore that was asked of `Restorer`. `done` turns true when `restoring` is at its end, well or failed."""

    def __init__(self, entry: ColdEntry, restoring: Restoring):
        self.entry = entry
        self.restoring = restoring
        self.done = False
        self.cancelled = False
        self.read = 0  # bytes so far
        self.steps = restoring.steps()


class Restorer:
    """Reads entries in the background. Thread-safe.

    Restores in flight take turns, a piece each, so that a large one does not hold up
    a small one. Together they hold no more than `max_bytes` and `MAX_FILES`, one that is
    larger goes alone; the others wait in order. Where `spare()`, the bytes that memory has
    left, is too little, they go one by one. A restore is in flight until `release`: what was
    read is memory until a request has it. `open` makes a restore, `decoding` tells
    whether to go slowly, `ready` is called whenever one is done. `start` is the generation
    thread's. Where that `computes_here`, on the same cores, it makes the memory of what may
    begin at once: it can do so without filling it, and the reader's share of the cores is better
    spent on reading.
    """

    def __init__(
        self,
        open_: Callable[[ColdEntry], Restoring],
        decoding: Callable[[], bool],
        ready: Callable[[], None],
        max_bytes: int,
        spare: Callable[[], float] = lambda: math.inf,
        computes_here: Callable[[], bool] = lambda: False,
    ):
        self._open = open_
        self._decoding = decoding
        self._ready = ready
        self._max_bytes = max_bytes
        self._spare = spare
        self._computes_here = computes_here
        self._condition = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._turns: deque[Ticket] = deque()
        self._held: dict[Ticket, int] = {}  # in flight -> bytes
        self._counts = {"started": 0, "cancelled": 0}
        self._ratio = 1 / min(SHARE, SHARE_OF_EACH * cores()) - 1
        self._owed = 0.0  # seconds of pause, that are saved up
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, entry: ColdEntry) -> Ticket:
        """Have an entry read. Generation thread only."""
        ticket = Ticket(entry, self._open(entry))
        with self._condition:
            self._waiting.append(ticket)
            self._admit(makes_memory=self._computes_here())
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="mlx-lm-tiered-reader", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Let go of a restore: its caches were taken, or nobody wants them any more. Again is allowed."""
        with self._condition:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                ticket.cancelled = True
            elif ticket in self._held and not ticket.done:
                ticket.cancelled = True  # the reader notices, and lets go
            else:
                self._held.pop(ticket, None)
                self._admit()
                return
            self._counts["cancelled"] += 1
            self._condition.notify_all()

    def progress(self) -> list[tuple[int, int, int]]:
        """(tokens, bytes read, bytes in all) of each restore that is being read or waits."""
        with self._condition:
            tickets = [*self._held, *self._waiting]
        return [(ticket.entry.length, ticket.read, sum(one.nbytes for one in ticket.entry.chain)) for ticket in tickets]

    def stats(self) -> dict[str, int]:
        """How many are in flight and wait, bytes of those in flight, and counters."""
        with self._condition:
            return {
                "restores_in_flight": len(self._held),
                "restores_in_flight_bytes": sum(self._held.values()),
                "restores_waiting": len(self._waiting),
                "restores_in_background": self._counts["started"],
                "restores_cancelled": self._counts["cancelled"],
            }

    def close(self, timeout: float = 10.0) -> None:
        """End the thread; what is not done is given up."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    # Inside

    def _admit(self, makes_memory: bool = False) -> None:
        """Begin what may begin; on the generation thread it may make memory, too. Call with the condition held."""
        while self._waiting:
            ticket = self._waiting[0]
            chain = ticket.entry.chain
            size = sum(one.nbytes for one in chain)
            if self._held and (sum(self._held.values()) + size > self._max_bytes or size > self._spare()):
                return
            reading = [len(other.entry.chain) for other in self._held if not other.done]
            if reading and sum(reading) + len(chain) > MAX_FILES:
                return
            self._waiting.popleft()
            self._held[ticket] = size
            if makes_memory and len(chain) <= FEW_FILES:
                ticket.steps = ticket.restoring.steps(filled=False)
                while not ticket.restoring.allocated and self._piece(ticket) is not None:
                    continue
            self._turns.append(ticket)
            self._counts["started"] += 1
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._turns and not self._closing:
                    self._condition.wait()
                if self._closing:
                    break
                ticket = self._turns.popleft()
            if self._step(ticket):
                with self._condition:
                    self._turns.append(ticket)
            else:
                self._end(ticket)
        for ticket in [*self._turns, *self._waiting]:
            ticket.cancelled = True
            self._end(ticket)

    def _step(self, ticket: Ticket) -> bool:
        """One piece, and the pause that it costs. Whether there is more."""
        if ticket.cancelled:
            return False
        wall, cpu = time.perf_counter(), time.thread_time()
        size = self._piece(ticket)
        if size is None:
            return False
        # mlx makes a buffer on a thread of its own.
        spent = time.perf_counter() - wall if size == 0 else time.thread_time() - cpu
        self._owed += spent * self._ratio
        if self._owed >= LEAST:
            pause, self._owed = self._owed, 0.0
            while pause > 0 and self._decoding() and not (ticket.cancelled or self._closing):
                time.sleep(min(pause, PAUSE))
                pause -= PAUSE
        return True

    def _piece(self, ticket: Ticket) -> int | None:
        """The next piece's bytes; None when all is read, or reading failed."""
        try:
            size = next(ticket.steps, None)
            ticket.read += size or 0
            return size
        except Exception as error:  # whatever happens to one restore, the next is read
            ticket.restoring.failed = True
            logger.warning("SSD cache: a restore failed: %s: %s", type(error).__name__, error)
            return None

    def _end(self, ticket: Ticket) -> None:
        ticket.steps.close()
        with self._condition:
            ticket.done = True
            if ticket.cancelled:
                ticket.restoring.failed = True
                self._held.pop(ticket, None)
            self._admit()
        self._ready()


def cores() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
