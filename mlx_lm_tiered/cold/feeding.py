"""From a job's arrays to bytes for the writer thread: one tensor a turn. Generation thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from ..caches import Later, made
from .arrays import to_bytes
from .background import Write, WriterThread


class Feed(NamedTuple):
    """An entry on its way to the writer, and its tensors that are still to come."""

    write: Write
    tensors: Iterator[tuple[str, mx.array | Later]]


class Feeder:
    """`begin` starts on the next job and returns its feed, or None when no job may be begun now."""

    def __init__(self, thread: WriterThread, begin: Callable[[], Feed | None]):
        self._thread = thread
        self._begin = begin
        self._feed: Feed | None = None

    def turn(self) -> bool:
        """Do one step: begin a job, or hand over one tensor. True when more can be done right now. Never waits for the writer."""
        if not self._thread.has_room():
            return False
        feed = self._feed
        if feed is None or feed.write.settled:
            self._feed = self._begin()
            if self._feed is not None:
                self._thread.start(self._feed.write)
            return self._feed is not None
        try:
            if (following := next(feed.tensors, None)) is not None:
                name, array = following
                self._thread.tensor(feed.write, name, to_bytes(made(array)))
                return self._thread.has_room()
        except Exception as error:  # mlx could not evaluate or copy it; the request path must not notice
            self._thread.cancel(feed.write, error)
        else:
            self._thread.commit(feed.write)
        self._feed = None
        return True

    @property
    def feeding(self) -> bool:
        """Whether tensors of an entry are still to come."""
        return self._feed is not None and not self._feed.write.settled

    def close(self) -> None:
        """Let go of the arrays."""
        self._feed = None
