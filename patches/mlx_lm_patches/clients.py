"""The connection on which a request came, watched while the request is served."""

from __future__ import annotations

import socket
import time
from queue import Empty
from typing import Any

from .engine import ENGINE
from .mailbox import Cancelled, give_up
from .runtime import Runtime
from .served import Follower

LOOKS = 0.25  # seconds between two looks at a connection


class Client:
    """One HTTP thread's request. `context` is upstream's, once the request is being served."""

    def __init__(self, connection: socket.socket, runtime: Runtime):
        self._connection = connection
        self._runtime = runtime
        self._follower: Follower | None = None  # once the request is queued
        self._arrived = time.monotonic()
        self._looked = 0.0
        self._queue: Any = None
        self._context: Any = None

    def next_response(self, generator: Any, queue: Any) -> Any:
        """Upstream's `_await_response`, which raises Cancelled soon after the client has gone.

        A client that has closed its side for writing counts as gone: nothing tells
        them apart before the answer is written.
        """
        first, self._queue = queue is not self._queue, queue
        if self._follower is None:
            self._follower = Follower(self._runtime, queue, self._arrived)
        while True:
            if self._gone():
                give_up(queue)
                if engine := getattr(generator, ENGINE, None):
                    engine.wake()  # it may be held back
                if not first:
                    raise Cancelled
            try:
                response = queue.get(timeout=LOOKS)
            except Empty:
                if not generator.generation_available():
                    raise RuntimeError("generation thread died") from None
                continue
            if first and not isinstance(response, Exception):
                self._context = response
            self._follower.note(response)
            return response

    @property
    def context(self) -> Any:
        """Upstream's context of the request, once there is one."""
        return self._context

    def leave(self) -> None:
        """The request was answered, or will never be: whatever still works for it may stop."""
        if self._queue is not None:
            give_up(self._queue)
        if self._context is not None:
            self._context.stop()
        if self._follower is not None:
            self._follower.end()

    def _gone(self) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOKS:
            return False
        self._looked = now
        return closed(self._connection)


def closed(connection: socket.socket) -> bool:
    """Whether the other side of a connection has closed it. Takes nothing from what it has sent."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
