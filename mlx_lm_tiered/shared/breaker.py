"""Whether the store is worth asking: after failures it is left alone for a while, so that it costs no request more than a miss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("mlx_lm_tiered")

ENOUGH = 3  # failures one after the other
FIRST = 30.0  # seconds without asking; twice as long after each further failure
LONGEST = 600.0


class Breaker:
    """Thread-safe. One warning when it opens, one line when the store answers again. `what` says what fails: reading or writing."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._rest = 0.0
        self._until = 0.0
        self.opened = 0  # times

    @property
    def open(self) -> bool:
        """Whether the store is left alone."""
        return self._clock() < self._until

    def failed(self, error: Exception, denied: bool = False) -> None:
        """Note a request that failed; `denied` ones will not work the next time."""
        with self._lock:
            self._failures += 1
            if self._clock() < self._until or (not denied and not self._rest and self._failures < ENOUGH):
                return
            first = not self._rest
            self._rest = min(LONGEST, self._rest * 2) if self._rest else FIRST
            self._until = self._clock() + self._rest
            self.opened += 1
        if first:
            logger.warning("shared cache: %s failed (%s); serving goes on without it, and it is tried again", self._what, error)

    def worked(self) -> None:
        """Note a request that was answered."""
        with self._lock:
            was, self._rest, self._until, self._failures = self._rest, 0.0, 0.0, 0
        if was:
            logger.info("shared cache: %s works again", self._what)
