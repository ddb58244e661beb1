"""Work that other threads want done on the generation thread, which owns the tiers' entries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Busy(Exception):
    """The generation thread had no turn in time; nothing was done."""


class Orders:
    """Small pieces of work, done one a turn, while requests run as well. `wake` asks for a turn."""

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def do(self, work: Callable[[], T], timeout: float) -> T:
        """Have `work` done and wait for what it returns. Any thread but the generation thread. Raises Busy, and what `work` raises."""
        future: Future[T] = Future()
        self._waiting.append((future, work))
        self._wake()
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.cancel():
                raise Busy from None
            return future.result()  # it is being done

    def turn(self) -> bool:
        """Do one. Whether there was one. Generation thread only."""
        if not self._waiting:
            return False
        future, work = self._waiting.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        return True
