"""The server's generation loop as the plugins see it, and its idle turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .runtime import Runtime

# Put on the request queue to end a wait; never delivered as a request.
WAKE = object()
BUSY_TURNS = 0.05  # seconds between two busy turns: steps may be much shorter


class Engine:
    """Implements the contract's `Engine` for one `ResponseGenerator`."""

    def __init__(self, generator: Any, runtime: Runtime):
        self._generator = generator
        self._runtime = runtime
        self._busy = False
        self._waiting = False
        self._woken = False
        self._lock = threading.Lock()
        self._tasks: list[Callable[[], bool]] = []
        self._busy_tasks: list[Callable[[], None]] = []
        self._busy_turn_at = 0.0

    def start(self) -> None:
        """Announce the engine and resolve the tasks into plain callables."""
        self._runtime.plugins.engine_started(self)
        self._tasks = self._runtime.plugins.idle_tasks()
        self._busy_tasks = self._runtime.plugins.busy_tasks()

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def alive(self) -> bool:
        thread = getattr(self._generator, "_generation_thread", None)
        return thread is not None and thread.is_alive() and not self._generator._generation_failed

    def wake(self) -> None:
        with self._lock:
            self._woken = True
            if self._waiting:
                self._waiting = False
                self._generator.requests.put(WAKE)

    def next_request(self, original: Callable[..., Any], timeout: float | None) -> Any:
        """Upstream's `_next_request`, with idle turns in the time it would wait.

        Upstream passes no timeout while rows decode: that is its busy signal.
        """
        if self._busy and time.monotonic() >= self._busy_turn_at:
            self._busy_turn()
        request = self._request(original, None)
        if timeout is None or request is not None:
            self._busy = True
            return request
        self._busy = False
        self._woken = False
        if self._idle_turn():
            return None
        with self._lock:
            if self._woken:
                return None
            self._waiting = True
        request = self._request(original, timeout)
        with self._lock:
            self._waiting = False
        self._busy = request is not None
        return request

    def _request(self, original: Callable[..., Any], timeout: float | None) -> Any:
        request = original(self._generator, timeout)
        if request is WAKE and timeout is None:
            # Look behind it; a second one cannot be there, as it is put only into a wait.
            request = original(self._generator, None)
        return None if request is WAKE else request

    def _busy_turn(self) -> None:
        for task in self._busy_tasks:
            try:
                task()
            except Exception as error:
                self._runtime.fault("a busy task", error)
        self._busy_turn_at = time.monotonic() + BUSY_TURNS

    def _idle_turn(self) -> bool:
        more = False
        for task in self._tasks:
            try:
                more = bool(task()) or more
            except Exception as error:
                self._runtime.fault("an idle task", error)
        return more
