"""Stopping a server on a signal without losing what is running or not yet saved."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("mlx_lm_patches")

DEFAULT_TIMEOUT = 120.0


class Stopping:
    """Counts the running requests of one server, and stops it once on SIGTERM or SIGINT.

    The first signal ends admission; a thread waits for running requests, has the
    plugins save (`save(seconds left)`, False when something was lost), then ends
    the server's loop. A second signal ends the process at once with the exit
    code 128 + signal.
    """

    def __init__(self, timeout: float | None, save: Callable[[float], bool]):
        self._timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        self._save = save
        self._changed = threading.Condition()
        self._running = 0
        # Set by the signal handler: it may interrupt a holder of the condition, so it takes no lock.
        self.requested = False
        self._signalled = threading.Event()
        self._deadline = float("inf")
        self._saved = True
        self._finished = True
        self._httpd: Any = None
        self._bound = threading.Event()

    def bound(self, httpd: Any) -> None:
        """Tell which server to stop."""
        self._httpd = httpd
        self._bound.set()

    def enter(self) -> bool:
        """Begin a request; False when the server is stopping."""
        with self._changed:
            if self.requested:
                return False
            self._running += 1
            return True

    def leave(self) -> None:
        """End a request that `enter` began."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handle the signals while the server's loop runs; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        threading.Thread(target=self._drain, name="mlx-lm-shutdown", daemon=True).start()
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            # A shell's background job has SIGINT ignored, and so it stays.
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            if not self.requested:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True
        self._deadline = time.monotonic() + self._timeout
        self._signalled.set()

    def _drain(self) -> None:
        self._signalled.wait()
        with self._changed:
            log.info("stopping: waiting for %d running requests", self._running)
            self._finished = self._changed.wait_for(lambda: self._running == 0, self._left())
        try:
            self._saved = self._save(self._left())
        except Exception as error:
            self._saved = False
            log.warning("saving at the stop failed: %s: %s", type(error).__name__, error)
        self._bound.wait()
        self._httpd.shutdown()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def end(self, generator: Any, release: Callable[[], None]) -> None:
        """After the loop, on the main thread: let the generation thread end, then `release` the plugins' threads.

        Raises SystemExit(1) when something was lost.
        """
        thread = threading.Thread(target=generator.stop_and_join, name="mlx-lm-join", daemon=True)
        thread.start()
        thread.join(max(1.0, self._left()))
        if thread.is_alive() or not self._finished:
            log.error("stopped after %.0f seconds with requests unfinished%s", self._timeout, self._and_unsaved())
        elif not self._saved:
            log.error("stopped, but not all of the prompt cache could be saved")
        if thread.is_alive():
            # The generation thread is no daemon: only this ends the process before it ends its request.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        # A thread that is still in native code when the interpreter goes away can take the process down with it.
        release()
        if not (self._saved and self._finished):
            raise SystemExit(1)

    def _and_unsaved(self) -> str:
        return "" if self._saved else " and not all of the prompt cache saved"
