"""A small share of the time, for work that must get on while requests run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Of the thread that decodes, which stands still meanwhile, and of a processor: together below one percent.
TURNS = 0.004
WRITES = 0.005
TURNS_BURST = 0.01  # seconds
WRITES_BURST = 0.005


class Duty:
    """Lets work take `share` of the time, and `burst` seconds at once after a time without. Thread-safe."""

    def __init__(self, share: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self._share = share
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._credit = burst
        self._seen = clock()

    def allowed(self) -> bool:
        """Whether a piece of work may be begun now."""
        with self._lock:
            now = self._clock()
            self._credit = min(self._burst, self._credit + (now - self._seen) * self._share)
            self._seen = now
            return self._credit > 0

    def spent(self, seconds: float) -> None:
        """Note what a piece of work took. A long one is made up for by a long rest."""
        with self._lock:
            self._credit -= seconds


class Pace:
    """How fast to write: at will while nothing is `busy()`, else not at all, or when something is `pressing()` in small shares of the time."""

    def __init__(self, busy: Callable[[], bool], pressing: Callable[[], bool]):
        self._busy = busy
        self._pressing = pressing
        self._turns = Duty(TURNS, TURNS_BURST)
        self._writes = Duty(WRITES, WRITES_BURST)

    def turns(self, turn: Callable[[], bool]) -> None:
        """Take as many turns as there may be now, and as `turn()` says there are. Generation thread, between steps."""
        while self._pressing() and self._turns.allowed():
            started = time.perf_counter()
            more = turn()
            self._turns.spent(time.perf_counter() - started)
            if not more:
                break

    def must_wait(self) -> bool:
        """Whether the writer must wait before its next piece."""
        return self._busy() and not (self._pressing() and self._writes.allowed())

    def worked(self, seconds: float) -> None:
        """Note the processor seconds of the writer's last piece."""
        if self._busy():
            self._writes.spent(seconds)
