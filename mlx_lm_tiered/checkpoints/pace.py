"""How a thread works beside decoding without slowing it: at low priority, and for a share of the time only."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

SHARE = 0.2  # of the time, while rows decode
NICE = 10
LEAST = 0.002  # seconds: shorter rests are saved up, as waking costs more than they are worth


class Pace:
    """Rests between small pieces of work. `busy()` says whether anybody needs the machine more; `hurry()` that somebody waits for the work."""

    def __init__(
        self,
        busy: Callable[[], bool],
        hurry: Callable[[], bool],
        rest: Callable[[float], object],
        share: float = SHARE,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._busy = busy
        self._hurry = hurry
        self._rest = rest
        self._ratio = 1 / share - 1
        self._clock = clock
        self._since = clock()
        self._owed = 0.0

    def start(self) -> None:
        """Work begins."""
        self._since = self._clock()

    def step(self) -> None:
        """A piece of work is done: rest as long as it calls for."""
        now = self._clock()
        self._owed += (now - self._since) * self._ratio
        if not self._busy() or self._hurry():
            self._owed = 0.0
        elif self._owed >= LEAST:
            self._rest(self._owed)
            self._owed = 0.0
        self._since = self._clock()


def lower_priority() -> None:
    """Let the other threads of the process go first, where the system can tell threads apart."""
    try:
        if sys.platform == "darwin":
            import ctypes

            utility = 0x11  # QOS_CLASS_UTILITY of <sys/qos.h>
            ctypes.CDLL(None).pthread_set_qos_class_self_np(utility, 0)
        elif sys.platform == "linux":
            # Linux keeps a nice value for each thread, under the thread's id.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except (OSError, AttributeError) as error:
        from ..cold.health import logger

        logger.debug("the checkpoint writer keeps its priority: %s", error)
