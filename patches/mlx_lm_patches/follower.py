"""Stopping a rank that serves no HTTP: rank 0 says when, this one only asks for it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .stopping import Stopping

log = logging.getLogger("mlx_lm_patches")

LOOKS = 0.05  # seconds between two looks whether others are lost
PATIENCE = 10.0  # seconds that rank 0 may take longer than the time to stop


class Follower(Stopping):
    """On a signal, all ranks are stopped, in the turn after. What is not over when the time to stop is ends by force.

    `save` is for when the others are lost: else rank 0 has everything saved.
    """

    def __init__(self, timeout: float | None, save: Callable[[float], bool]):
        super().__init__(timeout, save)
        self._over = threading.Event()

    def _drain(self) -> None:
        self._signalled.wait()
        while not self._over.wait(LOOKS):
            if self._lost and not self.ended.is_set():
                self._saved = self._try_to_save()
                self.ended.set()
            if time.monotonic() > self._deadline + PATIENCE:
                log.error("stopped after %.0f seconds: the other ranks did not end", self._timeout)
                try:
                    logging.shutdown()
                    sys.stderr.flush()
                finally:  # the launcher may not read any more
                    os._exit(1)

    def finish(self, generator: Any, join: Callable[[], None], release: Callable[[], None]) -> None:
        """After the generation thread has ended. Raises SystemExit(1) when something was lost."""
        self.request(lost=bool(generator._generation_failed))
        self._over.set()
        self.end(generator, join, release)
