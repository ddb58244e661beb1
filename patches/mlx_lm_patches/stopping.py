"""Stopping a server on a signal without losing what is running or not yet saved."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger("mlx_lm_patches")

DEFAULT_TIMEOUT = 120.0
# Of the time to stop, for requests before what is there is saved: one whose client has
# stalled must not take it all.
_DRAIN_SHARE = 0.75
_SETTLE_SECONDS = 1.0
LOST_TIMEOUT = 10.0  # when other ranks are lost
_GRACE_SECONDS = 0.1
_RECENT_HANDLERS = 64
_TASKS = Path("/proc/self/task")


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
        self._signals = 0
        self._lost = False
        self.ended = threading.Event()  # once all is saved that could be
        self._signalled = threading.Event()
        self._deadline = float("inf")
        self._saved = True
        self._finished = True
        self._httpd: Any = None
        self._bound = threading.Event()
        self._drainer = threading.Thread(target=self._drain, name="mlx-lm-shutdown", daemon=True)
        self._handlers: set[threading.Thread] = set()
        self._ended: deque[threading.Thread] = deque(maxlen=_RECENT_HANDLERS)

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
    def handling(self) -> Iterator[None]:
        """A connection's thread, while it runs."""
        thread = threading.current_thread()
        self._handlers.add(thread)
        try:
            yield
        finally:
            self._ended.append(thread)
            self._handlers.discard(thread)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handle the signals while the server's loop runs; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._drainer.start()
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
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)
        self.request()

    def request(self, lost: bool = False) -> None:
        """Stop as on the first signal; `lost` when the process is to end with 1 in any case."""
        self._lost |= lost
        if not self.requested:
            self.requested = True
            self._deadline = time.monotonic() + self._timeout
        if lost:
            # What the lost ones were to give is not computed any more; who waits for it waits in vain.
            self._deadline = min(self._deadline, time.monotonic() + LOST_TIMEOUT)
        self._signalled.set()

    def _drain(self) -> None:
        self._signalled.wait()
        with self._changed:
            log.info("stopping: waiting for %d running requests", self._running)
        self._finished = self._wait(self._left() * _DRAIN_SHARE)
        self._saved = self._try_to_save()
        if not self._finished and self._wait(self._left()):
            self._finished, self._saved = True, self._try_to_save()
        self.ended.set()
        self._bound.wait()
        self._httpd.shutdown()

    def _wait(self, timeout: float) -> bool:
        """Whether all requests ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout)

    def _try_to_save(self) -> bool:
        try:
            return self._save(self._left())
        except Exception as error:
            log.warning("saving at the stop failed: %s: %s", type(error).__name__, error)
            return False

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def end(self, generator: Any, join: Callable[[], None], release: Callable[[], None]) -> None:
        """After the loop, on the main thread: let the generation thread end (`join`), then `release` the plugins' threads.

        Raises SystemExit(1) when something was lost.
        """
        thread = threading.Thread(target=join, name="mlx-lm-join", daemon=True)
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
        _until_gone(generator._generation_thread)
        release()
        self._settle(generator)
        if self._lost or not (self._saved and self._finished):
            raise SystemExit(1)

    def _settle(self, generator: Any) -> None:
        """Let threads that used mlx end before the interpreter does.

        mlx frees a thread's compiled functions when the native thread ends, after
        Python has joined it, and takes the interpreter's lock for that. Once the
        interpreter goes away, whoever asks for the lock is ended, inside a C++
        destructor, which aborts the process (stock servers do, in a third of their
        stops and more). So wait for the native threads. One that waits for an idle
        client frees nothing; it is left.
        """
        until = time.monotonic() + _SETTLE_SECONDS
        self._drainer.join()
        for thread in list(self._handlers):
            thread.join(max(0.0, until - time.monotonic()))
        for thread in [generator._generation_thread, *self._ended]:
            while not thread.is_alive() and time.monotonic() < until and _native(thread):
                time.sleep(0.002)
        if not _TASKS.exists():
            time.sleep(_GRACE_SECONDS)

    def _and_unsaved(self) -> str:
        return "" if self._saved else " and not all of the prompt cache saved"


def _until_gone(thread: Any, timeout: float = 5.0) -> None:
    """Wait until the system's thread behind a joined Python thread has ended.

    mlx keeps compiled functions per thread. It lets them go when the thread ends,
    which is after `join` has returned, and needs the interpreter for it; while that
    is being finalized the C++ runtime aborts the process (core dump: the compile
    cache's destructor among the thread's TLS destructors, mlx 0.32.4).
    """
    if not os.path.isdir("/proc/self/task"):
        time.sleep(0.2)  # nothing tells here; it takes microseconds once this thread gives up the interpreter
        return
    deadline = time.monotonic() + timeout
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0.002)


def _native(thread: threading.Thread) -> bool:
    """Whether a thread that Python has joined still exists for the system (Linux can tell)."""
    return thread.native_id is not None and (_TASKS / str(thread.native_id)).exists()
